"""FP8: which recipes there are (recipes.py, without torch), what a configuration means on a machine (precision.py),
which modules are meant to run it (modules.py), the count of what ran (gemms.py), how healthy that is (health.py, by
what quantizers.py shows), its state and first scales, and the two libraries that it comes from (te_backend,
torchao_fp8).

Of model/ it imports what has no model in it (errors, keys, variants, config, documents, hf_folder, te_reference,
fused). Others ask Precision, fp8_modules, and count_gemms around a pass.
"""
