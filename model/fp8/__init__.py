"""FP8 precision: recipes, module selection, counting of FP8 GEMMs, and health checks.

- recipes.py: the recipes and the "precision" section, without importing torch.
- precision.py: the "precision" section resolved for the current hardware.
- modules.py: selects the modules that run FP8. gemms.py counts the FP8 GEMMs that ran.
- health.py: statistics of FP8 operands, which quantizers.py intercepts.
- state.py, calibration.py: state and initial scales for delayed scaling.
- te_backend.py, torchao_fp8.py: interfaces to Transformer Engine and torchao.

From model/, this package imports only modules that do not build models (errors, keys, variants, config, documents,
hf_folder, te_reference, fused). Other code uses Precision, fp8_modules and count_gemms.
"""
