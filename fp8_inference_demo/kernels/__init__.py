"""Triton inference kernels for Hopper GPUs. fp8_inference_demo/reference.py has the same operations in torch.

- one_row.py decodes a single row. The time to read the weights dominates. Most weights are converted to float32 after
  loading.
- rows.py and gemm.py process several rows with FP8 tensor cores. Each row of activations is stored as FP8 codes and a
  scale. With few rows, a second FP8 code stores 16 times the rounding error of the first code. This keeps the precision
  of bf16. rows.py also finishes a greedy decoding step.
- attention.py attends to the KV cache for one token per row.

Each kernel starts before the previous kernel has finished (programmatic dependent launch). It first loads data that no
kernel writes in this step: weights, positions, and older keys and values. Then it waits for the previous kernel before
it reads anything else.
"""

from fp8_inference_demo.kernels.attention import attend_cache
from fp8_inference_demo.kernels.gemm import gemm, swiglu_gemm
from fp8_inference_demo.kernels.one_row import decode_layer, head
from fp8_inference_demo.kernels.rows import add, add_norm_rows, rotate_into_cache, rows, take_likeliest

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
