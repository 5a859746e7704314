"""FP8 inference with a trained Mistral model.

fp8_inference.py is the command, engine.py runs the model, and sampling.py draws the tokens. Imports only model/.
"""
