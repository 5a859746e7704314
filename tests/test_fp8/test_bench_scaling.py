"""test_fp8/bench_scaling.py: its launches, what they come to, and what it does when it is stopped and started again."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from test_fp8 import bench_scaling
from test_fp8.common.options import ROOT
from test_fp8.common.processes import own_environment
from test_fp8.common.rows import Row
from test_fp8.scaling import launches
from test_fp8.scaling.launches import Launch
from test_fp8.scaling.results import apart, farthest, results_of
from tests.reliability.launching import clean_environment

SMALL = [
    "--config",
    "tiny",
    "--seq_length",
    "16",
    "--accumulation",
    "1",
    "--stages",
    "1",
    "--precisions",
    "bf16",
]
ROWS = {
    name: Row(name, {"model.variant": "te_layer", "precision.compute": "bf16"}) for name in ("a", "b", "c")
}


def options_of(*words: str) -> Any:
    options = bench_scaling.OPTIONS.parse_args([*SMALL, *words])
    bench_scaling.OPTIONS.settle(options)
    return options


def launch_of(
    folder: Path, ranks: int, places: list[int] | None = None, name: str = "", **speeds: float
) -> Launch:
    """One that has measured these speeds, or for a negative one nothing."""
    launch = Launch(name or f"of_{ranks}_{places}", folder, ranks, places, 1, ROWS)
    for row, speed in speeds.items():
        found = {"row": row, "tokens_per_second": speed, "allocated_gib": 3.0, "before_gib": 1.0625}
        launch.found[row] = (
            found | {"attention": "flash", "proof": []} if speed > 0 else {"row": row, "reason": "why"}
        )
    return launch


def cell(row: str, ranks: int, **more: Any) -> dict[str, Any]:
    return {"row": row, "ranks": ranks, **more}


def test_a_share_is_of_what_the_same_gpus_make_each_for_itself(tmp_path: Path) -> None:
    ran = [
        launch_of(tmp_path, 1, [place], a=speed) for place, speed in enumerate([100.0, 90.0, 110.0, 1000.0])
    ]
    ran += [launch_of(tmp_path, 2, [0, 1], "up", a=170.0), launch_of(tmp_path, 2, [0, 1], "down", a=182.0)]
    one, two = results_of([cell("a", 2), cell("a", 1)], ran)
    assert (
        one["alone"] == [100, 90, 110, 1000]
        and one["tokens_per_second"] == 325
        and "share_of_alone" not in one
    )
    assert two["tokens_per_second"] == 176 and two["rounds"] == [[170, 182]]
    assert two["share_of_alone"] == pytest.approx(176 / 190)
    assert two["share_of_slowest"] == pytest.approx(176 / 180)
    assert two["peak_gib"] == pytest.approx(2.0)  # without what other visits had left


def test_without_gpus_one_rank_stands_for_each(tmp_path: Path) -> None:
    ran = [launch_of(tmp_path, 1, None, a=100.0), launch_of(tmp_path, 2, None, a=150.0)]
    assert results_of([cell("a", 1), cell("a", 2)], ran)[1]["share_of_alone"] == pytest.approx(0.75)


def test_what_was_not_measured_has_a_reason_and_no_share(tmp_path: Path) -> None:
    ran = [launch_of(tmp_path, 1, [0], a=100.0, b=-1), launch_of(tmp_path, 2, [0, 1], b=10.0)]
    found = {(r["row"], r["ranks"]): r for r in results_of([cell(x, n) for x in "ab" for n in (1, 2)], ran)}
    assert found["a", 2]["reason"] == "not measured" and found["b", 1]["reason"] == "why"
    assert "share_of_alone" not in found["b", 2] and found["b", 2]["tokens_per_second"] == 10


def test_how_far_a_plan_was_off_is_told() -> None:
    results = [
        {
            "tokens_per_second": 100.0,
            "planned_tokens_per_second": 112.0,
            "peak_gib": 10.0,
            "planned_peak_gib": 9.3,
        },
        {
            "tokens_per_second": 100.0,
            "planned_tokens_per_second": None,
            "peak_gib": None,
            "planned_peak_gib": 5.0,
        },
    ]
    assert apart(results[0], "tokens_per_second") == pytest.approx(0.12)
    assert farthest(results) == "what was planned: memory within 7.0%, speed within 12.0%"
    assert farthest(results[1:]) == ""


def test_a_step_of_one_size_has_fewer_micro_batches_on_more_gpus() -> None:
    options = options_of("--step_tokens", "128", "--micro_batch", "2")
    assert [bench_scaling.accumulation_on(options, ranks) for ranks in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(ValueError, match=r"--step_tokens 128: 3 GPUs take 96 tokens at a time .* a multiple"):
        bench_scaling.accumulation_on(options, 3)
    assert bench_scaling.accumulation_on(options_of(), 8) == 1


def test_one_gpu_is_measured_on_each_at_the_same_time_and_rounds_turn(tmp_path: Path) -> None:
    options = options_of("--rounds", "2", "--gpus", "1", "2", "4")
    groups = bench_scaling.launches_of(options, ROWS, tmp_path, 4)
    assert [[(one.ranks, one.places) for one in group] for group in groups[:3]] == [
        [(1, [0]), (1, [1]), (1, [2]), (1, [3])],
        [(2, [0, 1])],
        [(4, [0, 1, 2, 3])],
    ]
    assert [group[0].ranks for group in groups] == [1, 2, 4, 4, 2, 1]
    assert len({one.name for group in groups for one in group}) == 12


def test_places_are_among_the_gpus_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    monkeypatch.setenv("RANK", "3")
    assert own_environment([0, 2])["CUDA_VISIBLE_DEVICES"] == "4,7"
    assert own_environment()["CUDA_VISIBLE_DEVICES"] == "4,6,7" and "RANK" not in own_environment()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert own_environment([1])["CUDA_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in own_environment()


FAKE = """
import json, sys
rows = [w for k, w in zip(sys.argv, sys.argv[1:]) if k == "--row"]
results = [{"row": r, "reason": "not visited", "tried": []} for r in rows]
for place, row in enumerate(rows):
    if row == "b":
        json.dump({"results": results}, open(sys.argv[1], "w"))
        print("error: no room\\n")
        sys.exit(7)
    results[place] = {"row": row, "tokens_per_second": 1.0, "tried": [{}]}
json.dump({"results": results}, open(sys.argv[1], "w"))
"""


@pytest.mark.interpreter
def test_a_row_that_ends_the_process_is_left_out_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(launch: Launch, options: Any) -> list[str]:
        return [
            sys.executable,
            "-c",
            FAKE,
            str(launch._report),
            *(w for r in launch.left for w in ("--row", r)),
        ]

    monkeypatch.setattr(launches.Launch, "command", command)
    launch = Launch("x", tmp_path, 2, None, 1, ROWS)
    launches.run_together([launch], options_of())
    assert launch.found["a"]["tokens_per_second"] == launch.found["c"]["tokens_per_second"] == 1
    assert launch.found["b"] == {"row": "b", "reason": "bench_model.py ended with status 7: error: no room"}
    again = Launch("x", tmp_path, 2, None, 1, ROWS)
    assert again.found == launch.found and not again.left


@pytest.mark.interpreter
def test_a_request_to_stop_ends_what_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps nothing of it, so that another call measures it."""
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(launches.Launch, "command", lambda *_: sleeps)
    launch, stops = Launch("x", tmp_path, 1, None, 1, ROWS), list[int]()
    monkeypatch.setattr(launches.time, "sleep", lambda _: stops.append(signal.SIGTERM))
    launches.run_together([launch], options_of(), stops)
    assert launch.process is not None and launch.process.returncode == -signal.SIGTERM
    assert launch.left == list(ROWS) and not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--time_limit_s", "5"], "--time_limit_s needs --work_dir"),
        (["--stages"], "name no row"),
        (["--step_tokens", "100"], "--step_tokens 100: 1 GPUs take"),
        (["--row", "mine", "max_steps=3"], "max_steps would make another model or batch"),
        (["--seq_length", "24", "--row", "f", "optim=sgd"], "optim"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_starts(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches.subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    try:
        status = bench_scaling.main([*SMALL, *words])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and told in capsys.readouterr().err


def test_a_folder_of_another_call_or_of_other_files_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches.subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    command = [*SMALL, "--gpus", "1", "--work_dir", str(tmp_path)]
    with (tmp_path / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert bench_scaling.main(command) == 2
        assert "another call is at work in it; wait for its end" in capsys.readouterr().err
    (tmp_path / ".lock").rename(tmp_path / "mine.txt")
    assert bench_scaling.main(command) == 2
    assert "it has other files; give an empty folder" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt"}


def test_when_time_is_over_no_launch_begins_and_the_next_call_makes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(group: list[Launch], *_: Any) -> None:
        for launch in group:
            ran.append(launch.name)
            launch.found = launch_of(tmp_path, launch.ranks, None, zero_1_bf16=10.0).found
            launch._kept.write_text(json.dumps(launch.found))
        time.sleep(1.05)

    monkeypatch.setattr(bench_scaling, "run_together", run)
    command = [*SMALL, "--gpus", "1", "2", "--work_dir", str(tmp_path), "--time_limit_s", "1"]
    assert bench_scaling.main(command) == 3 and ran == ["gpus_1_round_0"]
    assert bench_scaling.main(command) == 0 and ran == ["gpus_1_round_0", "gpus_2_round_0"]


def program(*words: str) -> list[str]:
    return [sys.executable, str(ROOT / "test_fp8/bench_scaling.py"), *SMALL, *words]


@pytest.mark.interpreter
@pytest.mark.slow
def test_it_measures_is_stopped_and_goes_on(tmp_path: Path) -> None:
    folder, output = tmp_path / "work", tmp_path / "out.json"
    command = program("--gpus", "1", "2", "--work_dir", str(folder), "--output", str(output))
    # behind the first launch; what it started ends with it
    running = subprocess.Popen(
        command, env=clean_environment(), start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 120
        while not (folder / "gpus_2_round_0.log").exists():
            assert running.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        running.terminate()
        assert running.wait(30) == 143
        kept = (folder / "gpus_1_round_0.json").read_bytes()
        assert not (folder / "gpus_2_round_0.json").exists()
        with pytest.raises(ProcessLookupError):
            os.killpg(running.pid, 0)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    ended = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (folder / "gpus_1_round_0.json").read_bytes() == kept
    report = json.loads(output.read_text())
    speeds = {r["ranks"]: r["tokens_per_second"] for r in report["results"]}
    assert [r["step_tokens"] for r in report["results"]] == [32, 64]
    assert report["results"][1]["share_of_alone"] == pytest.approx(speeds[2] / (2 * speeds[1]))
    assert output.with_suffix(".png").is_file() and str(tmp_path) not in output.read_text()
    other = subprocess.run([*command, "--seed", "1"], env=clean_environment(), capture_output=True, text=True)
    assert other.returncode == 2 and "what it has is of other command; give another folder" in other.stderr
