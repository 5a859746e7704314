"""The room of checkpoints: a run's state in files, and back.

May import model, train.guard, train.engine and what those may. `files`: what a checkpoint is, without torch; `save`
(with `staging`, copies in host memory): Saver; `load`: choose_checkpoint, load_checkpoint; `reshard`: on another number
of ranks or at another ZeRO stage; `resume`: whether a run may go on from one; `rollback`: back to one after a spike.
"""
