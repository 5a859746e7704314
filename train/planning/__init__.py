"""Predict the GPU memory and speed of a training run, and recommend settings.

- `setting` collects the settings that determine memory and speed.
- `memory` predicts GPU memory for the startup checks, train/plan.py, the tables in docs/hardware.md and the run's log.
- `speed` predicts the time of a step.
- `recommend` selects the fastest setting that fits into GPU memory.
- `plan` creates the output of train/plan.py.
- `autotune` measures which precision is the fastest, for precision.auto. Only this module needs torch.

This package may import model, train.config and train.checkpoint, and everything that those packages may import.
"""
