"""The records of a run: metrics, logs, plots, and the model card.

File paths (`run_folder`), metrics (`metrics`, `trackers`), logs (`log`), starts and versions (`provenance`), reading a
run (`history`), plots (`plots`), and the model card (`model_card`).

May import model and train.files, but not the engine, the monitor or checkpoints. `run_folder` defines where each file
of a run is. train/trainer.py and train/train.py write the records, and train/plot.py reads them.
"""
