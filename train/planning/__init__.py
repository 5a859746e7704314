"""Predict the GPU memory and speed of a training run, and recommend settings.

- `setting` collects the settings that determine memory and speed.
- `memory` predicts GPU memory for the startup checks, train/plan.py, the tables in docs/hardware.md and the run's log.
- `speed` predicts the time of a step.
- `prediction` selects the fastest setting that fits into GPU memory, and creates the output of train/plan.py.

This package does not import torch. It may import model and train.config, and everything that those packages may import.
"""
