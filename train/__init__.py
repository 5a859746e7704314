"""How a Mistral is trained: train.py is the story, setup.py and loop.py its chapters, the others commands and parts."""
