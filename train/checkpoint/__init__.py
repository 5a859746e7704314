"""Checkpoints: save the state of a run to files, and resume from them.

May import model, train.monitor, train.engine and what those may. `files`: manifest, run state and verification, without
torch; `save` (with `staging`, copies in host memory): Saver; `load`: choose_checkpoint, load_checkpoint; `reshard`: for
another number of ranks or ZeRO stage; `resume`: whether a run may resume; `rollback`: after a spike.
"""
