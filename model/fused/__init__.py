"""Several launches made into one, for Transformer Engine's modules on a GPU, by switches of the section "speed".

    qkv_rope        splitting and rotating q, k and v; rotating one alone
    swiglu          SwiGLU of te.Linear's two halves, and its gradients
    swiglu_fp8      SwiGLU of LayerNormMLP and its gradient as FP8, with the scale of delayed scaling
    embedding       the gradient of an embedding's weight
    cross_entropy   the loss in one kernel, its gradient in another, also as FP8
    operand_totals  what a look at the health of FP8 counts of an operand

fp8/te_backend.py hands them out, but for the last, which fp8/health.py takes; where there is no CUDA, Triton is not
imported. Imports nothing of the project but a constant of te_reference.
"""
