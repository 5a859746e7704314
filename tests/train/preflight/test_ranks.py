"""The preflight of all ranks: what one of them has or sees otherwise, which GPU or link is slow."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.fixtures import settings_of
from tests.reliability.launching import run_cases
from tests.train.runs import run
from train.config.arguments import TrainingArguments
from train.preflight import devices, ranks
from train.preflight.check import PreflightError
from train.preflight.devices import CLOCK, ECC, MAX_CLOCK, SLOWDOWNS, Health, Speed, read_health
from train.preflight.ranks import Found, Link, Rank, judge, judge_links, pairs_of

HERE = socket.gethostname()


@pytest.mark.process
def test_what_the_second_rank_has_otherwise_is_named(tmp_path: Path, data: Path, small_model: Path) -> None:
    """By real ranks, all of which end by the same; the folder is as it was."""
    empty = tmp_path / "empty"
    empty.mkdir()
    settings = settings_of(data, small_model, tmp_path / "run")
    faults = ["none", "no_data", "other_data", "other_folder", "torch", "sources"]
    cases = [(2, "alike", {"settings": settings, "fault": f, "folder": str(empty)}) for f in faults]
    before = sorted(tmp_path.iterdir())
    reports = dict(zip(faults, run_cases(tmp_path / "cases", cases), strict=True))
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "cases"]) and not [*empty.iterdir()]
    errors = {fault: {its["error"] for its in of_ranks} for fault, of_ranks in reports.items()}
    assert errors.pop("none") == {None}
    lines = reports["none"][0]["said"]
    assert [line for line in lines if "links within a node: " in line and "of 1 pairs" in line], lines
    assert not [line for line in lines if "warning" in line]
    named = {
        "no_data": str(empty),
        "other_data": "its data.sources are other data than the others'; give all nodes the same folder",
        "other_folder": "did not see a file of rank 0 in it",
        "torch": "torch 1.0, and ",
        "sources": "the sources in model/ and train/ 0123456789ab, and ",
    }
    for fault, found in errors.items():
        (error,) = found
        assert error is not None and named[fault] in error, (fault, error)
        assert f"rank 1 ({HERE})" in error and "preflight: the ranks have a problem:" in error, error
    assert "all-reduce of all ranks: " in lines[-1] and "GB/s through each rank's link" in lines[-1]


# What is otherwise on the second of three ranks -> what is said of it, and whether the run starts all the same.
INJECTED = {
    "no_data": ("data has to be where all nodes see it", False),
    "other_data": ("its data.sources are other data than the others'", False),
    "other_folder": ("did not see a file of rank 0 in it", False),
    "torch": ("torch 1.0, and ", False),
    "cudnn": ("cudnn 1.0, and none on 2 other ranks", False),
    "no_fp8": (" has 8.0; ", False),
    "gpu": ("gpu NVIDIA A100, and NVIDIA H200 on 2 other ranks", True),
    "gemm": ("its GPU has 500 TFLOP/s of a bf16 GEMM, and the others 700", True),
    "copy": ("its GPU has 1,400 GB/s of a copy in its memory, and the others 2,800", True),
    "clocks": ("its GPU at 345 of 1980 MHz: the hardware slows it down", True),
    "ecc": ("3 uncorrected ECC errors of its GPU's memory", True),
    "link": (f"the link within a node between rank 1 ({HERE}) and rank 2 ({HERE}) has", True),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.process
def test_each_fault_is_found_within_a_minute_and_named(tmp_path: Path, data: Path, small_model: Path) -> None:
    """By real ranks, to which a stand-in gives GPUs; those of the gradients and of the nodes' meeting are in
    test_gradients.py and tests/train/engine/test_meeting.py."""
    (empty := tmp_path / "empty").mkdir()
    settings = settings_of(data, small_model, tmp_path / "run") | {
        "precision": {"backend": "transformer_engine"}
    }
    arguments = {"settings": settings, "folder": str(empty), "gpus": True}
    cases = [(3, "alike", arguments | {"fault": fault}) for fault in ["none", *INJECTED]]
    none, *others = run_cases(tmp_path / "cases", cases)
    assert {its["error"] for its in none} == {None}
    assert [line for line in none[0]["said"] if "700 to 700 TFLOP/s of a bf16 GEMM" in line]
    for (fault, (said, starts)), of_ranks in zip(INJECTED.items(), others, strict=True):
        assert max(its["seconds"] for its in of_ranks) < 60, fault
        (error,) = {its["error"] for its in of_ranks}
        assert (error is None) is starts, (fault, error)
        told = [line for line in of_ranks[0]["said"] if line.startswith("warning") and "rank 1 (" in line]
        text = " ".join(told) if starts else error
        assert said in text and f"rank 1 ({HERE})" in text, (fault, text)
        print(f"{fault}: {max(its['seconds'] for its in of_ranks):.1f} s: {text}")


def test_it_runs_before_anything_is_built(
    settings: dict, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.setup.model_for", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(settings, preflight=True)
    monkeypatch.setattr(
        "train.preflight.together.check_ranks", lambda _: Found(["one", "two"], ["three"], ["four"])
    )
    with pytest.raises(PreflightError, match="preflight: the ranks have 2 problems:\n  one\n  two"):
        run(settings, preflight=True)
    assert "preflight: four\nwarning: preflight: three\n" in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError):  # ranks are on one node
        run(settings)


# ---------------------------------------------------------------- GPUs, which this machine has none of

GOOD = Rank(
    "a",
    {"torch": "2.13"},
    {"gpu": "H100", "driver": "1"},
    (9, 0),
    "hash",
    "",
    True,
    Speed(700.0, 2800.0),
    Health({CLOCK: "1980", MAX_CLOCK: "1980", ECC: "0"} | dict.fromkeys(SLOWDOWNS, "Not Active")),
)
ARGS = TrainingArguments.from_dict(
    {
        "model": {"config": "tiny"},
        "data": {"sources": {"a": "a"}},
        "precision": {"backend": "transformer_engine"},
        "max_steps": 1,
    }
)


def found_of(bad: Rank) -> Found:
    return judge(ARGS, [GOOD, GOOD, replace(bad, host="b"), GOOD])


def test_gpus_that_are_alike_are_told_and_not_warned_of() -> None:
    found = found_of(replace(GOOD, speed=Speed(610.0, 2750.0)))  # 15 % is what like GPUs may be apart
    assert found.problems == found.warnings == []
    assert found.lines == [
        "GPUs: 610 to 700 TFLOP/s of a bf16 GEMM",
        "GPUs: 2,750 to 2,800 GB/s of a copy in its memory",
    ]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            replace(GOOD, speed=Speed(605.0, 2800.0)),
            "its GPU has 605 TFLOP/s of a bf16 GEMM, and the others 700",
        ),
        (
            replace(GOOD, speed=Speed(700.0, 1400.0)),
            "its GPU has 1,400 GB/s of a copy in its memory, and the others",
        ),
        (
            replace(GOOD, health=Health({CLOCK: "1980", MAX_CLOCK: "1980", ECC: "1"})),
            "1 uncorrected ECC errors of its GPU's memory",
        ),
        (
            replace(GOOD, health=Health({CLOCK: "345", MAX_CLOCK: "1980", next(iter(SLOWDOWNS)): "Active"})),
            "its GPU at 345 of 1980 MHz: the hardware slows it down",
        ),
        (replace(GOOD, machine={"gpu": "H200", "driver": "1"}), "gpu H200, and H100 on 3 other ranks"),
    ],
    ids=["gemm", "copy", "ecc", "clocks", "gpu"],
)
def test_a_gpu_that_is_otherwise_is_warned_of(bad: Rank, text: str) -> None:
    found = found_of(bad)
    (warning,) = found.warnings
    assert found.problems == [] and warning.startswith("rank 2 (b): ") and text in warning


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (replace(GOOD, versions={"torch": "2.13", "cudnn": "9.1"}), "cudnn 9.1, and none on 3 other ranks"),
        (replace(GOOD, capability=(10, 0)), " has 10.0; "),
        (replace(GOOD, data="other"), "its data.sources are other data"),
        (replace(GOOD, data="", data_problem="no such folder"), "no such folder; data has to be where all"),
    ],
    ids=["cudnn", "capability", "data", "no_data"],
)
def test_what_no_run_can_have_keeps_it_from_starting(bad: Rank, text: str) -> None:
    found = found_of(bad)
    (problem,) = found.problems
    assert found.warnings == [] and "rank 2 (b)" in problem and text in problem


def test_the_rank_with_other_data_is_named_beside_one_that_reads_none() -> None:
    no_data, other = replace(GOOD, data="", data_problem="no such folder"), replace(GOOD, data="other")
    problems = judge(ARGS, [no_data, GOOD, GOOD, replace(other, host="b"), GOOD]).problems
    assert [problem.partition(": ")[0] for problem in problems] == ["rank 0 (a)", "rank 3 (b)"]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"schedule": [{"until_step": 1}, {"compute": "fp8"}], "compute": "bf16"}, True),
        ({"compute": "bf16"}, False),
        ({"recipe": "tensorwise"}, True),
    ],
)
def test_a_gpu_of_another_generation_is_refused_where_fp8_runs(
    changes: dict, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(ARGS.precision), "emulated", False)
    args = replace(ARGS, precision=replace(ARGS.precision, backend="auto", **changes))
    assert bool(judge(args, [replace(GOOD, capability=(10, 0))]).problems) == refused


def test_where_nvidia_smi_is_not_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = found_of(replace(GOOD, health=None))
    assert found.lines[-1] == "clocks and ECC errors are not known, without nvidia-smi: rank 2 (b)"
    assert read_health([CLOCK], [str(tmp_path / "nvidia-smi")]) is None
    assert devices.speed_of_gpu() is None and devices.health_of_gpu() is None, "there is no GPU here"


@pytest.mark.process
def test_what_nvidia_smi_says_is_read(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/bash\necho '345, 1980, 2'\n")
    program.chmod(0o755)
    health = read_health([CLOCK, MAX_CLOCK, ECC], [str(program)])
    assert health is not None and health.fields == {CLOCK: "345", MAX_CLOCK: "1980", ECC: "2"}
    assert read_health([CLOCK], [str(program)]) is None, "an answer to something else"


# ---------------------------------------------------------------- links


def test_neighbours_are_measured_and_no_rank_twice_at_a_time() -> None:
    times = pairs_of(["a", "a", "a", "b", "b", "b", "c", "c", "c"])
    every = [pair for pairs in times for pair in pairs]
    within = [(0, 1), (1, 2), (3, 4), (4, 5), (6, 7), (7, 8)]
    assert sorted(pair for kind, pair in every if kind == "within a node") == within
    assert sorted(pair for kind, pair in every if kind == "between nodes") == [(0, 3), (3, 6)]
    for pairs in times:
        members = [rank for _, pair in pairs for rank in pair]
        assert len(members) == len(set(members))
    assert pairs_of(["a"]) == []


def test_the_slow_link_is_named_among_its_kind() -> None:
    where = [f"rank {rank} ({'ab'[rank // 4]})" for rank in range(8)]
    links = [Link("within a node", pair, 200.0) for pair in [(0, 1), (2, 3), (4, 5), (6, 7)]]
    links += [Link("within a node", (5, 6), 20.0), Link("between nodes", (0, 4), 22.0)]
    found = Found()
    judge_links(links, where, found, on_gpus=True)
    (warning,) = found.warnings
    assert warning.startswith(
        "the link within a node between rank 5 (b) and rank 6 (b) has 20.0 GB/s, and the others 200.0"
    )
    assert found.lines == [
        "links within a node: 20.0 to 200.0 GB/s each way, of 5 pairs",
        "links between nodes: 22.0 to 22.0 GB/s each way, of 1 pairs",
    ]
    on_cpus = Found()
    judge_links(links, where, on_cpus, on_gpus=False)
    assert on_cpus.lines == found.lines and not on_cpus.warnings, "they share cores"
    assert ranks.slow({"a": 100.0, "b": 67.1, "c": 101.0}, ranks.SLOW_LINK) == {}
    assert ranks.slow({"a": 100.0, "b": 66.9, "c": 101.0}, ranks.SLOW_LINK) == {"b": 100.5}


def test_bytes_in_a_second_are_counted_as_data_sheets_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a link what is sent one way, of a ring what each sends, of memory what is read and written; the mean of
    the calls after the first ones, which set up."""
    monkeypatch.setattr(ranks, "_seconds", lambda call: 0.5)
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: 4)
    assert ranks.exchange_gb_s(1) == pytest.approx(2**20 / 0.5 / 1e9)
    assert ranks.all_reduce_gb_s() == pytest.approx(2 * 3 / 4 * 2**20 / 0.5 / 1e9)
    monkeypatch.undo()
    now = [0.0]
    monkeypatch.setattr(ranks, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    seconds = iter([90.0, 80.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert ranks._seconds(lambda: now.append(now.pop() + next(seconds))) == 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(devices, "_gemm_s", lambda: 2e-3)
    monkeypatch.setattr(devices, "_copy_s", lambda: 4e-4)
    speed = devices.speed_of_gpu()
    assert speed is not None and speed.gemm_tflops == pytest.approx(2 * 8192**3 / 2e-3 / 1e12)
    assert speed.copy_gb_s == pytest.approx(2 * 2**29 / 4e-4 / 1e9)
