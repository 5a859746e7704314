"""Fused Triton kernels for Transformer Engine's modules on a GPU, enabled by the switches of the "speed" section.

    qkv_rope        split q, k and v and rotate q and k; rotate a single tensor
    swiglu          SwiGLU of te.Linear's two halves, and its gradients
    swiglu_fp8      SwiGLU of LayerNormMLP and its gradient, cast to FP8 with delayed scaling
    embedding       gradient of an embedding's weight
    cross_entropy   the loss, and its gradient in its own dtype or in FP8
    operand_totals  sums for the FP8 health check

fp8/te_backend.py provides these functions to models, except operand_totals, which fp8/health.py calls. Without CUDA,
Triton is not imported. From this project, the kernels import only a constant of te_reference.
"""
