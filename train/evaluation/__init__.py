"""Evaluate a checkpoint or Hugging Face model on prepared data or text, for train/evaluate.py.

    models        find and build the model
    texts         read the evaluation data
    evaluation    compute the losses and build the report

May import model, train.checkpoint and its imports, and train.prepare.corpus, which reads text. Evaluation during
training is in train/trainer.py.
"""
