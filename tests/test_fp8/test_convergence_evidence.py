"""test_fp8/convergence: time to equal loss, health, rows with another optimizer, what may differ, the plan."""

from __future__ import annotations

import functools
import json
import signal
from pathlib import Path

import pytest

from test_fp8 import compare_convergence
from test_fp8.common.rows import Row
from test_fp8.convergence import evidence, trainings
from test_fp8.convergence.rows import (
    AFTER_START,
    STAGE_ENDS,
    ComparisonError,
    Plan,
    comparable,
    make_plans,
    read_metrics,
    reference_of,
    state_of,
    trained_under,
)
from train.guard.signals import PR_SET_PDEATHSIG, STOPPED


def training(*evaluated: tuple[int, float], rate: float = 10.0) -> list[dict]:
    """Records of a training of 10 tokens a step that is evaluated at these steps."""
    return [
        {"step": step, "tokens": 10 * step, "loss": loss, "eval_loss": loss, "tokens_per_second": rate}
        for step, loss in evaluated
    ]


def test_seconds_are_those_of_the_steps() -> None:
    records = training((10, 5.0), (20, 4.0))
    records[1]["tokens_per_second"] = 50.0
    records.insert(1, {"step": 15, "tokens": 150, "eval_loss": 4.5})  # says nothing of its speed
    assert [second for second, _ in evidence.seconds(records)] == [10.0, 10.0, 12.0]


def test_starts_are_not_in_the_seconds(tmp_path: Path) -> None:
    """The first speed since a start or a stage's begin holds what these take: here 1 in place of 10 tokens/s."""
    records = training(*((step, 4.0) for step in range(10, 70, 10)))
    assert [second for second, _ in evidence.seconds(records)] == [10, 20, 30, 40, 50, 60]
    for slow in (0, 2, 4):
        records[slow]["tokens_per_second"] = 1.0
    records.insert(2, {"step": 25, "tokens": 250, "eval_loss": 4.0})  # made up for by the resumed run
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    starts = [{"step": 0, "time": 1.0, "stages": []}]
    starts += [{"step": 24, "time": 2.0, "stages": [{"step": 40}]}]
    (tmp_path / "run.json").write_text(json.dumps({"starts": starts}))
    found = read_metrics(tmp_path)
    assert [second for second, _ in evidence.seconds(found)] == [10, 20, 20, 30, 40, 50, 60]
    (tmp_path / "run.json").unlink()
    assert [second for second, _ in evidence.seconds(read_metrics(tmp_path))][:2] == [10, 20]
    assert [second for second, _ in evidence.seconds(found[:1])] == [100], "there is no other"


def test_each_stage_has_its_own_speed() -> None:
    """bf16 at half the speed at the end: the median of all would be that of FP8 alone."""
    records = training(*((step, 4.0) for step in range(10, 110, 10)))
    for record in records[8:]:
        record["tokens_per_second"] = 5.0
    records[8] |= {"tokens_per_second": 1.0, AFTER_START: True}
    assert evidence.speed(records) == 10
    records[7][STAGE_ENDS] = records[9][STAGE_ENDS] = {"number": 1}
    assert evidence.seconds(records)[-1][0] == 80 + 20 + 20
    assert evidence.speed(records) == 900 / (70 + 40)
    assert evidence.speed(records[:1]) == 10


def test_time_to_a_loss_is_between_the_evaluations_around_it() -> None:
    records = training((10, 5.0), (20, 4.0), (30, 4.2), (40, 3.0))
    assert evidence.time_to(records, 5.5) == 10
    assert evidence.time_to(records, 4.25) == 17.5
    assert evidence.time_to(records, 3.6) == 35  # from 4.2, which was after a lower one
    assert evidence.time_to(records, 2.9) is None


def test_equal_loss_is_the_worse_of_the_two_ends() -> None:
    fast, slow = training((10, 4.0), (20, 3.1), rate=20), training((10, 4.0), (20, 3.0))
    found = evidence.equal_loss(fast, {"fast": fast, "slow": slow})
    assert (found["row"], found["eval_loss"], found["seconds"]) == ("slow", 3.1, 10)
    assert found["others_seconds"] == pytest.approx(19) and found["ratio"] == pytest.approx(1.9)
    assert evidence.equal_loss(slow, {"fast": fast})["ratio"] == pytest.approx(10 / 19)


def test_health_names_the_worst_of_each_statistic() -> None:
    def look(step: int, underflow: list[float | None], error: float) -> dict:
        of = {"input": {"underflow": underflow, "error": [error, error]}}
        return {"step": step, "fp8_health": {"model.layers.*.mlp.fc2": of}}

    alarm = {"gemm": "model.layers.1.mlp.fc2", "operand": "input", "found": {"underflow": 0.2}}
    records = [
        {"step": 10, "loss": 3.0},
        look(20, [0.01, 0.2], 0.03) | {"fp8_alarms": {"began": [alarm], "over": [], "active": 1, "count": 1}},
        look(30, [None, 0.02], 0.04)
        | {"fp8_alarms": {"began": [], "over": [alarm], "active": 0, "count": 1}},
    ]
    found = evidence.health(records)
    assert found is not None
    assert (found["looks"], found["alarms"], found["active_at_end"], found["began"]) == (2, 1, 0, [alarm])
    place = {"gemm": "model.layers.*.mlp.fc2", "operand": "input"}
    assert found["worst"]["underflow"] == {"value": 0.2, "layer": 1, "step": 20, **place}
    assert found["worst"]["error"] == {"value": 0.04, "layer": 0, "step": 30, **place}
    assert evidence.health(records[:1]) is None
    found = evidence.health([*records[:2], {"step": 40, "fp8_alarms": records[2]["fp8_alarms"]}])
    assert found is not None and found["active_at_end"] == 0, "they ended with the looks"


# ---------------------------------------------------------------- rows


def plans_of(*options: str) -> list[Plan]:
    return make_plans(compare_convergence.parse_arguments(["train_config_evidence", *options]))


def test_a_row_with_an_optimizer_has_its_own_reference() -> None:
    plans = plans_of("--rows", "bf16", "muon_delayed", "muon", "delayed", "--noise_seed", "7")
    found = {plan.row.name: reference_of(plan, plans).row.name for plan in plans}
    assert found == {
        "bf16": "bf16",
        "bf16_seed7": "bf16",
        "muon_delayed": "muon",
        "muon": "bf16",
        "delayed": "bf16",
    }
    with pytest.raises(ComparisonError, match="--row NAME precision.compute=bf16 optim=muon"):
        plans_of("--rows", "bf16", "muon_delayed")  # before any training

    muon = plans_of(
        "--rows", "delayed", "bf16", "muon", "muon_delayed", "--baseline", "muon", "--noise_seed", "7"
    )
    found = {plan.row.name: reference_of(plan, muon).row.name for plan in muon}
    assert found == {
        "muon": "muon",
        "muon_seed7": "muon",
        "delayed": "bf16",
        "bf16": "muon",
        "muon_delayed": "muon",
    }
    with pytest.raises(ComparisonError, match="--row NAME precision.compute=bf16$"):
        plans_of("--rows", "muon", "delayed", "--baseline", "muon")


def test_a_row_waits_for_its_reference(capsys: pytest.CaptureFixture) -> None:
    plans = plans_of("--rows", "bf16", "delayed", "muon", "muon_delayed")
    records = {plan.row.name: training((10, 3.0)) for plan in plans}
    assert comparable(plans, records) == records
    del records["muon"]
    assert list(comparable(plans, records)) == ["bf16", "delayed"]
    assert "muon_delayed: finished; it is compared with muon, which is not" in capsys.readouterr().out
    del records["bf16"]
    assert not comparable(plans, records)


def test_what_is_compared_with_what(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Neither the twin with another seed nor what has FP8 in a stage is the best row without FP8; conditions differ
    from today's."""
    options = ["--noise_seed", "7", "--work_dir", str(tmp_path)]
    later = ["precision.compute=bf16", 'precision.schedule=[{"until_step": 5}, {"compute": "fp8"}]']
    plans = plans_of("--rows", "bf16", "muon", "muon_delayed", "--row", "later", *later, *options)
    under = {"sources": "old", "machine": {}, "versions": {}}
    records = {}
    for plan, loss in zip(plans, (3.0, 2.0, 2.9, 2.95, 1.0), strict=True):
        plan.folder.mkdir()
        trainings.note(plan, under | ({"sources": "new"} if plan.row.name == "muon" else {}), True)
        (plan.folder / "log.txt").write_text("FP8: a\nFP8: a\nthe change took 9.5 s\nFP8: b\n")
        starts = [
            {"step": 0, "time": 1.0},
            {"step": 9, "time": 2.0, "stages": [{"step": 9}, {"took_s": 1.5}]},
        ]
        (plan.folder / "run.json").write_text(json.dumps({"starts": starts}))
        records[plan.row.name] = training((10, 4.0), (20, loss))
        for record in records[plan.row.name]:
            record |= {"grad_norm": 1.0, "skipped_steps": 0}
    of = compare_convergence.conditions_of(plans, under | {"sources": "new"})
    assert of["sources"] == "new", "a row was trained under today's"
    assert compare_convergence.conditions_of(plans, under | {"sources": "later"})["sources"] == "old"
    results, _ = compare_convergence.compare(plans, records, of, 0.005)
    found = {result["row"]: result for result in results}
    assert {result["equal_loss"]["row"] for result in results} == {"muon"}
    assert found["bf16_seed7"]["equal_loss_same_optimizer"]["row"] == "bf16"
    assert {name: result["conditions_differ"] for name, result in found.items()} == {
        "bf16": ["sources"],
        "bf16_seed7": ["sources"],
        "muon": [],
        "muon_delayed": ["sources"],
        "later": ["sources"],
    }
    assert found["later"]["fp8"] == "FP8: a; then FP8: b" and found["later"]["changes_s"] == [None, 1.5]
    compare_convergence.print_table(results, 0)
    assert "later: to change the precision took ?, 1.5 s" in capsys.readouterr().out


def test_the_evidence_has_the_size_that_it_claims() -> None:
    """At least 100 M parameters, 500 M tokens; by default CONFIG's own steps."""
    from model.config import load_sizes, num_parameters

    config = plans_of("--rows", "bf16")[0].config
    assert num_parameters(load_sizes(config["model"]["config"])) >= 100e6
    assert config["max_steps"] * config["train_batch_size_tokens"] >= 500e6
    assert config["precision"]["health_steps"] == 100
    assert plans_of("--rows", "bf16", "--max_steps", "700")[0].config["max_steps"] == 700


def test_a_plan_needs_no_data(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    work = ["--work_dir", str(tmp_path / "work")]
    plan = ["train_config_evidence", "--rows", "bf16", "delayed", *work, "--plan", "h200"]
    assert compare_convergence.main([*plan, "--at_once", "2"]) == 0
    together = capsys.readouterr().out.splitlines()
    assert compare_convergence.main(plan) == 0
    alone = capsys.readouterr().out.splitlines()
    assert together[:2] == alone[:2] and together[0].startswith("bf16: 1,910 steps, 501 M tokens, about ")
    minutes = [float(line.split()[-2]) for line in alone[:2]]
    assert f"all, 1 at a time: {sum(minutes):.0f} minutes" in alone[2]
    assert f"all, 2 at a time: {max(minutes):.0f} minutes" in together[2]
    assert not (tmp_path / "work").exists()


# ---------------------------------------------------------------- trainings


def row_in(folder: Path, **conditions: object) -> Plan:
    """A row that was finished under `conditions`."""
    config = {"max_steps": 2, "save_steps": 0, "learning_rate": 1.0}
    plan = Plan(Row("x", {}), config, [], folder)
    folder.mkdir(exist_ok=True)
    trainings.note(
        plan, {"sources": "a", "machine": {"gpu": "H200"}, "versions": {}, "data": {}} | conditions, True
    )
    (folder / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0, "eval_loss": 1.0}\n')
    return plan


def test_what_may_differ_is_said(tmp_path: Path) -> None:
    now = {"sources": "a", "machine": {"gpu": "H200"}, "versions": {}, "data": {}}
    assert state_of(row_in(tmp_path), now).why is None
    plan = row_in(tmp_path, sources="b", machine={"gpu": "H100"})
    assert "sources" in (state_of(plan, now).why or "")
    assert "machine.gpu" in (state_of(plan, now, ["sources"]).why or "")
    state = state_of(plan, now, ["sources", "machine"])
    assert state.why is None and state.differ == ("sources", "machine")
    written = row_in(tmp_path / "written", model={"hidden_size": 8, "transformers_version": "5.17.0"})
    later = now | {"model": {"hidden_size": 8, "transformers_version": "5.23.0"}}
    assert state_of(written, later).why is None, "one of the versions, as every model has it"
    assert "hidden_size" in (state_of(written, later | {"model": {"hidden_size": 16}}).why or "")
    other = row_in(tmp_path / "other", data={"x": 1})
    assert "data.x" in (state_of(other, now, ["sources", "machine", "versions"]).why or "")
    plan.config["save_steps"] = 5
    assert state_of(plan, now, ["sources", "machine"]).why is None, "how it is kept"
    plan.config["learning_rate"] = 2.0
    assert "learning_rate" in (state_of(plan, now, ["sources", "machine"]).why or "")


def test_an_unfinished_row_goes_on_from_a_checkpoint_alone(tmp_path: Path) -> None:
    plan = row_in(tmp_path / "x")
    now = trained_under(plan)
    trainings.note(plan, now, finished=False)
    assert not state_of(plan, now).goes_on
    (plan.folder / "checkpoints/step-00000001").mkdir(parents=True)
    assert state_of(plan, now).goes_on
    assert not trainings.ready(plan, now, []) and (plan.folder / "checkpoints").exists()
    assert not state_of(plan, now | {"data": {"x": 2}}).goes_on
    assert not trainings.ready(plan, now | {"data": {"x": 2}}, [])
    assert not (plan.folder / "checkpoints").exists(), "other data: it begins anew"
    assert (tmp_path / "x.earlier1/checkpoints/step-00000001").exists(), "hours of training"
    assert not trainings.ready(plan, now, [])
    assert not (tmp_path / "x.earlier2").exists(), "nothing was trained"


def test_a_row_of_an_older_version_is_finished(tmp_path: Path) -> None:
    """Its file was written at the end, and did not say so."""
    plan = row_in(tmp_path / "x")
    now, file = trained_under(plan), plan.folder / "conditions.json"
    was = json.loads(file.read_text())
    del was["finished"]
    file.write_text(json.dumps(was))
    assert state_of(plan, now).why is None
    assert state_of(plan, now | {"data": {"x": 2}}).finished


@pytest.mark.parametrize("conditions", [None, "[]", "{}", "{"])
def test_a_folder_that_is_no_row_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, conditions: str | None
) -> None:
    own = tmp_path / "mine/checkpoints/step-00000001/weights"
    own.parent.mkdir(parents=True)
    own.write_text("a user's run")
    if conditions is not None:
        (tmp_path / "mine/conditions.json").write_text(conditions)
    for row in ("mine", "before it"):
        with pytest.raises(ComparisonError, match="row mine: .*mine has files and no conditions.json"):
            train(monkeypatch, tmp_path, {row: Process(0, 1), "mine": Process(0, 1)}, 0)
    with pytest.raises(ComparisonError, match="row mine"):
        trainings.ready(Plan(Row("mine", {}), {}, [], tmp_path / "mine"), {}, [])
    assert own.read_text() == "a user's run" and not (tmp_path / "before it").exists()
    assert not (tmp_path / trainings.LOCK).exists(), "nothing is written beside it"


@pytest.mark.process
def test_one_call_at_a_time_in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And none while a training lives that another call left."""
    folder = tmp_path / "work"
    plan = Plan(Row("x", {}), {}, ["sleep", "60"], folder / "x")
    with trainings.alone_in(folder) as lock:
        plan.folder.mkdir()
        training = trainings.start(plan, 0, trainings.Limits(), lock)
        with pytest.raises(ComparisonError, match="another call of this program"):
            train(monkeypatch, folder, {}, 0)
    try:
        with pytest.raises(ComparisonError, match="or a training that it left, is at work in"):
            train(monkeypatch, folder, {}, 0)
    finally:
        training.process.kill()
        training.process.wait()
        training.log.close()
    assert train(monkeypatch, folder, {}, 0) == (["there"], [])


def test_what_was_finished_otherwise_is_kept(tmp_path: Path) -> None:
    plan = row_in(tmp_path / "x", sources="b")
    now = trained_under(plan) | {"sources": "a"}
    for number in (1, 2):
        assert not trainings.ready(plan, now, [])
        assert (tmp_path / f"x.earlier{number}/metrics.jsonl").exists() and not (
            tmp_path / "x/metrics.jsonl"
        ).exists()
        row_in(tmp_path / "x", sources="c")


def test_each_row_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def popen(*_: object, env: dict[str, str], preexec_fn: functools.partial, **__: object) -> None:
        seen.append(env.get("CUDA_VISIBLE_DEVICES"))
        assert preexec_fn.args == (PR_SET_PDEATHSIG, signal.SIGTERM), (
            "with a checkpoint, as this program ends"
        )

    monkeypatch.setattr(trainings.subprocess, "Popen", popen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan = Plan(Row("x", {}), {}, [], tmp_path)
    for place in (0, 1):
        trainings.start(plan, place, trainings.Limits(at_once=2, nproc=2, gpus=4), 9).log.close()
    trainings.start(plan, 0, trainings.Limits(gpus=4), 9).log.close()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    trainings.start(plan, 1, trainings.Limits(at_once=2, gpus=2), 9).log.close()
    assert seen == ["0,1", "2,3", None, "7"]


def test_more_rows_at_once_than_gpus_are_refused() -> None:
    trainings.Limits(at_once=4, nproc=2, gpus=8)
    trainings.Limits(at_once=4, gpus=0)
    with pytest.raises(ComparisonError, match="--at_once 4 with --nproc 2 takes 8 GPUs, and 2 are here"):
        trainings.Limits(at_once=4, nproc=2, gpus=2)


def test_a_time_limit_in_which_no_row_begins_is_refused() -> None:
    for seconds in (0.5, trainings.LEAST_S):
        with pytest.raises(ComparisonError, match=f"--time_limit_s {seconds:g} trains nothing"):
            trainings.Limits(time_limit_s=seconds)
    trainings.Limits(time_limit_s=trainings.LEAST_S + 1)


def test_a_signal_is_a_request_to_stop() -> None:
    asked = trainings.Asked(0)
    with asked.listening():
        assert asked.left_s == float("inf")
        signal.raise_signal(signal.SIGTERM)
        assert asked.left_s == 0
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert 0 < trainings.Asked(100).left_s <= 100


class Process:
    """A training that ends with `status` once it was asked so often; or after SIGTERM, with that of a stop."""

    def __init__(self, status: int, polls: int) -> None:
        self.status, self.polls, self.terminated = status, polls, False
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.polls -= 1
        if self.terminated or self.polls < 0:
            self.returncode = STOPPED if self.terminated else self.status
        return self.returncode

    def terminate(self) -> None:
        assert not self.terminated, "a second signal would end it at once"
        self.terminated = True

    def wait(self) -> None:
        assert self.terminated


def train(
    monkeypatch: pytest.MonkeyPatch, folder: Path, processes: dict[str, Process], left_s: float, **limits: int
) -> tuple[list[str], list[tuple[str, int]]]:
    """(rows finished, (row, place) in the order of their starts) of rows that these processes train, and of `there`,
    which was finished before, the last of all."""
    began = []
    now = {"sources": "a", "machine": {"gpu": "H200"}, "versions": {}, "data": {}}

    def start(plan: Plan, place: int, *_: object) -> trainings.Training:
        began.append((plan.row.name, place))
        (plan.folder / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0, "eval_loss": 1.0}\n')
        log = (plan.folder / "log.txt").open("w")
        return trainings.Training(plan, processes[plan.row.name], place, log)  # type: ignore[arg-type]

    monkeypatch.setattr(trainings, "start", start)
    monkeypatch.setattr(trainings, "conditions", lambda *_: now)
    monkeypatch.setattr(trainings.TrainingArguments, "from_dict", lambda config: config)
    monkeypatch.setattr(trainings, "POLL_S", 0.0)
    if left_s:
        monkeypatch.setattr(trainings.Asked, "left_s", left_s)
    config = row_in(folder / "there").config
    plans = [Plan(Row(name, {}), config, [], folder / name) for name in (*processes, "there")]
    found = trainings.train_all(plans, now, trainings.Limits(**limits))
    return list(found), began


def test_rows_are_trained_as_places_become_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processes = {"long": Process(0, 9), "short": Process(0, 1), "next": Process(0, 1)}
    found, began = train(monkeypatch, tmp_path, processes, 0, at_once=2)
    assert found == ["long", "short", "next", "there"]
    assert began == [("long", 0), ("short", 1), ("next", 1)]
    assert not any(process.terminated for process in processes.values())


def test_a_row_that_fails_stops_the_others_with_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processes = {"long": Process(0, 99), "bad": Process(1, 1), "next": Process(0, 1)}
    with pytest.raises(ComparisonError, match="row bad: the training ended with status 1"):
        train(monkeypatch, tmp_path, processes, 0, at_once=2)
    assert processes["long"].terminated and not (tmp_path / "next").exists()


@pytest.mark.parametrize("left_s", [trainings.LEAST_S - 1, 0.001])
def test_without_time_no_row_begins_and_what_is_there_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left_s: float
) -> None:
    found, began = train(monkeypatch, tmp_path, {"a": Process(0, 1)}, left_s, time_limit_s=100)
    assert found == ["there"] and not began
