"""Predict memory and speed of a run, and recommend settings.

`setting`, `memory`, `speed`, `recommend` and `plan` do not need torch. `autotune` measures the fastest precision, for
precision.auto.

`memory` is the only model of GPU memory: the startup checks, train/plan.py, the tables of docs/hardware.md and the log
of a run use it.

May import train.config, train.checkpoint and what these may, and model.
"""
