"""Predict memory and speed of a run and recommend settings (`setting`, `memory`, `speed`, `recommend`, `plan`, without
torch), and precision.auto, which measures instead (`autotune`).

May import train.config, train.checkpoint and what these may, and model. Preflight, the tables of docs/hardware.md,
train/plan.py and the log of a run use the one account of GPU memory in `memory`.
"""
