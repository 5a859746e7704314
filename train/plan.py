#!/usr/bin/env python3
"""Predict memory, speed and duration of a run: `python train/plan.py CONFIG [--gpus 8 --gpu h100 --tokens 600B]`.

CONFIG is a training configuration, followed by overrides of any training key (--gradient_checkpointing true,
--deepspeed ds_config_zero3.json), or a model (a name in model/configs, a config.json or its folder), which is planned
with train_args/train_config_fp8.json. Prints GPU memory by part, the largest micro-batch that fits, tokens/s, days,
GPU-hours and the size of a checkpoint, recommended settings, and the same on 1 to 1,024 GPUs; each speed with what it
is derived from. Needs neither a GPU nor torch, and reads no data.

Exit status: 0; 2 if the request cannot be planned or the model does not fit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("planning", "pydantic")

from model.config import CONFIGS, load_sizes
from model.errors import UserError
from train.config.arguments import ConfigurationError, TrainingArguments, find_config
from train.config.ds_config import resolve_ds_config
from train.config.load import load_arguments, resolve_arguments
from train.files import reason, write_durably
from train.planning.plan import lines, parse_tokens, plan
from train.planning.setting import PlanError, Setting
from train.planning.speed import GPUS

MODEL_CONFIG = "train_config_fp8.json"  # for a model without a training configuration
MOST_GPUS = 65536


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", metavar="CONFIG", help="a training configuration, or a model's")
    parser.add_argument(
        "--gpus",
        type=int,
        help="how many GPUs, of one job (default: 8, or fewer if they do not divide the batch)",
    )
    parser.add_argument("--gpu", default="h100", choices=GPUS, help="the SXM part (default %(default)s)")
    parser.add_argument(
        "--tokens", help="tokens of the whole run, such as 600B; default: max_steps of the configuration"
    )
    parser.add_argument(
        "--network", type=float, default=400, help="Gbit/s a GPU between nodes of 8 (default %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="a .json for all of it")
    options, others = parser.parse_known_args(argv)
    try:
        tokens = options.tokens and parse_tokens(options.tokens)
        if options.gpus is not None and not 1 <= options.gpus <= MOST_GPUS:
            raise PlanError(f"--gpus {options.gpus}: 1 to {MOST_GPUS} are expected")
        if not options.network > 0:
            raise PlanError(f"--network {options.network:g}: Gbit/s a GPU, above 0, are expected")
        arguments = configured(options.config, others, options.gpus or 8)
        gpus = options.gpus or default_gpus(arguments)
        sizes = load_sizes(arguments.model.config)
        resolved = resolve_arguments(arguments, gpus)
        step_tokens = resolved.train_batch_size_tokens or 1
        tokens = tokens or arguments.max_steps * step_tokens
        ds_config, steps = resolve_ds_config(resolved, gpus), max(1, round(tokens / step_tokens))
        setting = Setting.of(resolved, ds_config, sizes, gpus, steps)
        planned = plan(Path(arguments.model.config).name, setting, GPUS[options.gpu], tokens, options.network)
        if options.output:
            write_durably(options.output, json.dumps(planned.to_json(), indent=1) + "\n")
        print("\n".join(lines(planned)))
        if options.output:
            print(f"wrote {os.path.abspath(options.output)}")
    except (ValueError, UserError, OSError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 2
    return 0


def configured(config: str, others: list[str], gpus: int) -> TrainingArguments:
    """Return the arguments of a training configuration, or those a model would be trained with.

    Raises ConfigurationError, PlanError: there is none.
    """
    if not is_model(config):
        try:
            find_config(config, "CONFIG")
        except ConfigurationError as error:
            models = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.json")))
            raise PlanError(f"{error}; and no model of that name: model/configs has {models}") from error
        return load_arguments([config, *others])
    arguments = load_arguments([MODEL_CONFIG, "--model.config", config, *others])
    given = {word.partition("=")[0] for word in others}
    micro_batch = arguments.per_device_train_batch_size * arguments.max_seq_length * gpus
    if "--train_batch_size_tokens" not in given:
        # the step of the given accumulation, else the possible one that is nearest to the configuration's
        step = arguments.train_batch_size_tokens or micro_batch
        nearest = max(1, round(step / micro_batch)) * micro_batch
        arguments.train_batch_size_tokens = nearest if arguments.gradient_accumulation_steps is None else None
    return arguments


def default_gpus(arguments: TrainingArguments) -> int:
    """Return the most of 8, 4, 2 and 1 GPUs whose micro-batches divide the step of the configuration."""
    micro_batch = arguments.per_device_train_batch_size * arguments.max_seq_length
    micro_batch *= arguments.gradient_accumulation_steps or 1
    step = arguments.train_batch_size_tokens or 0
    return next((gpus for gpus in (8, 4, 2) if step % (micro_batch * gpus) == 0), 1)


def is_model(config: str) -> bool:
    path = Path(config)
    if path.is_dir():
        return True
    if not path.is_file():
        return (CONFIGS / f"{config}.json").is_file()
    try:
        return "model_type" in json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError):
        return False  # load_arguments says what is wrong with it


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
