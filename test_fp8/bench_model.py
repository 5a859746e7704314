#!/usr/bin/env python3
"""Training throughput of a whole model: transformers without and with torch.compile, torchao, te_linear and te_layer,
and Megatron-Core, in bf16 and FP8 by recipe, as bare passes and inside DeepSpeed; with Transformer Engine's modules
without and with CUDA graphs, Megatron's rows without.

    python test_fp8/bench_model.py --config hare_1.1b --output FILE.json
    python test_fp8/bench_model.py --config hare_0.4b --rows 'te_*' --step_rows '*_graph' --attention fused flash
    python test_fp8/bench_model.py --rows hf_bf16 --row mine model.variant=te_layer speed.fused_rope=false

    python train/launch.py --nproc 2 test_fp8/bench_model.py --measure step --micro_batch 16 --attention flash \\
        --rows te_layer_fp8_delayed --row zero_3 precision.compute=fp8 deepspeed=ds_config_zero3.json \\
        --one_rank ONE.json

--config: a name of model/configs, a MistralConfig JSON, or a folder that has one. --rows and --step_rows choose rows by
name (* and ? as in file names; '*' is all); --row adds one, in keys of the training configuration.

measure "bare"   forward + backward of a micro-batch, gradients dropped, no optimizer. FP8 copies of the weights are
                 kept for --accumulation passes, as in training.
measure "step"   a whole optimizer step as train/train.py makes it (train/engine/step.py): DeepSpeed with ZeRO 1 and
                 float32 accumulation over --accumulation micro-batches, clipping, AdamW.
"DeepSpeed"      what DeepSpeed adds, as a share of the step: 1 - (accumulation x pass + optimizer) / step. The passes
                 take turns with the steps and run through the same model object, captured graphs and compiled code.
                 Where weight-gradient GEMMs add into DeepSpeed's float32 buffer (speed.main_grad) they do so in the
                 passes too; elsewhere adding up gradients counts as DeepSpeed's. The optimizer is plain torch on
                 parameters of the same sizes: norm, clipping, AdamW on float32 masters, copy to bf16, zeroed gradients.
                 In rows muon_* what Muon takes besides counts as DeepSpeed's: its cost is the difference of the steps.

Each row must be the model that transformers' in bf16 is: the same weights, bit for bit; as many parameters; logits and
loss of the same random tokens within the tolerances that are printed; FP8 where it says FP8 and nowhere else; an
attention that agrees with SDPA. A row that is not is left out with the reason, and the exit status is 1.

The others get what a competent user gives them, chosen by measurement. hf and torchao: torch's SDPA pinned to each of
--sdpa ("fa4" is FlashAttention-4 in torch, a prototype), each --loss ("compiled": torch.compile's cross entropy;
"liger": Liger's of lm_head and loss at once, where liger-kernel is installed), and the fused AdamW that all have;
without and with torch.compile are two rows. megatron_core_*, where megatron-core is installed (pip install --no-deps
megatron-core==0.19.2): its GPTModel of TE's modules with its distributed optimizer, fused weight gradients, rotation
and cross entropy, in rows *_op_fuser with TE's op fuser; in the measure "step" alone, which then is its own.

Rows take turns: each of --rounds rounds visits all rows, every second one in reverse. A visit builds the model, checks
it (the first time), warms up, times, and frees everything. The first round tries each --micro_batch with each attention
(and then, with the fastest attention, each --loss), later ones the row's fastest; "step" begins with what was fastest
bare.
What does not fit the memory is a reason, no failure. Throughput is from the median of all timed passes (steps); "drift"
is how far apart the rounds are. Two rows are even where the ratio of their speeds is no further from 1 than it moved
between the rounds that visited both (the largest less the smallest); that takes two rounds at least.

Memory is the peak of a visit, what torch had allocated and reserved. Graphs have a pool of their own, which only
"reserved" counts in full. "launch ms" is the host's time to enqueue a pass.

On several ranks, a GPU each, with whatever starts them, each has a micro-batch of its own size, and rows have as many
times the tokens of a step; --one_rank, a report of the same rows on one GPU, adds what share they are of as many times
its tokens/s; GPUs of one host differ by a percent or two: with a report of each, made at the same time, it is the share
of what they make alone, together. Memory is rank 0's.

Without a GPU the CPU reference runs a small model: it shows that everything works, and no speed can be read from it.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.variants import ATTENTION_BACKENDS
from test_fp8.common.options import ByMachine, Options, json_report, model_config, positive, seconds
from test_fp8.model import rows
from train.engine import launchers

OPTIONS = Options(__file__, __doc__, usage=argparse.SUPPRESS)
OPTIONS.add("--config", ByMachine("hare_1.1b", "tiny"), "the model", type=model_config)
OPTIONS.add("--rows", ByMachine(rows.DEFAULT_ROWS, rows.CPU_ROWS), "names or patterns", nargs="*")
OPTIONS.add(
    "--step_rows",
    ByMachine(rows.DEFAULT_STEP_ROWS, rows.CPU_ROWS),
    "which also in the measure step",
    nargs="*",
)
OPTIONS.add_rows()
OPTIONS.add("--measure", list(rows.MEASURES), "what is measured", nargs="+", choices=rows.MEASURES)
OPTIONS.add("--micro_batch", ByMachine([8, 16], [2]), "samples of a micro-batch", nargs="+", type=positive)
OPTIONS.add("--seq_length", ByMachine(2048, 64), "tokens of a sample", type=positive)
OPTIONS.add("--document_length", ByMachine(512, 16), "mean tokens, in rows documents_*", type=positive)
OPTIONS.add(
    "--attention", ["auto"], "of the te and megatron_core rows", nargs="+", choices=list(ATTENTION_BACKENDS)
)
OPTIONS.add(
    "--sdpa", ByMachine(["cudnn", "flash"], ["auto"]), "of hf and torchao rows", nargs="+", choices=rows.SDPA
)
OPTIONS.add(
    "--loss",
    ByMachine(["compiled", "liger"], ["torch"]),
    "of hf and torchao rows",
    nargs="+",
    choices=rows.LOSSES,
)
OPTIONS.add("--accumulation", ByMachine(8, 2), "micro-batches of a step", type=positive)
OPTIONS.add("--rounds", ByMachine(3, 2), "visits to each row", type=positive)
OPTIONS.add("--steps", ByMachine(5, 1), "timed a visit, at least", type=positive)
OPTIONS.add(
    "--seconds", ByMachine(1.0, 0.0), "timed a visit, at least 4 passes or --steps steps", type=seconds
)
OPTIONS.add_flag("--deterministic", "deterministic kernels, as train.py's default")
OPTIONS.add(
    "--one_rank",
    [],
    "a report of these rows on one rank, or one of each GPU",
    nargs="+",
    type=json_report,
    metavar="FILE.json",
)
OPTIONS.add("--seed", 42, "of weights and tokens", type=int)
OPTIONS.add_output("JSON and a plot")


def main(argv: Sequence[str]) -> int:
    options = OPTIONS.parse_args(argv)
    try:
        launchers.adopt()
        if launchers.rank():  # rank 0 tells it all
            options.output = None
            sys.stdout = io.StringIO()
        every = rows.all_rows(options)
        OPTIONS.settle(options)
        chosen = rows.configured_rows(options, every)
        from test_fp8.model.bench import Bench

        bench = Bench(options, chosen)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return bench.measure(OPTIONS.command(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
