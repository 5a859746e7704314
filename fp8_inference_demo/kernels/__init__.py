"""The engine's operations in Triton, for a Hopper GPU; fp8_inference_demo/reference.py has the same in torch.

one_row.py: decoding of one row, whose time is that of reading the weights; they are widened as they come.
rows.py, gemm.py: several rows, whose products are the tensor cores', FP8 by FP8. A row is written as codes and a
scale, once, or, where few rows shall keep bf16's precision, twice: a second code holds 16 times what the first leaves.
attention.py: one token of each row over the cache. sampling.py: the end of a greedy step.

Each kernel is launched while the one before it ends (programmatic dependent launch): it asks for what no kernel of this
step writes, its weights, the positions and the older keys and values, and then waits before it reads anything else.
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
