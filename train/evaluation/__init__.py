"""Evaluation outside of training.

The model (`models`), data (`texts`), losses (`scores`) and report (`evaluation`).

May import model, train.checkpoint and its imports, and train.prepare.corpus, which reads text. Used only by
train/evaluate.py. Evaluation during training is in train/trainer.py.
"""
