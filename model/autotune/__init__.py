"""precision.auto: what is fastest for this model, batch and GPU, by measurement in at most a minute.

    attention backends, checked, then timed  ->  whole steps: FP8, bf16 and FP8 again, for the GPU gets warmer, each
    launched normally and as CUDA graphs  ->  the fastest step

`task` says what is measured and for what, `measure` measures it, `choice` has the rules and the record of it. It builds
models with build.py and imports nothing of train/, whose planning/autotune.py gives it a task.
"""
