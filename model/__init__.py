"""A Mistral, its variants and their FP8: config.py and variants.py say what a model may be, build.py makes it, proof.py
shows what it runs on.

It imports nothing of train/. Without torch, for who checks arguments: config, variants, keys and fp8/recipes.
transformers' model class is imported only where it is used (hf_baseline).
"""
