"""Text from a trained Mistral in FP8: fp8_inference.py is the command, engine.py what runs, sampling.py how a token is
drawn.

It imports model/ alone.
"""
