"""The records of a run: metrics, logs and plots.

The modules cover file paths (`run_folder`), metrics (`metrics`, `trackers`), logs (`log`), starts and versions
(`provenance`), reading a run (`history`), and plots (`plots`).

This package may import model and train.files, but not the engine, the monitor or checkpoints. train/run.py,
train/trainer.py and train/train.py write the records, and train/plot.py reads them.
"""
