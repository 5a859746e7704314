"""Predict memory and speed of a run and recommend settings (`setting`, `memory`, `speed`, `recommend`, `plan`, without
torch), or measure the fastest precision (`autotune`, for precision.auto).

`memory` is the only model of GPU memory: the startup checks, train/plan.py, the tables of docs/hardware.md and the log
of a run use it.

May import train.config, train.checkpoint and what these may, and model.
"""
