"""Settings to plan for, of shipped configurations, with a micro-batch of 8 unless another is given."""

from __future__ import annotations

import json

from model.config import load_sizes
from train.config.arguments import load_arguments
from train.config.ds_config import resolve_ds_config
from train.planning.setting import Setting


def setting(config: str = "train_config_fp8.json", ranks: int = 1, **keys: object) -> Setting:
    keys = {"per_device_train_batch_size": 8} | keys
    words = [f"--{key.replace('__', '.')}={json.dumps(value)}" for key, value in keys.items()]
    arguments = load_arguments([config, "--train_batch_size_tokens=null", *words]).resolve(ranks)
    ds_config = resolve_ds_config(arguments, ranks)
    return Setting.of(arguments, ds_config, load_sizes(arguments.model.config), ranks)
