"""FP8: which recipes there are (recipes.py, without torch), what of a model runs it and on what machine (precision.py),
its state and first scales, and the two libraries it comes from, each imported in one file (te_backend, torchao_fp8).

It imports nothing of model/ but documents and variants. Others ask Precision, and fp8_modules after a pass.
"""
