"""precision.auto: time candidate settings on the current GPU with a training model and batch, and choose the fastest.

A candidate combines an attention backend, FP8 or bf16, and execution with or without CUDA graphs
(model/autotune/measure.py). On a GPU that does not support FP8, only bf16 candidates are timed.

This package does not import train/. train/planning/autotune.py creates the task for a training run.
"""
