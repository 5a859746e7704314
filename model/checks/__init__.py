"""What guards FP8 in a training run.

- startup.py: checks before the first step that the modules run FP8 and that attention is right.
- numerics.py: compares loss and gradients of a one-layer model with float32.
- gemm_counts.py: counts the FP8 GEMMs that ran.
- health.py: statistics of FP8 operands, which quantize_hooks.py intercepts.
"""
