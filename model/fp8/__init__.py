"""FP8: recipes, precision of a model, module selection, startup checks and health.

- recipes.py: the recipes and the "precision" section, without torch.
- precision.py: the section resolved on this machine.
- modules.py: which modules run FP8. gemms.py counts the FP8 GEMMs that ran.
- health.py: statistics of FP8 operands, which quantizers.py intercepts.
- state.py, calibration.py: state and first scales of delayed scaling.
- te_backend.py, torchao_fp8.py: the two libraries.

From model/ this package imports only modules that contain no model (errors, keys, variants, config, documents,
hf_folder, te_reference, fused). Other code uses Precision, fp8_modules, and count_gemms around a pass.
"""
