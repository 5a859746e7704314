"""Training of Mistral models.

train.py is the entry point, and trainer.py runs the training. The other files in this folder are commands and helpers.
"""
