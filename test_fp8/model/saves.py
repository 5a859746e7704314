"""Measure training steps with and without a checkpoint save, for bench_save.py."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from model.config import load_config, num_parameters
from model.startup_check import check_startup
from test_fp8.common.cases import Case
from test_fp8.common.report import Outcome, Result
from test_fp8.common.timing import synchronize
from test_fp8.model.cases import training_arguments
from train.checkpoint.files import RunState, read_manifest
from train.checkpoint.save import Saver
from train.config.ds_config import resolve_ds_config
from train.data.stream import Batch
from train.engine.distributed import call_on_rank_0, init_distributed
from train.engine.step import MicroStep, build_engine
from train.monitor.signals import StopVote
from train.phase import build_model_and_precision

WARM_UP_STEPS = 3


class Training:
    """A training loop on random tokens with a DeepSpeed engine."""

    def __init__(self, options: argparse.Namespace):
        case = Case("save", {"model.variant": "te_layer", "precision.compute": "fp8"})
        self.args = training_arguments(case, options, "auto", options.micro_batch, dist.get_world_size())
        model, self.precision = build_model_and_precision(self.args, load_config(self.args.model.config))
        check_startup(model, self.precision, seed=self.args.seed)
        ds_config = resolve_ds_config(self.args, dist.get_world_size())
        self.engine = build_engine(model, self.args, ds_config)
        self.micro_step = MicroStep(self.engine, self.precision, self.args)
        shape = options.micro_batch, options.seq_length
        self.ids = torch.randint(model.config.vocab_size, shape, device=self.engine.device)
        self.vote = StopVote()
        stage = ds_config["zero_optimization"]["stage"]
        self.state = RunState(0, 0, 0, dist.get_world_size(), stage, self.args.to_dict(), {})

    def step(self) -> float:
        """Run a training step and return its duration in seconds."""
        start = time.perf_counter()
        for index in range(self.args.gradient_accumulation_steps or 1):
            self.micro_step(Batch(self.ids, self.ids), index)
        synchronize()
        self.state.step += 1
        return time.perf_counter() - start


def measure_save(training: Training, saver: Saver, background: bool, steps: int) -> Result:
    """Run training steps, start a checkpoint save, and run further steps until the save is complete.

    background: whether training continues during the save. steps: the number of steps before the save. Returns the
    measured times.
    """
    alone, during = [training.step() for _ in range(steps)], []
    start = time.perf_counter()
    saver.begin(training.state, background)
    begin_s = time.perf_counter() - start
    while training.vote.ask(saver.busy)[1]:
        during.append(training.step())
    saved = saver.finish()
    assert saved is not None
    gigabytes = sum(size for size, _ in read_manifest(saved.path).values()) / 1e9
    return {
        "background": background,
        "begin_s": begin_s,
        "waited_s": saved.waited_s,
        "save_s": saved.seconds,
        "gigabytes": gigabytes,
        "gigabytes_per_s": gigabytes / saved.seconds,
        "steps_alone_s": alone,
        "steps_during_s": during,
    }


def lost_time_share(results: Sequence[Result]) -> float:
    """Return the training time lost by a background save, as a fraction of the time lost to a blocking save.

    Medians are used, and the first save of each kind is excluded.
    """
    lost = [
        statistics.median(r["lost_s"] for r in results if r["background"] == background and not r["first"])
        for background in (True, False)
    ]
    return lost[0] / lost[1]


def measure(options: argparse.Namespace) -> Outcome:
    init_distributed()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(call_on_rank_0(lambda: own))
        training = Training(options)
        saver = Saver(training.engine, folder, training.precision, 1)
        for _ in range(WARM_UP_STEPS):
            training.step()
        results = [
            {"first": index == 0, **measure_save(training, saver, background, options.steps)}
            for index in range(options.rounds + 1)
            for background in (False, True)
        ]
        dist.barrier()
    step_s = statistics.median(t for save in results for t in save["steps_alone_s"])
    for save in results:
        slower_s = sum(t - step_s for t in save["steps_during_s"])
        save |= {"step_s": step_s, "slower_s": slower_s, "lost_s": save["waited_s"] + slower_s}
    lost, ranks = lost_time_share(results), dist.get_world_size()
    dist.destroy_process_group()
    more = {"ranks": ranks, "parameters": num_parameters(training.engine.module.config), "lost": lost}
    return Outcome(
        results, more, [f"a background save costs {lost:.1%} of the training time that a blocking save costs"]
    )
