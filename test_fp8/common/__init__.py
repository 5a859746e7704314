"""What all benchmarks share: cases, command lines (options), programs with their tables and reports (report), timing
and memory (timing), the check that two models are the same (same_model), processes that they start (launch), and
prepared folders made by hand (folders), which tests use, too.

May import: model, train.data.format, train.data.stream, train.config, train.launchers, train.files,
train.monitor.signals, train.record. cases, options, report and launch import torch only when they need it.
"""
