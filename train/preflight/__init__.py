"""Checks before a run begins; each of them can refuse it.

Without torch, before ranks start: `check` (all problems in one message), `sizes` (GPU memory and disk), `machine` (the
GPUs of this machine), `accelerate` (what accelerate's launcher was configured with). train/launch.py calls them, or
train/train.py under another launcher. With all ranks, with the key "preflight": `ranks` (equal configuration, software
and files; speed of GPUs and links), `gradients` (DeepSpeed's reduction).

May import model, train.config, train.data, train.engine, train.monitor, train.checkpoint, train.planning and what these
may.
"""
