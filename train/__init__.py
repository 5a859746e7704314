"""How a Mistral is trained: train.py runs a training, setup.py and trainer.py build it; the others are commands."""
