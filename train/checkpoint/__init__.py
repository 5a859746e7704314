"""Save checkpoints of a run, and resume from them.

May import model, train.monitor, train.engine and their dependencies. `files`: manifest, run state and verification,
without torch. `save`: the background save, with its host copies in `staging`. `load`: choose and load a checkpoint.
`reshard`: load with another number of ranks or ZeRO stage. `resume`: decide whether a run may resume. `rollback`: go
back to the last checkpoint after a spike.
"""
