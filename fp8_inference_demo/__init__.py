"""FP8 inference with a trained Mistral or Llama model.

fp8_inference.py is the command, engine.py runs the model, and sampling.py draws the tokens. This package may import
model/, but not train/.
"""
