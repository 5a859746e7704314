"""train/setup.py: each part of a run is made with what the arguments, and the state that it goes on from, say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from model.config import flops_per_token, load_config, num_parameters, numbers_of
from model.fp8 import te_backend
from model.fp8.precision import Precision, PrecisionError
from train import setup
from train.checkpoint.files import RunState
from train.config.arguments import TrainingArguments
from train.config.load import build_arguments, resolve_arguments
from train.config.schedule import precisions_of
from train.record.run_folder import RunFolder


def arguments(**changes: Any) -> TrainingArguments:
    """Of one rank; nothing of it is the default."""
    raw: dict[str, Any] = {
        "model": {
            "config": "tiny",
            "variant": "te_linear",
            "attention_backend": "unfused",
            "init_from": "other/hf",
        },
        "data": {
            "sources": {"a": "data/a", "b": "data/b"},
            "weights": {"a": 1, "b": 3},
            "eval_sources": {"c": "data/c"},
            "document_mask": True,
        },
        "speed": {"main_grad": False},
        "seed": 7,
        "max_steps": 5,
        "max_seq_length": 64,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "gradient_checkpointing": True,
    }
    return resolve_arguments(build_arguments(raw | changes), 1)


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of one process, which may take itself for another one."""
    found = [0]
    monkeypatch.setattr(dist, "get_rank", lambda: found[0])
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    return found


@pytest.mark.parametrize("variant", ["te_linear", "hf"])
def test_a_model_is_built_by_its_keys(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """init_from is of a run that begins: a resume has its own weights."""
    model = {"config": "tiny", "variant": variant, "init_from": "other/hf", "attention_backend": "unfused"}
    changes: dict[str, Any] = {"model": model}
    if variant == "hf":
        changes |= {"data": {"sources": {"a": "data/a"}}, "precision": {"compute": "bf16"}}
        changes["model"] |= {"compile": True}
    args, chosen = arguments(**changes), list[str]()
    built: list[tuple[tuple, dict[str, Any]]] = []
    monkeypatch.setattr(setup, "build_model", lambda *its, **keys: built.append((its, keys)))
    monkeypatch.setattr(te_backend, "choose_attention_backend", chosen.append)
    setup.model_for(args)
    _, precision = setup.model_for(args, Path("checkpoints/step-00000003"), {"a": "current"})
    (of_config, of_variant, _), keys = built[0]
    assert of_config.to_dict() == load_config("tiny").to_dict() and of_variant == variant
    assert keys == {
        "seed": 7,
        "init_from": "other/hf",
        "gradient_checkpointing": True,
        "compile": args.model.compile,
        "speed": args.speed,
        "document_mask": variant == "te_linear",
    }
    assert built[1][1] == keys | {"init_from": None}
    assert built[1][0][2] is precision and precision.levels == {"a": "current"}
    assert chosen[0] == "unfused" and args.speed.main_grad is False


def test_data_are_opened_by_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    train = SimpleNamespace(sources="its sources")
    monkeypatch.setattr(setup, "open_stream", lambda *its, **keys: opened.append((its, keys)) or train)
    monkeypatch.setattr(setup, "open_held_out", lambda *its: opened.append(its) or {"eval_loss": "held out"})
    monkeypatch.setattr(setup, "check_fit", lambda *its: opened.append(its))
    args, config = arguments(), load_config("tiny")
    assert setup.streams_for(args, config) == (train, {"eval_loss": "held out"})
    data = args.data
    assert opened == [
        ((data.sources, data.weights, 64, 7), {"document_mask": True}),
        (train, data.sources, data.eval_sources, args.max_eval_samples),
        ("its sources", config.vocab_size, config.max_position_embeddings),
    ]


def test_each_rank_verifies_its_share_of_all_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terabytes would take each of them hours; that of held-out data is among them."""
    shares: list[tuple[int, int]] = []
    stream: Any = SimpleNamespace(verify=lambda *share: shares.append(share) or 1)
    monkeypatch.setattr(setup.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(setup.dist, "get_world_size", lambda: 8)
    setup.verify_data(stream, stream)
    assert shares == [(3, 8)] * 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu"), ("initializer_range", 0.5), ("eos_token_id", 7), ("rms_norm_eps", 1e-3)],
)
def test_what_of_a_model_changes_numbers_is_compared_with_the_checkpoint(key: str, value: object) -> None:
    """Not where it was read."""
    config = load_config("tiny")
    before = numbers_of(config)
    config._name_or_path = "elsewhere"
    assert numbers_of(config) == before
    setattr(config, key, value)
    assert numbers_of(config) == before | {key: value}


def test_what_is_proved_is_what_will_run(monkeypatch: pytest.MonkeyPatch, process_group: None) -> None:
    """At the run's own length: another one may have another attention."""
    asked: list[tuple] = []
    monkeypatch.setattr(setup, "check_startup", lambda *its: asked.append(its) or ["a line"])
    monkeypatch.setattr(setup, "attention_in_use", lambda *_: "fused")
    report = SimpleNamespace(planned=["q", "k", "v"], kept=["lm_head"], levels={"q": "current"})
    monkeypatch.setattr(setup, "fp8_modules", lambda *_: report)
    precision: Any = SimpleNamespace(config=SimpleNamespace(recipe="delayed"), emulated=True, fp8=True)
    model: Any = object()
    proven = setup.prove_all(arguments(), model, precision)
    assert asked == [(model, precision, "unfused", 7, 64)]
    assert proven.fp8 == "3/4 delayed, 1 of them at another level, emulated"
    assert (proven.attention, proven.attention_by_rank) == ("fused", {"fused": [0]})


def state_of(**known: Any) -> RunState:
    return RunState(**{"step": 4, "consumed_samples": 24, "consumed_tokens": 1536, "world_size": 1} | known,
                    zero_stage=1, train_config={}, model_config={})  # fmt: skip


def test_the_first_scales_are_of_the_rows_that_the_rank_begins_with(
    monkeypatch: pytest.MonkeyPatch, rank: list[int]
) -> None:
    rank[0] = 1
    asked: list[tuple] = []
    row = SimpleNamespace(to=lambda device: (row, row, None))
    stream: Any = SimpleNamespace(batch=lambda *its: asked.append(its) or row)
    monkeypatch.setattr(setup, "calibrate", lambda *its: asked.append(its[-2:]) or [])
    monkeypatch.setattr(setup, "build_engine", lambda *_: "engine")
    monkeypatch.setattr(setup, "MicroStep", lambda *_: SimpleNamespace(notes=[]))
    model: Any = object()
    precision: Any = SimpleNamespace(device="cpu")
    setup.engine_for(arguments(), model, precision, stream, {}, state_of(), None)
    assert asked == [(26, 2), (3, None)]


@pytest.mark.parametrize(("number", "first"), [(0, 30), (1, 32)])
def test_a_rehearsal_reads_what_the_next_step_begins_with(
    monkeypatch: pytest.MonkeyPatch,
    rank: list[int],
    number: int,
    first: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Behind samples that a rollback has left out; each rank its own rows, and an evaluation's first."""
    rank[0] = number
    monkeypatch.setattr(setup, "disk_plan", lambda *_: "a plan")
    read: list[tuple] = []
    stream: Any = SimpleNamespace(batch=lambda *its: read.append(its))
    state, ds_config = state_of(skipped_samples=[[24, 30]]), {"zero_optimization": {"stage": 1}}
    setup.rehearse(arguments(), stream, {"eval_loss": stream}, ds_config, state)
    assert read == [(first, 2), (0, 1)]
    said = "dry_run: the run would go on with step 5 of 5, from sample 30; nothing was written"
    assert (said in capsys.readouterr().out) == (number == 0)


def test_levels_of_a_checkpoint_that_a_later_stage_needs_are_asked_for_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hours before it, while the run is in bf16 and needs none."""

    def require(te: Any, recipe: str, *instead: str) -> None:
        if recipe == "block":
            raise te_backend.BackendError("block is not available here")

    monkeypatch.setattr(te_backend, "require_fp8", require)
    monkeypatch.setattr(setup, "_report", lambda *_: [])
    model: Any = SimpleNamespace(named_modules=lambda: [])
    nothing: Any = None
    args = arguments(precision={"bf16_modules": [], "schedule": [{"until_step": 4, "compute": "bf16"}, {}]})
    state = state_of(escalations=[{"step": 2, "module": "a", "from": "delayed", "to": "block"}])
    precision = Precision(precisions_of(args.precision)[0], levels=state.levels)
    with pytest.raises(PrecisionError, match=r"^stage 2 of 2 of precision.schedule.*block is not available"):
        setup.announce(args, model, precision, nothing, 6.5, state)


def test_what_is_said_of_model_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "backend_in_use", lambda *_: "a backend")
    shards = [SimpleNamespace(documents=n) for n in (3, 5)]
    stream: Any = SimpleNamespace(
        describe=lambda: "some data",
        num_tokens=960,
        vocab_size=300,
        sources=[SimpleNamespace(shards=shards[:1]), SimpleNamespace(shards=shards[1:])],
    )
    config = load_config("tiny")
    model: Any = SimpleNamespace(config=config)
    precision: Any = SimpleNamespace(emulated=True)
    said = "\n".join(setup._report(arguments(), model, precision, stream, 6.5, state_of()))
    for words in (
        f"model: te_linear, {num_parameters(config) / 1e6:.1f} M parameters, "
        f"{flops_per_token(config, 64) / 1e9:.3f} GFLOP a token at 64 tokens",
        "5 steps x 384 tokens = 1,920 tokens, 2.00 times the training data",
        f"the tokenizer of the data has 300 of the model's {config.vocab_size:,} ids",
        "attention stays within documents, 120 tokens on average",
    ):
        assert words in said
    # of a run that has more steps than it is to have now, nothing is taken back
    for consumed, words in (
        (3072, "8 steps x 384 tokens = 3,072 tokens, 3.20 times"),
        (480, "8 steps, which had 480 tokens in all, and 0 x 384 tokens = 480 tokens, 0.50 times"),
    ):
        beyond = state_of(step=8, consumed_tokens=consumed)
        assert f"{words} the training data" in setup._report(
            arguments(), model, precision, stream, 6.5, beyond
        )


def test_a_start_notes_what_it_has_otherwise_and_no_earlier_one(tmp_path: Path) -> None:
    """With what makes a run out of a checkpoint of another one."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.stopped.write_text("{}")
    other = tmp_path / "other/checkpoints/step-00000004"
    changes = [{"step": step, "key": "learning_rate", "old": 1, "new": step} for step in (2, 4)]
    state = state_of(changes=changes, began_at={"path": "there"})
    args = arguments(output_dir=str(folder.path))
    setup.open_folder(args, {"zero_optimization": {}}, state, other).close()
    (line,) = map(json.loads, folder.metrics.read_text().splitlines())
    assert (line["step"], line["tokens"]) == (4, 1536)
    assert (line["changes"], line["began_at"]) == (changes[1:], {"path": "there"})
    assert not folder.stopped.exists()
    assert json.loads(folder.train_config.read_text()) == args.to_dict()
    assert json.loads(folder.ds_config.read_text()) == {"zero_optimization": {}}
    state.changes = changes[:1]
    setup.open_folder(args, {}, state, folder.checkpoints / "step-00000004").close()
    assert folder.metrics.read_text() == ""  # of the start before it, which has saved nothing


def test_a_start_knows_all_ranks_and_their_hosts(monkeypatch: pytest.MonkeyPatch, rank: list[int]) -> None:
    def gather(every: list, own: str) -> None:
        every[:] = ["a", "b", "a"]

    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(setup, "describe", lambda: ({"gpu": "a GPU"}, {"torch": "2"}))
    monkeypatch.setattr(setup.torch.cuda, "is_available", lambda: True)
    config = load_config("tiny")
    model: Any = SimpleNamespace(config=config)
    stream: Any = SimpleNamespace(describe=lambda: "some data")
    proven = setup.StartupReport("6/7 delayed", "fused", {"fused": [0, 1, 2]}, ["a line"])
    found = setup.start_of(arguments(), model, proven, stream, state_of(), None)
    assert (found["gpus"], found["hosts"]) == (3, {"a": [0, 2], "b": [1]})
    assert (found["step"], found["tokens"], found["resumed_from"]) == (4, 1536, None)
    assert found["model"] == {
        "config": "tiny",
        "variant": "te_linear",
        "parameters": num_parameters(config),
    }
    assert (found["fp8"], found["attention"], found["proof"]) == (
        proven.fp8,
        proven.attention_by_rank,
        ["a line"],
    )
    rank[0] = 1
    assert setup.start_of(arguments(), model, proven, stream, state_of(), None) == {}
