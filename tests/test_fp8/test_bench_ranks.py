"""test_fp8/bench_model.py on several ranks: what can be measured there, and its share of as many times one rank."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from model.config import load_config, num_parameters
from model.fp8.machine import describe
from test_fp8 import bench_model
from test_fp8.common.rows import RowError
from test_fp8.common.same_model import Reference
from test_fp8.model import visit
from test_fp8.model.results import add_ratio_to_one_rank, lines, other_conditions
from test_fp8.model.rows import all_rows, configured_rows
from tests.reliability.launching import launch
from train.data.stream import Batch
from train.engine import step
from train.engine.zero import masters

CONDITIONS = {
    "model": "tiny",
    "parameters": num_parameters(load_config("tiny")),
    "seq_length": 16,
    "document_length": 16,
    "accumulation": 2,
    "deterministic": False,
}
FEW = "--measure step --rounds 1 --steps 1 --seq_length 16 --micro_batch 2".split()
ROW = {"row": "te_layer_bf16", "measure": "step", "micro_batch": 2, "attention": "torch SDPA, flash"}
CONFIGURATION = {"model.variant": "te_layer", "precision.compute": "bf16", "speed.cuda_graphs": False}


def of_one_rank(**more: Any) -> dict[str, Any]:
    machine, versions = describe()
    return CONDITIONS | {"ranks": 1, "machine": machine, "versions": versions} | more


def rows_of(*words: str) -> Any:
    options = bench_model.OPTIONS.parse_args([*FEW, "--config", "tiny", *words])
    every = all_rows(options)
    bench_model.OPTIONS.settle(options)
    return configured_rows(options, every)


def test_rows_of_several_ranks_leave_nothing_to_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would choose for itself, and wait for the others for ever."""
    one = ["--rows", "te_layer_bf16", "--step_rows", "te_layer_bf16"]
    refused = [["--micro_batch", "2", "4"], ["--attention", "auto", "flash"], ["--measure", "bare"],
               ["--rows", "te_layer_auto", "--step_rows", "te_layer_auto"],
               ["--rows", "hf_bf16", "--step_rows", "hf_bf16", "--loss", "torch", "compiled"]]  # fmt: skip
    tokens = {}
    for ranks in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        ((_, _, settings),) = rows_of(*one)
        tokens[ranks] = next(iter(settings.values())).train_batch_size_tokens
        for words in refused:
            if ranks == "1":
                rows_of(*one, *words)
                continue
            with pytest.raises(RowError, match="on 2 ranks steps are measured .* by its own clock"):
                rows_of(*one, *words)
    assert tokens["2"] == 2 * tokens["1"]


def test_ranks_take_as_many_steps_as_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda told, src: told.__setitem__(0, 7 + src))
    assert visit.as_rank_0(3) == 7


def test_the_share_of_one_rank_is_of_the_same_row_under_the_same_conditions() -> None:
    options, parameters = SimpleNamespace(config="tiny", **CONDITIONS), CONDITIONS["parameters"]
    machine, versions = describe()
    one = of_one_rank()
    options.one_rank = [one, one]
    assert other_conditions(options, parameters) == ""
    other_gpu = {"machine": machine | {"gpu": "another GPU", "torch_threads": 99}}
    other_versions = {"versions": versions | {"torch": "1.0", "cudnn_of_theirs": "9"}}
    for there, differ in (
        (one | {"ranks": 2, "accumulation": 8}, ["accumulation is 8 there, and 2 is expected", "ranks is 2"]),
        (one | other_gpu, [f"machine.gpu is another GPU there, and {machine.get('gpu')} is expected"]),
        (
            one | other_versions,
            ["versions.torch is 1.0 there", "versions.cudnn_of_theirs is 9 there, and None"],
        ),
        (one | {"parameters": 1}, [f"parameters is 1 there, and {parameters} is expected"]),
    ):
        options.one_rank = [one, there]
        said = other_conditions(options, parameters).split("; ")
        assert all(text.startswith(start) for text, start in zip(said, differ, strict=True)), said
    own = ROW | {"configuration": CONFIGURATION, "tokens_per_second": 190.0}
    others = [own | {"tokens_per_second": 50.0, name: "other"} for name in (*ROW, "configuration")]
    results: list[dict[str, Any]] = [dict(own)]
    slow, fast = ({"results": [*others, own | {"tokens_per_second": speed}]} for speed in (90.0, 110.0))
    add_ratio_to_one_rank(results, [slow, fast], 2)  # GPUs of one host, each by itself
    assert results[0]["ratio_to_one_rank"] == 0.95 and results[0]["one_rank_tokens_per_second"] == 100.0
    results = [dict(own)]
    add_ratio_to_one_rank(results, [slow, {"results": others}], 2)
    assert results[0]["ratio_to_one_rank"] is None
    said = lines([results[0] | {"best_bf16": False, "attention_kernels": []}])
    assert any("step te_layer_bf16: not in --one_rank with this configuration" in line for line in said)


@pytest.mark.parametrize(
    ("text", "said"), [("{}", 'no "results"'), ("[", "Expecting value"), (None, "No such file")]
)
def test_a_report_that_is_none_is_refused(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "one.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit):
        bench_model.main(["--one_rank", str(file)])
    assert said in capsys.readouterr().err
    file.write_text(json.dumps({"results": [], "ranks": 4}))
    assert bench_model.main(["--one_rank", str(file), *FEW]) == 2
    assert (
        "--one_rank: " in (error := capsys.readouterr().err)
        and "ranks is 4 there, and 1 is expected" in error
    )


@pytest.mark.usefixtures("process_group")
def test_a_row_of_zero_3_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights and optimizer states were in the memory of all rows behind it."""
    held: list[weakref.ref] = []

    def built(model: nn.Module, *of_run: Any) -> Any:
        engine = step.build_engine(model, *of_run)
        held.extend(map(weakref.ref, (model, *model.parameters(), *(m.tensor for m in masters(engine)))))
        return engine

    monkeypatch.setattr(visit, "build_engine", built)
    monkeypatch.setattr(visit, "prove_row", lambda *_: visit.Proof(0.0, 28, "torch SDPA"))
    monkeypatch.setattr(visit, "loss_error", lambda *_: 0.0)
    row = ["--row", "zero_3", "model.variant=te_layer", "deepspeed=ds_config_zero3.json"]
    ((_, _, settings),) = rows_of("--rows", "--step_rows", "*", *row)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    visitor = visit.Visitor(Reference({}, torch.empty(0), []), Batch(ids, ids), 0.0)
    visitor.visit(next(iter(settings.values())), "step")
    visit.free_memory()
    assert held and not [each for each in held if each() is not None]


@pytest.mark.slow
@pytest.mark.process
def test_two_ranks_are_measured_and_told_once(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    of_one = ROW | {"configuration": CONFIGURATION, "tokens_per_second": 1000.0}
    one.write_text(json.dumps(of_one_rank(results=[of_one])))
    rows = ["--rows", "te_layer_bf16", "--step_rows", "te_layer_bf16"]
    rows += ["--row", "zero_3", "model.variant=te_layer", "deepspeed=ds_config_zero3.json"]
    done = launch(2, "test_fp8/bench_model.py", *FEW, *rows, "--one_rank", str(one), "--output", str(two))
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("ranks: 2") == 1 and done.stdout.count("tokens/s, loss") == 2
    written = json.loads(two.read_text())
    assert written["ranks"] == 2 and "one_rank" not in written["command"]
    own, zero_3 = written["results"]
    assert (
        own["ratio_to_one_rank"] == pytest.approx(own["tokens_per_second"] / 2000)
        and own["deepspeed_share"] is None
    )
    step_tokens = 2 * 2 * 2 * 16
    assert own["tokens_per_second"] == pytest.approx(step_tokens / own["step_ms"] * 1e3)
    assert zero_3["pass_ms"] is None and zero_3["step_ms"] > 0 and zero_3["ratio_to_one_rank"] is None
    assert "step zero_3: not in --one_rank" in done.stdout
    assert f"{own['ratio_to_one_rank']:.3f} of 2 x 1,000" in done.stdout and any(
        "of 2 x" in line for line in lines([own])
    )
