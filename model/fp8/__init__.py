"""FP8 precision: recipes, module selection, and the interfaces to Transformer Engine and torchao.

- recipes.py: the recipes and the "precision" section, without importing torch.
- precision.py: the "precision" section resolved for the current hardware.
- modules.py: selects the modules that run FP8.
- state.py: state and initial scales for delayed scaling.
- te_backend.py, torchao_fp8.py: interfaces to Transformer Engine and torchao.

From model/, this package imports only modules that do not build models (errors, keys, variants, config, documents,
hf_folder, te_reference, fused). model/checks guards FP8.
"""
