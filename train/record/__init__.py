"""The room of what a run leaves to read: where it lies (`run_folder`), what was measured on the way (`metrics`, which
also go to `trackers`), what was proved and on what (`provenance`), what rank 0 (`train_log`) and the others said
(`rank_log`); a run read again (`history`) and drawn (`plots`).

May import model and train.files; knows no engine, no guard, no checkpoints. Everybody asks `run_folder` where a file of
a run lies; train/loop.py and train/train.py write, train/plot.py reads.
"""
