"""Code that all benchmarks share.

- `cases` parses and selects benchmark cases.
- `options` declares command-line options.
- `report` runs a benchmark, prints its table and writes its report.
- `timing` measures time and GPU memory.
- `same_model` checks that two models are equal.
- `launch` starts child processes.

This package may import model, train.data.stream, train.config, train.rank_env, train.files,
train.monitor.signals and train.record. cases, options, report and launch import torch only when they need it.
"""
