"""Train Mistral, Llama and Qwen3 models.

train.py is the entry point. run.py executes a training run from startup to export, phase.py builds the model and the
engine of each phase, and trainer.py runs the optimizer steps. The other files in this folder are commands and helpers.
"""
