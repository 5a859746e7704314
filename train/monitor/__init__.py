"""Monitors of a running training: each file detects one kind of problem.

May import model, train.engine and its dependencies, but not train.checkpoint. `lock`: another run uses the same folder.
`signals`: stop requests. `watchdog`: a rank hangs. `slow_ranks`: a rank is slow. `health`: non-finite steps and spikes.
`replicas`: the weights of ranks differ. `fp8_alarms`: FP8 loses too much of an operand. train/trainer.py calls them at
fixed points of each step.
"""
