"""The room of what is known before a run begins: all that can refuse it and needs neither a model nor torch.

May import model.config, model.variants, train.config, train.data, train.guard.lock, train.checkpoint (files, resume)
and what these may; nothing of it imports torch. `check`: what keeps a run from starting, in one message; `sizes`: what
it needs of GPU memory and disk; `machine`: which CUDA devices there are, and whether memory ran out; `accelerate`: what
accelerate's launcher was told otherwise. train/launch.py asks before it starts ranks, train/train.py where another
launcher did.
"""
