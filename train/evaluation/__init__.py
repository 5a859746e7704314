"""Evaluation of a trained model outside of training: model (models), text (texts), losses (scores), report (evaluation).

May import model, train.checkpoint and what that may, and train.prepare.corpus, which reads text. Others use of it: only
train/evaluate.py. A run evaluates by itself, in train/trainer.py.
"""
