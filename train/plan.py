#!/usr/bin/env python3
"""Predict memory, speed and duration of a run: `python train/plan.py CONFIG [--gpus 8 --gpu h100 --tokens 600B]`.

CONFIG is a training configuration, or a model (a name in model/configs, a config.json or its folder). A model is
planned with train_args/train_config_fp8.json. Overrides of any training key can follow (--gradient_checkpointing true,
--deepspeed ds_config_zero3.json).

Prints GPU memory by part, the largest micro-batch that fits, tokens/s, days, GPU-hours, the size of a checkpoint, and
recommended settings, also for 1 to 1,024 GPUs. Each speed comes with its source. Needs neither a GPU nor torch, and
reads no data.

Exit status: 0 done; 2 the request cannot be planned, or the model does not fit.
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

MODEL_CONFIG = "train_config_fp8.json"  # used for a model without a training configuration
MOST_GPUS = 65536


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", metavar="CONFIG", help="training configuration, or model")
    parser.add_argument(
        "--gpus",
        type=int,
        help="number of GPUs of the job (default: 8, or fewer if 8 do not divide the batch)",
    )
    parser.add_argument("--gpu", default="h100", choices=GPUS, help="GPU type, SXM (default: %(default)s)")
    parser.add_argument("--tokens", help="total number of tokens, such as 600B (default: from max_steps)")
    parser.add_argument(
        "--network",
        type=float,
        default=400,
        help="network bandwidth between nodes of 8 GPUs, in Gbit/s per GPU (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, help="write the plan to this .json file")
    options, others = parser.parse_known_args(argv)
    try:
        tokens = options.tokens and parse_tokens(options.tokens)
        if options.gpus is not None and not 1 <= options.gpus <= MOST_GPUS:
            raise PlanError(f"--gpus {options.gpus}: allowed is 1 to {MOST_GPUS}")
        if not options.network > 0:
            raise PlanError(f"--network {options.network:g}: allowed are Gbit/s per GPU above 0")
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
    """Load the arguments of a training configuration, or the arguments to train a model with.

    Args:
        config: A training configuration or a model.
        others: Overrides of training keys, as on the command line.
        gpus: The number of GPUs. For a model, the step size is adapted to it.

    Raises:
        ConfigurationError, PlanError: `config` does not exist or is invalid.
    """
    if not is_model(config):
        try:
            find_config(config, "CONFIG")
        except ConfigurationError as error:
            models = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.json")))
            raise PlanError(f"{error}; it is not a model either: model/configs has {models}") from error
        return load_arguments([config, *others])
    arguments = load_arguments([MODEL_CONFIG, "--model.config", config, *others])
    given = {word.partition("=")[0] for word in others}
    micro_batch = arguments.per_device_train_batch_size * arguments.max_seq_length * gpus
    if "--train_batch_size_tokens" not in given:
        # use the step size that follows from a given accumulation, or else the nearest possible to the configuration's
        step = arguments.train_batch_size_tokens or micro_batch
        nearest = max(1, round(step / micro_batch)) * micro_batch
        arguments.train_batch_size_tokens = nearest if arguments.gradient_accumulation_steps is None else None
    return arguments


def default_gpus(arguments: TrainingArguments) -> int:
    """Return the largest of 8, 4, 2 and 1 GPUs whose micro-batches divide the step of the configuration."""
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
        return False  # load_arguments reports the error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
