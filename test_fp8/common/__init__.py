"""Shared code of the benchmarks.

Cases, command lines (options), programs with tables and reports (report), timing and memory (timing), the check that
two models are equal (same_model), child processes (launch), and synthetic prepared folders (folders), which tests use
too.

May import: model, train.data.format, train.data.stream, train.config, train.launchers, train.files,
train.monitor.signals, train.record. cases, options, report and launch import torch only when they need it.
"""
