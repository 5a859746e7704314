"""Triton kernels of the engine for Hopper GPUs. The same operations in torch are in fp8_inference_demo/reference.py.

one_row.py: decoding of one row. Reading the weights dominates the time; they are widened after loading.
rows.py, gemm.py: several rows, multiplied FP8 by FP8 on the tensor cores. Each row is written as FP8 codes and a scale.
With few rows, a second code with 16 times the rounding error of the first keeps bf16's precision.
attention.py: attention of one token per row to the cache. sampling.py: the end of a greedy step.

Each kernel is launched while the previous one ends (programmatic dependent launch). It first loads the data that no
kernel of this step writes (its weights, the positions, and the older keys and values). Then it waits for the previous
kernel before it reads anything else.
"""

from fp8_inference_demo.kernels.attention import attend_cache
from fp8_inference_demo.kernels.gemm import gemm, swiglu_gemm
from fp8_inference_demo.kernels.one_row import decode_layer, head
from fp8_inference_demo.kernels.rows import add, add_norm_rows, rotate_into_cache, rows
from fp8_inference_demo.kernels.sampling import take_likeliest

__all__ = [
    "add",
    "add_norm_rows",
    "attend_cache",
    "decode_layer",
    "gemm",
    "head",
    "rotate_into_cache",
    "rows",
    "swiglu_gemm",
    "take_likeliest",
]
