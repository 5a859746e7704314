"""Measure the training throughput of whole models in bf16 and with each FP8 recipe.

The compared implementations are this project's model variants te_linear and te_layer, transformers with and without
torch.compile, torchao, and Megatron-Core. Each measurement times whole optimizer steps as in train.py
(train/engine/step.py). The steps use DeepSpeed with ZeRO 1, float32 accumulation over --accumulation micro-batches,
gradient clipping and AdamW.

    python test_fp8/bench_model.py --config hare_1.1b --output FILE.json
    python test_fp8/bench_model.py --config hare_0.4b --rows 'te_*_graph' --attention fused flash
    python test_fp8/bench_model.py --rows hf_bf16 --row mine model.variant=te_layer speed.fused_rope=false
    python train/launch.py --nproc 2 test_fp8/bench_model.py --micro_batch 16 --attention flash \\
        --rows te_layer_fp8_delayed --row zero_3 precision.compute=fp8 deepspeed=ds_config_zero3.json

A benchmark case is a configuration to measure. --rows selects cases by name (with wildcards * and ?). --row adds a
case, which is defined by keys of the training configuration.

Each case is compared with the bf16 model of transformers. The weights must be bit-identical, and logits and loss must
agree within the printed tolerances. FP8 GEMMs must run as configured, and the attention must agree with SDPA. If a case
fails this check, the reason is reported instead of a speed, and the exit status is 1.

The cases hf_* and torchao_*, which use modules from transformers, are measured with each of torch's SDPA backends
(--sdpa) and loss implementations (--loss), and the fastest is reported. The loss "liger" needs liger-kernel. The cases
megatron_core_* use Megatron-Core's GPTModel with Transformer Engine modules, its distributed optimizer and its fusions.
These cases need Python 3.12 and pip install --no-deps megatron-core==0.19.2.

The first round tries each --micro_batch with each attention and loss, and later rounds use the fastest setting. Every
second round runs in reverse order. Settings that do not fit in memory are skipped. The throughput is computed from the
median of all timed steps. "drift" is the relative difference between rounds. Memory is the peak on rank 0. CUDA graphs
use a separate memory pool, which only the column "reserved" includes completely. "launch ms" is the time that the host
needs to enqueue the forward and backward pass of a micro-batch.

Without a GPU, the CPU reference implementation runs a small model, and its speeds are meaningless.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.variants import ATTENTION_BACKENDS
from test_fp8.common import report
from test_fp8.common.options import STEP_OPTIONS, DeviceDefault, option, positive, shared
from test_fp8.model import cases

ROWS = DeviceDefault(cases.DEFAULT_ROWS, cases.CPU_ROWS)
SDPA = DeviceDefault(["cudnn", "flash"], ["auto"])
LOSSES = DeviceDefault(["compiled", "liger"], ["torch"])
OPTIONS = [
    *STEP_OPTIONS,
    *shared(rounds=DeviceDefault(3, 2)),
    option("--rows", ROWS, "Names of the benchmark cases to measure. Wildcards are allowed.", nargs="*"),
    option(
        "--micro_batch",
        DeviceDefault([8, 16], [2]),
        "Micro-batch sizes to try, in samples.",
        nargs="+",
        type=positive,
    ),
    option(
        "--attention",
        ["auto"],
        "Attention backends to try in the te_* and megatron_core_* cases.",
        nargs="+",
        choices=list(ATTENTION_BACKENDS),
    ),
    option(
        "--sdpa",
        SDPA,
        "SDPA backends to try in the hf_* and torchao_* cases.",
        nargs="+",
        choices=cases.SDPA,
    ),
    option(
        "--loss",
        LOSSES,
        "Loss implementations to try in the hf_* and torchao_* cases.",
        nargs="+",
        choices=cases.LOSSES,
    ),
]
COLUMNS: report.Columns = {
    "row": (lambda r: r["row"] + " *" * r["best_bf16"], "<"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    f"x {cases.BASELINE}": (f"ratio_to_{cases.BASELINE}", ".2f"),
    "x bf16": ("ratio_to_best_bf16", ".2f"),
    "TFLOP/s": ("tflops", ".3g"),
    "batch": ("micro_batch", "d"),
    "step ms": ("step_ms", ".2f"),
    "launch ms": ("launch_ms", ".2f"),
    "GiB": ("allocated_gib", ".1f"),
    "reserved": ("reserved_gib", ".1f"),
    "prepare s": ("prepare_s", ".1f"),
    "drift": ("drift", ".1%"),
    "FP8": ("fp8_modules", "d"),
    "loss": ("loss", ".4f"),
    "loss by": ("loss_kind", "<"),
    "attention": ("attention", "<"),
}
BENCHMARK = report.Benchmark(__file__, __doc__, OPTIONS, COLUMNS, "test_fp8.model.bench")

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
