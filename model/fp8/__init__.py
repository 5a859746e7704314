"""FP8: which recipes there are (recipes.py, without torch), what a configuration means on a machine (precision.py),
which modules run it (modules.py), its state and first scales, and the two libraries that it comes from, each imported
in one file (te_backend, torchao_fp8).

It imports nothing of model/ but documents and variants. Others ask Precision, and fp8_modules after a pass.
"""
