"""What the kernels share."""

from __future__ import annotations

from typing import TypeAlias

import torch

# Programs that keep all multiprocessors of the largest Hopper busy.
PROGRAMS = 264

Sums: TypeAlias = torch.Tensor
"""What `gemm` returns: [sums, M, R], to be added up by whoever reads it."""
