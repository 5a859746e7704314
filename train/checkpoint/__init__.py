"""Save checkpoints of a run, and resume from checkpoints.

This package may import model, train.monitor, train.engine and their dependencies. `files`: manifest, run state and
verification, without torch. `save`: save in the background, from a copy in host memory. `load`: choose and load a
checkpoint, and return to the last checkpoint after a loss spike. `reshard`: load a checkpoint with a different number
of ranks or ZeRO stage. `resume`: check the configuration changes of a resumed run.
"""
