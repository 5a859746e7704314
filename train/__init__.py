"""Train Mistral, Llama and Qwen3 models.

train.py is the entry point. run.py runs a training from start to export, phase.py builds its model and engine, and
trainer.py runs its optimizer steps. The other files in this folder are commands and helpers.
"""
