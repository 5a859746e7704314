"""Training of Mistral models.

train.py is the entry point. run.py runs a training from start to export, phase.py builds its model and engine, and
trainer.py takes its steps. The other files in this folder are commands and helpers.
"""
