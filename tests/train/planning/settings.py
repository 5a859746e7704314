"""Settings to plan for, of shipped configurations and of committed measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

from model.config import load_sizes
from model.variants import VARIANTS
from train.config.ds_config import resolve_ds_config
from train.config.load import load_arguments, resolve_arguments
from train.files import REPOSITORY
from train.planning.memory import WORKSPACES_GIB
from train.planning.setting import Setting
from train.planning.speed import GPUS, Gpu

RESULTS = REPOSITORY / "test_fp8" / "results"


def setting(config: str = "train_config_fp8.json", ranks: int = 1, **keys: object) -> Setting:
    """The setting of a shipped configuration, with a micro-batch of 8 unless another is given."""
    keys = {"per_device_train_batch_size": 8} | keys
    words = [f"--{key.replace('__', '.')}={json.dumps(value)}" for key, value in keys.items()]
    arguments = resolve_arguments(load_arguments([config, "--train_batch_size_tokens=null", *words]), ranks)
    sizes = load_sizes(arguments.model.config)
    return Setting.from_run(arguments, resolve_ds_config(arguments, sizes, ranks), sizes, ranks)


class Measured(NamedTuple):
    """A committed measurement. Memory as the allocator reports it, without what earlier cases left."""

    name: str
    setting: Setting
    gpu: Gpu
    tokens_per_second: float
    peak_gib: float


def measured() -> list[Measured]:
    """Steps of this project's variants with the shipped defaults on one to four GPUs."""
    found = []
    for path in sorted(RESULTS.glob("*_shipped_step.json")):
        report = json.loads(path.read_text())
        for row in report["results"]:
            if VARIANTS.get(row["variant"]) and VARIANTS[row["variant"]].te:
                s = _configured(report, row["configuration"], micro_batch=row["micro_batch"])
                peak = row["allocated_gib"] - max(0.0, row["before_gib"] - WORKSPACES_GIB)
                speed = row["tokens_per_second"]
                found.append(Measured(f"{path.stem} {row['row']}", s, _gpu(report), speed, peak))
    report = json.loads((RESULTS / "mistral_7b_mlp_step.json").read_text())
    (row,) = report["results"]
    s = _configured(report, row["configuration"], report["ranks"], micro_batch=row["micro_batch"])
    found.append(Measured("mistral_7b on 4", s, _gpu(report), row["tokens_per_second"], row["allocated_gib"]))
    for path in sorted(RESULTS.glob("*_scaling*.json")):
        report = json.loads(path.read_text())
        for row in report["results"]:
            report["accumulation"] = row["accumulation"]
            s = _configured(report, row["configuration"], row["ranks"])
            name = f"{row['row']} on {row['ranks']}"
            found.append(Measured(name, s, _gpu(report), row["tokens_per_second"], row["peak_gib"]))
    return found


def _gpu(report: dict[str, Any]) -> Gpu:
    return next(gpu for name, gpu in GPUS.items() if name.upper() in report["machine"]["gpu"])


def _configured(report: dict[str, Any], keys: dict[str, Any], ranks: int = 1, **fields: Any) -> Setting:
    s = setting(
        ranks=ranks,
        model__config=report["model"],
        max_seq_length=report["seq_length"],
        gradient_accumulation_steps=report["accumulation"],
        per_device_train_batch_size=fields.get("micro_batch") or report["micro_batch"],
        **{key.replace(".", "__"): True if value == "true" else value for key, value in keys.items()},
    )
    return replace(s, eval_batch=0)
