"""What a run leaves to read: its folder (`run_folder`), metrics (`metrics`, `trackers`), the log of each rank (`log`),
starts and versions (`provenance`); a run read again (`history`) and drawn (`plots`).

May import model and train.files; knows no engine, no monitor, no checkpoints. Everybody asks `run_folder` where a file
of a run lies; train/trainer.py and train/train.py write, train/plot.py reads.
"""
