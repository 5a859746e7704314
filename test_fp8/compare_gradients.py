#!/usr/bin/env python3
"""Compare the gradients of FP8 and bf16 with float32, at the same weights and on the same samples.

    python test_fp8/compare_gradients.py --init_from output/RUN/hf --data data/pretrain [--output FILE.json]

Two training runs differ by seed noise, which hides a difference of half a percent. This comparison has no such noise.

"loss": difference to the float32 loss. "error": |g - r| / |r| over all parameters, where r is the float32 gradient. It
is reported for a micro-batch (mean over --batches) and for the sum of all micro-batches. Noise averages out in the sum,
so the error of the sum is systematic. "along": (g . r) / (r . r) of the sum; below 1, the gradient is too short.
"worst": the largest error of the sum in one weight matrix.

Trained weights are more informative than random ones: pass the Hugging Face folder of a run as --init_from. Without a
GPU, the CPU reference computes the cases. float32 always uses the reference modules with torch's SDPA.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from test_fp8.common import report
from test_fp8.common.options import DeviceDefault, model_config, option, positive, shared
from test_fp8.model.cases import PRECISIONS

OPTIONS = [
    option("--config", DeviceDefault("mistral_0.4b", "tiny"), "model with random weights", type=model_config),
    option("--init_from", None, "Hugging Face folder with weights, instead of --config", type=model_config),
    option("--data", None, "prepared data; default: random tokens", type=Path, metavar="FOLDER"),
    option("--rows", list(PRECISIONS), "cases to compute", nargs="+", choices=list(PRECISIONS)),
    option("--batches", 8, "number of micro-batches", type=positive),
    *shared(micro_batch=2, seq_length=DeviceDefault(2048, 64)),
]
COLUMNS: report.Columns = {
    "row": ("row", "<"),
    "loss": ("loss_difference", "+.5f"),
    "error": ("error_of_batch", ".4f"),
    "of sum": ("error_of_sum", ".4f"),
    "along": ("along", ".4f"),
    "worst": ("worst", ".4f"),
    "in": ("worst_matrix", "<"),
}


BENCHMARK = report.Benchmark(__file__, __doc__, OPTIONS, COLUMNS, "test_fp8.model.gradients")

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
