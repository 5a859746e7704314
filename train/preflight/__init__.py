"""Startup checks: a run that cannot work is refused before its first step.

These run before ranks start, without torch. train/launch.py calls them, or train/train.py under another launcher:
`check` (collects all problems in one message), `sizes` (GPU memory and disk), `machine` (the GPUs of this machine) and
`accelerate` (the configuration of accelerate's launcher).

These run on all ranks, if the key "preflight" asks for them: `ranks` (equal configuration, software and files; speed of
GPUs and links) and `gradients` (DeepSpeed's reduction of gradients).

May import model, train.config, train.data, train.engine, train.monitor, train.checkpoint, train.planning and what these
may.
"""
