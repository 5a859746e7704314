"""Fused Triton kernels for Transformer Engine's modules, enabled by the "speed" section of the configuration.

    qkv_rope        split q, k and v, and apply their norms and rotary embeddings; rotate a single tensor
    swiglu          SwiGLU for separate gate and up tensors, with its gradients
    swiglu_fp8      SwiGLU for LayerNormMLP with its gradient, cast to FP8 with delayed scaling
    embedding       gradient of an embedding weight
    cross_entropy   the loss, with its gradient in the logits' dtype or in FP8
    operand_totals  sums for the FP8 health check

Models use these functions through model/fp8/te_backend.py, except operand_totals, which model/checks/health.py calls.
Without CUDA, Triton is not imported. The kernels depend on no other project file except a constant in te_reference.
"""
