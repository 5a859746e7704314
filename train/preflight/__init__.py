"""Startup checks, which run before the first step and refuse a run that cannot work.

The following modules run before the ranks start and do not need torch. train/launch.py calls them, or train/train.py if
another launcher is used.

- `check` runs all checks, also of the configuration of `accelerate launch`, and reports all problems in one message.
- `sizes` checks GPU memory and disk space.
- `machine` lists the GPUs of this host.

The following modules run on all ranks, depending on the configuration key "preflight".

- `ranks` compares configuration, software and files, and measures the speed of GPUs and links.
- `gradients` checks that DeepSpeed reduces gradients correctly.

This package may import model, train.config, train.data, train.engine, train.monitor, train.checkpoint and
train.planning, and everything that those packages may import.
"""
