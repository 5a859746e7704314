"""precision.auto: time candidate settings on this GPU with the model and batch of a run, and choose the fastest.

A candidate is an attention backend, FP8 or bf16, and launched kernels or CUDA graphs (`measure`). This package does not
import train/; train/planning/autotune.py creates the task for a run.
"""
