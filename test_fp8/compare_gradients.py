#!/usr/bin/env python3
"""How far the gradients of FP8 and bf16 are from float32's, at the same weights and on the same samples.

    python test_fp8/compare_gradients.py --init_from output/RUN/hf --data data/pretrain [--output FILE.json]

Two trainings drift apart by seed noise, which hides a difference of half a percent. Here nothing drifts: every case
computes the gradient of the same samples at the same weights.

"loss": difference to float32's. "error": |g - r| / |r| over all parameters, r in float32, of a micro-batch (the mean
over --batches of them) and of the sum of all of them: noise averages out in the sum, what remains is systematic.
"along": (g . r) / (r . r) of the sum: below 1 the gradient is too short. "worst": the largest error of the sum in one
weight matrix.

Weights that were trained for a while tell more than random ones: --init_from takes the Hugging Face folder of a run.
Without a GPU the CPU reference computes the cases; float32 is always the reference modules' with torch's SDPA.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from test_fp8.common import report
from test_fp8.common.options import ByMachine, model_config, option, positive, shared
from test_fp8.model.cases import PRECISIONS

OPTIONS = [
    option("--config", ByMachine("mistral_0.4b", "tiny"), "with random weights", type=model_config),
    option("--init_from", None, "a Hugging Face folder with weights instead", type=model_config),
    option("--data", None, "of prepare_data.py; default: random tokens", type=Path, metavar="FOLDER"),
    option("--rows", list(PRECISIONS), "which of them", nargs="+", choices=list(PRECISIONS)),
    option("--batches", 8, "micro-batches", type=positive),
    *shared(micro_batch=2, seq_length=ByMachine(2048, 64)),
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
