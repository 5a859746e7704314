"""The room of what a run leaves to read: where it lies (`run_folder`), and what was measured on the way (`metrics`).

May import model and train.files; knows no engine, no guard, no checkpoints. Everybody asks `run_folder` where a file of
a run lies; train/loop.py and train/train.py write `metrics`.
"""
