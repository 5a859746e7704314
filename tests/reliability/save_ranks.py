"""Run ranks that train and save a tiny FP8 model in a loop until a fault stops them.

    python tests/reliability/save_ranks.py SCENARIO FOLDER [--trials N] [--seed N]

One process imports everything and forks the ranks for each trial, so that a trial takes about a second. SCENARIO is a
key of SCENARIOS. The last output line is a JSON list with the report of each rank. Checkpoints are saved in
FOLDER/checkpoints. FOLDER/rank_*.jsonl contains the loss and a state hash for each step of a rank. A rank that repeats
a step after loading a checkpoint must get the same values.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)


import torch
import torch.distributed as dist
from deepspeed.comm.torch import build_shm_op
from transformers import MistralConfig

from model.build import build_model
from model.config import load_config
from model.fp8.precision import Precision
from model.fp8.state import fp8_state
from tests.conftest import log_messages
from tests.reliability.number_ranks import hash_tensors
from tests.reliability.ranks import fork_ranks
from train.checkpoint import save
from train.checkpoint.files import RunState, committed, problems, read_state
from train.checkpoint.load import choose_checkpoint, load_checkpoint, move_later_checkpoints
from train.checkpoint.save import SaveError
from train.config.ds_config import resolve_ds_config
from train.config.load import build_arguments, resolve_arguments
from train.data.stream import Batch
from train.engine.process_group import suppress_prints
from train.engine.step import MicroStep, build_engine

RANKS = 2
KEEP = 2
DEADLINE_S = 60.0


class Trainer:
    """Training loop of one rank. It resumes from the newest checkpoint and checks the results of repeated steps."""

    def __init__(self, folder: Path, mark: Callable[[str], None]):
        self.folder, self.root, self.mark = folder, folder / "checkpoints", mark
        self.rank = dist.get_rank()
        raw = {
            "model": {"config": str(folder / "config.json")},
            "data": {"sources": {"none": "none"}},
            "max_steps": 10**6,
            "max_seq_length": 16,
            "per_device_train_batch_size": 2,
            "lr_scheduler_type": "constant",
            "deepspeed": "ds_config_zero1.json",
        }
        args = resolve_arguments(build_arguments(raw), dist.get_world_size())
        self.config, self.precision = load_config(args.model.config), Precision(args.precision)
        model = build_model(self.config, args.model.variant, self.precision, seed=1)
        self.engine = build_engine(model, args, resolve_ds_config(args, self.config, dist.get_world_size()))
        self.micro_step = MicroStep(self.engine, self.precision, args)
        self.saver = save.Saver(self.engine, self.root, self.precision, KEEP)
        mark_ends_of_jobs(mark)
        self.state = RunState(0, 0, 0, dist.get_world_size(), 1, {}, {})
        self.log = folder / f"rank_{self.rank}.jsonl"
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.expected = {line["step"]: line for line in map(json.loads, lines)}
        with log_messages() as self.why:
            self.loaded = choose_checkpoint(self.root, "auto")
        if self.loaded is not None:
            with suppress_prints():
                load_checkpoint(self.engine, self.loaded, self.precision)
            self.state.step = read_state(self.loaded).step
            self.compare({"step": self.state.step, "digest": self.digest()})
        if self.rank == 0:
            move_later_checkpoints(self.root, self.state.step)
        dist.barrier()

    def compare(self, line: dict[str, Any]) -> None:
        """Check that a repeated step gives the same results as when it was first recorded."""
        if line["step"] in self.expected:
            for key, value in line.items():
                assert value == self.expected[line["step"]][key], (line, self.expected[line["step"]])

    def digest(self) -> str:
        """Return a hash of this rank's weights and FP8 state."""
        tensors = [getattr(p, "ds_tensor", p).data for p in self.engine.module.parameters()]
        tensors += fp8_state(self.engine.module, self.precision).values()
        return hash_tensors(tensors)

    def step(self) -> None:
        self.state.step += 1
        generator = torch.Generator().manual_seed(self.state.step * RANKS + self.rank)
        ids = torch.randint(self.config.vocab_size, (2, 16), generator=generator)
        loss = float(self.micro_step(Batch(ids, ids), 0))
        line = {"step": self.state.step, "loss": loss, "digest": self.digest()}
        self.compare(line)
        with open(self.log, "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def begin(self) -> None:
        """Start a background save. Training can continue while the checkpoint is written."""
        self.mark("S")
        self.saver.begin(self.state, background=True)

    def save(self) -> None:
        self.begin()
        self.saver.finish()


def mark_ends_of_jobs(mark: Callable[[str], None]) -> None:
    """Mark the letter E when a save is complete on this rank, in whichever thread the save runs."""
    run = save.Job.run

    def marked(job: save.Job) -> None:
        run(job)
        mark("E")

    save.Job.run = marked  # type: ignore[method-assign]


class Ranks:
    """Group of forked ranks, each with a pipe to this process.

    A rank writes one letter to its pipe for each event that it marks, and its JSON report before it exits.
    """

    def __init__(self, folder: Path, body: Callable[[Trainer], Any]):
        ends = [os.pipe() for _ in range(RANKS)]
        self.pipes, self.text = [read for read, _ in ends], [""] * RANKS
        self.pids = fork_ranks(RANKS, lambda rank: _run_rank(folder, body, ends, rank))
        for _, write in ends:
            os.close(write)

    def next_mark(self) -> tuple[int, str] | None:
        """Return (rank, letter) for the next letter from any rank, or None if all ranks have exited.

        Raises TimeoutError if the ranks hang.
        """
        while self.pipes.count(-1) < RANKS:
            ready = select.select([p for p in self.pipes if p >= 0], [], [], DEADLINE_S)[0]
            if not ready:
                self.kill()
                raise TimeoutError(f"the ranks say nothing for {DEADLINE_S} s")
            rank = self.pipes.index(ready[0])
            letter = os.read(ready[0], 1).decode()
            if not letter:
                os.close(ready[0])
                self.pipes[rank] = -1
                continue
            self.text[rank] += letter
            return rank, letter
        return None

    def kill(self, ranks: list[int] | None = None) -> None:
        for rank in range(RANKS) if ranks is None else ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def end(self) -> list[str]:
        """Wait for all ranks, and return the text that each rank wrote to its pipe."""
        while self.next_mark():
            pass
        for pid in self.pids:
            os.waitpid(pid, 0)
        return self.text

    def reports(self) -> list[Any]:
        """Wait for all ranks, and return the result of `body` on each rank."""
        texts = self.end()
        assert all("{" in text for text in texts), texts
        return [json.loads(text[text.index("{") :])["report"] for text in texts]


def _run_rank(
    folder: Path,
    body: Callable[[Trainer], Any],
    ends: list[tuple[int, int]],
    rank: int,
) -> None:
    """Run one forked rank.

    The rank closes the write ends of the other pipes. Each pipe therefore closes when its own rank exits.
    """
    for _, write in ends[:rank] + ends[rank + 1 :]:
        os.close(write)
    mark = lambda letter: os.write(ends[rank][1], letter.encode()) and None  # noqa: E731
    report = body(Trainer(folder, mark))
    os.write(ends[rank][1], json.dumps({"report": report}).encode())


# ---------------------------------------------------------------- what the ranks do


def train_and_save(trainer: Trainer, saves: int = 10**6) -> dict[str, Any]:
    """Take `saves` steps with a save after each step. By default, train until the rank is killed."""
    for _ in range(saves):
        trainer.step()
        trainer.saver.finish()
        trainer.begin()
    trainer.saver.finish()
    return resume(trainer)


def resume(trainer: Trainer) -> dict[str, Any]:
    """Take two steps, which must repeat earlier results, and report which checkpoint was loaded."""
    trainer.step(), trainer.step()
    return {"loaded": trainer.loaded and trainer.loaded.name, "why": trainer.why}


def save_slowly(trainer: Trainer, place: int) -> None:
    """Take a step and save. Rank 1 stops during its save, marks Z, and waits to be killed.

    place: 0 to stop with the first file half written, or 1 to stop after all files are written.
    """

    def stop() -> None:
        trainer.mark("Z")
        time.sleep(DEADLINE_S)

    def write_half(path: Path, value: Any) -> None:
        path.write_bytes(b"half a file")
        stop()

    trainer.step()
    if trainer.rank == 1:
        write = save.Job._write
        if place == 0:
            save.write_tensors = write_half
        else:
            save.Job._write = lambda job: (write(job), stop())
    trainer.save()


def save_with_a_full_disk(trainer: Trainer) -> list[Any]:
    """Save three times, with a full disk on rank 1 during the second save.

    Returns: for each save, the outcome and the names of the checkpoint folders.
    """

    def fail(path: Path, value: Any) -> None:
        path.write_bytes(b"half a file")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    outcomes, write = list[Any](), save.write_tensors
    for number in range(3):
        trainer.step()
        save.write_tensors = fail if number == 1 and trainer.rank == 1 else write
        trainer.begin()
        try:
            trainer.saver.finish()
            outcome = "saved"
        except SaveError as error:
            outcome = str(error)
        dist.barrier()
        outcomes.append([outcome, sorted(p.name for p in trainer.root.iterdir())])
        dist.barrier()
    return outcomes


# ---------------------------------------------------------------- scenarios


def make(folder: Path, args: argparse.Namespace) -> list[Any]:
    """Train for `--trials` steps with a save after each step. The last KEEP checkpoints remain."""
    return Ranks(folder, lambda t: train_and_save(t, args.trials)).reports()


def load(folder: Path, args: argparse.Namespace) -> list[Any]:
    """Report which checkpoint each rank loads, and why newer checkpoints are not used."""
    return Ranks(folder, resume).reports()


def kill_all(folder: Path, args: argparse.Namespace) -> list[Any]:
    """Repeatedly kill all ranks with SIGKILL at a random moment of a save.

    Each trial resumes from the checkpoints of the previous trial. If all saves are already complete when the ranks are
    killed, the attempt does not count as a trial.
    """
    chance, trials, saves_s = random.Random(args.seed), 0, [0.1]
    while trials < args.trials:
        ranks = Ranks(folder, train_and_save)
        before_kill = chance.randint(1, 3)
        while before_kill:
            found = ranks.next_mark()
            assert found is not None, f"a rank ended by itself in trial {trials}"
            if found == (0, "S"):
                began, before_kill = time.perf_counter(), before_kill - 1
            elif found == (0, "E"):
                saves_s.append(time.perf_counter() - began)
        time.sleep(chance.uniform(0, max(saves_s[-20:])))
        ranks.kill()
        marks = ranks.end()
        if marks[0][-1] == "S" or marks[1][-1] == "S":
            trials += 1
            newest = committed(folder / "checkpoints")
            assert not newest or not problems(newest[-1]), f"trial {trials}: {newest[-1]}"
    return load(folder, args)


def kill_one(folder: Path, args: argparse.Namespace) -> list[Any]:
    """Kill a rank with SIGKILL during its save.

    The save must never be committed, and the previous checkpoint must be loaded.
    """
    Ranks(folder, lambda t: train_and_save(t, 1)).reports()
    good = committed(folder / "checkpoints")
    for trial in range(args.trials):
        ranks = Ranks(folder, lambda t, place=(args.seed + trial) % 2: save_slowly(t, place))
        while ranks.next_mark() != (1, "Z"):
            pass
        ranks.kill([1])
        ranks.end()  # the other rank ends by itself: the connection to the killed one is gone
        assert committed(folder / "checkpoints") == good, f"trial {trial} committed"
    return load(folder, args)


def full_disk(folder: Path, args: argparse.Namespace) -> list[Any]:
    """Run `save_with_a_full_disk` on each rank."""
    return Ranks(folder, save_with_a_full_disk).reports()


SCENARIOS = {f.__name__: f for f in (make, load, kill_all, kill_one, full_disk)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    config = MistralConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                           num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
                           sliding_window=None, tie_word_embeddings=False)  # fmt: skip
    (args.folder / "config.json").write_text(json.dumps(config.to_dict()))
    # Once here, not in each rank, where it is compiled under a lock that a killed rank would leave
    build_shm_op()
    print(json.dumps(SCENARIOS[args.scenario](args.folder, args)))


if __name__ == "__main__":
    main()
