"""Monitors of a running training: each file watches for one kind of problem.

May import model, train.engine and what that may; knows no checkpoints. `lock`: another run in the same folder;
`signals`: asked to stop; `watchdog`: a rank that hangs; `slow_ranks`: one that is slow; `health`: steps that are not
finite, spikes; `replicas`: ranks whose weights differ. train/trainer.py asks them at fixed points of each step.
"""
