"""Evaluation outside of training: the model (models), the text (texts), the losses (scores), all of it (evaluation).

May import model, train.checkpoint and what that may, and train.prepare.corpus, which reads text. Others use of it: only
train/evaluate.py. A run evaluates by itself, in train/trainer.py.
"""
