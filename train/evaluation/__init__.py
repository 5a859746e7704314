"""Evaluation of a trained model outside of training: the model (models), the text (texts), the losses (scores).

May import model, train.checkpoint and what that may, and train.prepare.corpus, which reads text. Others use of it: only
train/evaluate.py. A run evaluates by itself, in train/trainer.py.
"""
