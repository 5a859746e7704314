"""Monitor a training run. Each file detects one kind of problem.

    lock         another run uses the same output_dir
    signals      a signal requests a stop
    watchdog     a rank hangs
    spikes       the loss or the gradient norm has a spike
    replicas     the weights differ between ranks
    fp8_alarms   FP8 is too inaccurate for an operand of a GEMM

train/trainer.py calls the monitors at fixed points of each step. This package may import model, train.record,
train.engine and its dependencies, but not train.checkpoint.
"""
