"""precision.auto: time the candidates on this GPU with this model and batch, and choose the fastest.

A candidate is an attention backend, FP8 or bf16, and launched kernels or CUDA graphs (`measure`). Nothing here imports
train/; train/planning/autotune.py makes the task of a run.
"""
