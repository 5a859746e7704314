"""Measure the training throughput of whole models in bf16 and with each FP8 recipe.

Compares transformers with and without torch.compile, torchao, te_linear, te_layer and Megatron-Core, as bare passes and
as optimizer steps in DeepSpeed.

    python test_fp8/bench_model.py --config hare_1.1b --output FILE.json
    python test_fp8/bench_model.py --config hare_0.4b --rows 'te_*' --step_rows '*_graph' --attention fused flash
    python test_fp8/bench_model.py --rows hf_bf16 --row mine model.variant=te_layer speed.fused_rope=false
    python train/launch.py --nproc 2 test_fp8/bench_model.py --measure step --micro_batch 16 --attention flash \\
        --rows te_layer_fp8_delayed --row zero_3 precision.compute=fp8 deepspeed=ds_config_zero3.json

--rows and --step_rows select cases by name (with wildcards * and ?). --row adds a case, given by keys of the training
configuration.

--measure bare   forward + backward of a micro-batch without an optimizer. As in training, the FP8 copies of the weights
                 are kept for --accumulation passes.
--measure step   a whole optimizer step as in train.py (train/engine/step.py): DeepSpeed with ZeRO 1 and float32
                 accumulation over --accumulation micro-batches, clipping, AdamW.

Each case is checked against transformers' model in bf16: equal weights, bit for bit; logits and loss of the same tokens
within the printed tolerances; FP8 GEMMs exactly as configured; and an attention that agrees with SDPA. A case that
fails is reported with the reason instead of a speed, and the exit status is 1.

The cases with transformers' modules (hf, torchao) use the fastest of torch's SDPA backends (--sdpa) and losses (--loss;
"liger" if liger-kernel is installed). megatron_core_* (pip install --no-deps megatron-core==0.19.2) is Megatron-Core's
GPTModel of Transformer Engine modules, with its distributed optimizer and fusions. It is measured only in steps.

The first round tries each --micro_batch with each attention and loss; later rounds use the fastest. Every second round
runs in reverse order. Settings that do not fit in memory are skipped. Throughput is computed from the median of all
timed passes or steps. "drift" is the difference between rounds. Memory is the peak, on several ranks that of rank 0.
CUDA graphs have a separate memory pool, which only "reserved" counts in full. "launch ms" is the host's time to enqueue
a pass.

Without a GPU, the CPU reference runs a small model. Its speeds are meaningless.
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
STEP_ROWS = DeviceDefault(cases.DEFAULT_STEP_ROWS, cases.CPU_ROWS)
SDPA = DeviceDefault(["cudnn", "flash"], ["auto"])
LOSSES = DeviceDefault(["compiled", "liger"], ["torch"])
OPTIONS = [
    *STEP_OPTIONS,
    *shared(rounds=DeviceDefault(3, 2)),
    option("--rows", ROWS, "cases to measure: names or patterns", nargs="*"),
    option("--step_rows", STEP_ROWS, "cases among --rows to measure in steps too", nargs="*"),
    option(
        "--measure",
        list(cases.MEASURES),
        "bare passes, whole steps or both",
        nargs="+",
        choices=cases.MEASURES,
    ),
    option(
        "--micro_batch",
        DeviceDefault([8, 16], [2]),
        "samples per micro-batch to try",
        nargs="+",
        type=positive,
    ),
    option(
        "--attention",
        ["auto"],
        "attention of the te and megatron_core cases",
        nargs="+",
        choices=list(ATTENTION_BACKENDS),
    ),
    option("--sdpa", SDPA, "SDPA backends of the hf and torchao cases", nargs="+", choices=cases.SDPA),
    option("--loss", LOSSES, "losses of the hf and torchao cases", nargs="+", choices=cases.LOSSES),
]
COLUMNS: report.Columns = {
    "measure": ("measure", "<"),
    "row": (lambda r: r["row"] + " *" * r["best_bf16"], "<"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    f"x {cases.BASELINE}": (f"ratio_to_{cases.BASELINE}", ".2f"),
    "x bf16": ("ratio_to_best_bf16", ".2f"),
    "TFLOP/s": ("tflops", ".3g"),
    "batch": ("micro_batch", "d"),
    "pass ms": ("pass_ms", ".2f"),
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
