#!/usr/bin/env python3
"""Compare FP8 and bf16 gradients with float32 gradients, for the same weights and the same samples.

    python test_fp8/compare_gradients.py --init_from output/RUN/hf --data data/pretrain [--output FILE.json]

Two training runs differ by seed noise, which hides differences of half a percent or less. This comparison has no seed
noise.

The table has the following columns, where g is the gradient in FP8 or bf16, and r is the float32 gradient:

    loss      difference from the float32 loss
    error     |g - r| / |r| over all parameters for one micro-batch, averaged over --batches micro-batches
    of sum    |g - r| / |r| for the gradients summed over all micro-batches; in this sum, random errors average out
    along     (g . r) / (r . r) for the summed gradients; the gradient is too small if this value is below 1
    worst     the largest "of sum" of a single weight matrix
    to bf16   |g - b| / |b| over the matrices of the decoder layers for the first micro-batch, where b is the gradient
              in bf16; a new run logs the same figure

Trained weights give more realistic results than random weights. To use them, pass the Hugging Face folder of a run as
--init_from. Without a GPU, the CPU reference implementation computes FP8 and bf16. float32 always uses this
implementation, with torch's SDPA.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from test_fp8.common import report
from test_fp8.common.options import DeviceDefault, model_config, option, positive, shared
from test_fp8.model.cases import PRECISIONS

OPTIONS = [
    option(
        "--config",
        DeviceDefault("mistral_0.4b", "tiny"),
        "Name or path of the model configuration. The weights are initialized randomly.",
        type=model_config,
    ),
    option(
        "--init_from",
        None,
        "Hugging Face folder with a trained model to use instead of --config.",
        type=model_config,
    ),
    option(
        "--initialization",
        "scaled",
        "How the random weights are drawn (model.initialization).",
        choices=["scaled", "normal"],
    ),
    option(
        "--data",
        None,
        "Folder with prepared data to use as inputs. Default: random tokens.",
        type=Path,
        metavar="FOLDER",
    ),
    option(
        "--rows", list(PRECISIONS), "Names of the precisions to compare.", nargs="+", choices=list(PRECISIONS)
    ),
    option("--batches", 8, "Number of micro-batches to compare.", type=positive),
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
    "to bf16": ("decoder_error_to_bf16", ".4f"),
}


BENCHMARK = report.Benchmark(__file__, __doc__, OPTIONS, COLUMNS, "test_fp8.model.gradients")

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
