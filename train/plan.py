#!/usr/bin/env python3
"""Predict the memory, speed and duration of a run: `python train/plan.py CONFIG [--gpus 8 --gpu h100 --tokens 600B]`.

CONFIG is a training configuration or a model. A model is the name of a file in model/configs, a config.json, or a
folder with a config.json, and is planned with train_args/train_config_fp8.json. Any training key can be overridden, for
example with `--gradient_checkpointing true --deepspeed ds_config_zero3.json`.

The command prints the GPU memory by component, the largest micro-batch that fits, tokens/s, days, GPU-hours, the size
of a checkpoint, recommended settings with the options to pass, and a comparison of 1 to 1,024 GPUs. Each speed is
printed with its source. No GPU, no torch and no data are needed.

Exit status: 0 done; 2 invalid request, or the configuration as given does not fit in GPU memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import require_packages

require_packages("planning", "pydantic")

from model.config import CONFIGS, load_sizes
from model.keys import between
from train.command import command
from train.config.arguments import TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.config.load import load_arguments, resolve_arguments
from train.files import write_durably
from train.planning.prediction import lines, parse_tokens, plan
from train.planning.setting import PlanError, Setting
from train.planning.speed import GPUS

MODEL_CONFIG = "train_config_fp8.json"  # training configuration used if CONFIG is a model


@functools.partial(command, system_error=2)
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", metavar="CONFIG", help="training configuration or model")
    parser.add_argument(
        "--gpus",
        type=between(1, 65536),
        help="number of GPUs (default: 8, or fewer if the global batch cannot be divided evenly among 8 GPUs)",
    )
    parser.add_argument("--gpu", default="h100", choices=GPUS, help="type of SXM GPU (default: %(default)s)")
    parser.add_argument(
        "--tokens",
        type=parse_tokens,
        help="total number of training tokens, such as 600B; the plan lists the --max_steps for this number (default: "
        "max_steps times the tokens per step)",
    )
    parser.add_argument(
        "--network",
        type=between(0.001, kind=float),
        default=400,
        help="network bandwidth between nodes of 8 GPUs, in Gbit/s per GPU (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, help="write the plan to this .json file")
    options, others = parser.parse_known_args(argv)
    words = [MODEL_CONFIG, "--model.config", options.config] if is_model(options.config) else [options.config]
    arguments = load_arguments([*words, *others])
    gpus = options.gpus or default_gpus(arguments)
    resolved = resolve_arguments(arguments, gpus)
    step_tokens = resolved.train_batch_size_tokens or 1
    tokens = options.tokens or arguments.max_steps * step_tokens
    sizes, steps = load_sizes(arguments.model.config), max(1, round(tokens / step_tokens))
    setting = Setting.from_run(resolved, resolve_ds_config(resolved, sizes, gpus), sizes, gpus, steps)
    planned = plan(
        Path(arguments.model.config).name, arguments, setting, GPUS[options.gpu], tokens, options.network
    )
    print("\n".join(lines(planned)))
    if options.output:
        write_durably(options.output, json.dumps(planned.to_json(), indent=1) + "\n")
        print(f"wrote {options.output.absolute()}")
    if not (p := planned.configured).fits:
        raise PlanError(
            f"the configuration needs {p.needed_gib:,.1f} GiB per GPU, but {p.gpu.name} has "
            f"{p.gpu.memory_gib:.1f} GiB. Pass the options of a recommended setting, or use more GPUs"
        )


def default_gpus(arguments: TrainingArguments) -> int:
    """Return the default number of GPUs: the largest of 8, 4, 2 and 1 that divides a step into whole micro-batches."""
    micro_batch = arguments.per_device_train_batch_size * arguments.max_seq_length
    micro_batch *= arguments.gradient_accumulation_steps or 1
    step = arguments.train_batch_size_tokens or 0
    return next((gpus for gpus in (8, 4, 2) if step % (micro_batch * gpus) == 0), 1)


def is_model(config: str) -> bool:
    path = Path(config)
    if path.is_file():
        return '"model_type"' in path.read_text(encoding="utf-8")
    return path.is_dir() or (CONFIGS / f"{config}.json").is_file()


if __name__ == "__main__":
    sys.exit(main())
