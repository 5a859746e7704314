"""How long the trainings of a comparison take on GPUs, before any of them begins: `train/plan.py`'s estimates."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from model.config import load_sizes
from test_fp8.convergence.rows import Plan
from train.config.arguments import TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.planning.rates import GPUS, estimate
from train.planning.setting import Setting

# Of a run on one H200 until its first step: imports, proof, graphs.
START_S = 40.0


def lines(plans: Sequence[Plan], gpu: str, at_once: int, nproc: int) -> list[str]:
    """A line a row, and how long all take, `at_once` at a time with `nproc` GPUs each. Raises ValueError: there are no
    figures for a model like that."""
    found, places = [], [0.0] * at_once
    for plan in plans:
        arguments = TrainingArguments.from_dict(plan.config)
        sizes = load_sizes(arguments.model.config)
        setting = Setting.of(arguments, resolve_ds_config(arguments, nproc), sizes, nproc)
        guess, tokens = estimate(setting, GPUS[gpu]), arguments.max_steps * setting.step_tokens
        seconds = START_S + tokens / guess.tokens_per_second
        heapq.heapreplace(places, places[0] + seconds)
        found.append(
            f"{plan.row.name}: {arguments.max_steps:,} steps, {tokens / 1e6:,.0f} M tokens, about "
            f"{guess.tokens_per_second:,.0f} tokens/s (within {100 * guess.within:.0f} %): {seconds / 60:.1f} minutes"
        )
    whole = f"all, {at_once} at a time: {max(places) / 60:.0f} minutes of {gpu.upper()}"
    return [*found, f"{whole}; {START_S:.0f} s of each row are its start"]
