"""Going on with a run: refused where the configuration or the data changed, or allowed and logged, to the sample."""

import copy
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from model.config import load_config
from test_fp8.common.folders import make_folder
from tests.conftest import numbers, refused
from tests.train.runs import curve, metrics, run
from train import setup
from train.checkpoint.files import MANIFEST, CheckpointError, RunState
from train.checkpoint.resume import begins_as, resume_state
from train.config.arguments import TrainingArguments, load_deepspeed
from train.config.differences import Difference
from train.config.schedule import at_stage
from train.data.stream import open_stream

CHECKPOINT = Path("run/checkpoints/step-00000003")


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    def tokens(seed: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(3, 400, 5000)

    return {
        name: str(make_folder(tmp_path / name, {"train": [tokens(seed)], "eval": [tokens(seed + 9)]}))
        for seed, name in enumerate(["a", "b", "c"])
    }


def state(sources: dict[str, str], consumed: int = 0, ranks: int = 1, **changes: object) -> RunState:
    """That of a run on `ranks` ranks with these sources after `consumed` samples."""
    raw = {"model": {"config": "tiny"}, "data": {"sources": sources}, "max_steps": 100, "max_seq_length": 64}
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (raw[section] if section else raw)[name] = value
    args = TrainingArguments.from_dict(raw).resolve(ranks)
    stream = open_stream(args.data.sources, args.data.weights, args.max_seq_length, args.seed)
    return RunState(
        step=consumed // 8,
        consumed_samples=consumed,
        consumed_tokens=consumed * args.max_seq_length,
        world_size=ranks,
        zero_stage=args.deepspeed["zero_optimization"]["stage"],
        train_config=args.to_dict(),
        model_config={"vocab_size": 400},
        data_fingerprint=stream.fingerprint(),
    )


def test_an_evaluation_that_was_left_has_its_steps_precision_also_of_another_version() -> None:
    """Of a key that nothing reads that version had another default."""
    stages = [{"until_step": 4, "compute": "bf16"}, {"recipe": "current"}]
    raw = {"model": {"config": "tiny"}, "data": {"sources": {"a": "a"}}, "max_steps": 8, "max_seq_length": 64}
    args = TrainingArguments.from_dict({**raw, "precision": {"schedule": stages}}).resolve(1)
    saved = RunState(4, 32, 2048, 1, 1, {"precision": at_stage(args, 0).to_dict()["precision"]}, {})
    saved.evaluation_due = True
    saved.train_config["precision"]["amax_history_len"] = 1024
    assert begins_as(args, saved) == (0, {})
    saved.evaluation_due = False
    assert begins_as(args, saved) == (1, {})


def resumed(new: RunState, saved: RunState, allow: bool | list[str] = True) -> list[str]:
    """As from a checkpoint, whose state has been through JSON."""
    saved = RunState(**json.loads(json.dumps(saved.__dict__)))
    return resume_state(new, saved, CHECKPOINT, allow)


def two(folders: dict[str, str]) -> dict[str, str]:
    return {name: folders[name] for name in "ab"}


def replaced(folders: dict[str, str]) -> dict[str, str]:
    """Source b with the content of c."""
    return {"a": folders["a"], "b": folders["c"]}


def retokenized(folders: dict[str, str]) -> dict[str, str]:
    """Both sources by another tokenizer."""
    for folder in map(Path, two(folders).values()):
        values = json.loads((folder / "manifest.json").read_text())
        (folder / "tokenizer" / "tokenizer.model").write_bytes(b"other")
        values["tokenizer_sha256"] = hashlib.sha256(b"other").hexdigest()
        (folder / "manifest.json").write_text(json.dumps(values))
    return two(folders)


STAGES = [{"until_tokens": 640, "weights": {"a": 1, "b": 1}}, {"weights": {"a": 1, "b": 3}}]
CHANGES = [
    (replaced, {}, ["data.sources.b.shards_sha256: "], ["data.sources"]),
    (
        retokenized,
        {},
        ["data.sources.a.tokenizer_sha256: ", "data.sources.b.tokenizer_sha256: "],
        ["data.sources"],
    ),
    (
        lambda f: {**f},
        {},
        ['data.sources: ["a", "b"] -> ["a", "b", "c"]', "data.sources.c: null -> {"],
        ["data.sources"],
    ),
    (
        two,
        {"data__weights": {"a": 3, "b": 1}},
        ["data.weights.a: null -> 3.0", "data.sources.a.weight: 0.5 -> 0.75"],
        ["data.weights"],
    ),
    (
        two,
        {"data__weights": STAGES},
        ["data.weights: null -> [{", 'sources.b.weight_from_sample: null -> {"0": 0.5, "10": 0.75}'],
        ["data.weights"],
    ),
    (
        two,
        {"max_seq_length": 128, "per_device_train_batch_size": 4},
        ["max_seq_length: 64 -> 128", "per_device_train_batch_size: 8 -> 4"],
        ["max_seq_length", "per_device_train_batch_size"],
    ),
]


@pytest.mark.parametrize("sources, changes, words, keys", CHANGES)
def test_changed_data_is_refused_with_the_difference_or_allowed_and_logged(
    folders, sources, changes, words, keys
):
    saved = state(two(folders), consumed=24)
    new = state(sources(folders), **changes)
    before = copy.deepcopy(new)
    with refused(CheckpointError, code="change_not_allowed") as error:
        resumed(new, saved, allow=False)
    assert new == before and error.value.keys == keys
    for missing in keys:
        with pytest.raises(CheckpointError):
            resumed(new, saved, [key for key in keys if key != missing])
    logged = "\n".join(resumed(new, saved, keys))
    for word in words:
        assert word in str(error.value) and word in logged
    assert (new.step, new.consumed_tokens) == (3, 24 * 64)
    assert new.consumed_samples * new.train_config["max_seq_length"] == 24 * 64


def test_another_length_moves_the_stages_of_a_mixture(folders):
    """Which are by tokens: it alone has to be allowed."""
    saved = state(two(folders), consumed=24, data__weights=STAGES, train_batch_size_tokens=512)
    changes = {"max_seq_length": 128, "per_device_train_batch_size": 4, "train_batch_size_tokens": 512}
    new = state(two(folders), data__weights=STAGES, **changes)
    logged = "\n".join(resumed(new, saved, ["max_seq_length", "per_device_train_batch_size"]))
    assert (
        "b.weight_from_sample.10: 0.75 -> null" in logged and "weight_from_sample.5: null -> 0.75" in logged
    )


def test_an_unchanged_run_goes_on_and_says_nothing_of_changes(folders):
    for allow in (False, True):
        new = state(two(folders), allow_changes_on_resume=allow, data__verify=True)
        assert resumed(new, state(two(folders), consumed=24), allow) == []
        assert (new.step, new.consumed_samples, new.consumed_tokens) == (3, 24, 24 * 64)


@pytest.mark.parametrize(
    "old, new, consumed, expected", [(64, 128, 25, 13), (64, 96, 24, 16), (128, 64, 25, 50)]
)
def test_another_sequence_length_goes_on_at_the_same_tokens_rounded_up(folders, old, new, consumed, expected):
    saved = state(two(folders), consumed=consumed, max_seq_length=old, train_batch_size_tokens=128 * 96)
    later = state(two(folders), max_seq_length=new, train_batch_size_tokens=128 * 96)
    resumed(later, saved)
    assert later.consumed_samples == expected and later.consumed_tokens == saved.consumed_tokens


def test_another_number_of_ranks_goes_on_with_the_same_samples(folders):
    saved = state(two(folders), consumed=24, ranks=4, train_batch_size_tokens=8 * 64 * 8)
    for ranks, steps in ((2, 4), (8, 1)):
        new = state(two(folders), ranks=ranks, train_batch_size_tokens=8 * 64 * 8)
        (said,) = resumed(new, saved, allow=False)
        assert numbers(said) == [4, ranks, steps, 2]
        assert (new.step, new.consumed_samples, new.world_size) == (3, 24, ranks)
    explicit = {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    saved = state(two(folders), ranks=4, gradient_accumulation_steps=2, deepspeed=explicit)
    explicit = {**explicit, "gradient_accumulation_steps": 4}
    new = state(two(folders), ranks=2, gradient_accumulation_steps=4, deepspeed=explicit)
    assert "4 ranks -> 2" in resumed(new, saved, allow=False)[0]


def test_a_step_of_another_size_on_other_ranks_is_refused_with_the_remedy(folders):
    saved = state(two(folders), consumed=24, ranks=4, gradient_accumulation_steps=2)
    smaller = state(two(folders), ranks=2, gradient_accumulation_steps=2)
    with refused(CheckpointError, code="change_not_allowed", key="train_batch_size_tokens") as error:
        resumed(smaller, saved, False)
    assert error.value.changes[0].what == Difference("train_batch_size_tokens", 4096, 2048)
    assert "gradient_accumulation_steps 4, " in str(error.value)
    assert resumed(smaller, saved)
    with refused(CheckpointError, key="train_batch_size_tokens") as error:
        resumed(state(two(folders), ranks=3), saved, False)
    assert {4096, 3, 1536} <= set(numbers(error.value))


def test_another_zero_stage_goes_on_with_its_own_settings(folders):
    files = {stage: f"ds_config_zero{stage}.json" for stage in range(4)}
    saved = state(two(folders), consumed=24, deepspeed=files[2])
    (said,) = resumed(state(two(folders), deepspeed=files[3]), saved, allow=False)
    assert numbers(said) == [2, 3] and "fp32" not in said
    of_one = state(two(folders), consumed=24, deepspeed=files[1])
    (said,) = resumed(state(two(folders), deepspeed=files[0]), of_one, allow=False)
    assert numbers(said) == [1, 0] and "fp32" in said
    in_bf16 = state(two(folders), consumed=24, deepspeed={"zero_optimization": {"stage": 2}})
    (said,) = resumed(state(two(folders), deepspeed=files[1]), in_bf16, allow=False)
    assert numbers(said) == [2, 1] and "fp32" in said
    same_stage = {**load_deepspeed(files[2]), "zero_optimization": {"stage": 2, "overlap_comm": True}}
    with refused(CheckpointError, key="deepspeed") as error:
        resumed(state(two(folders), deepspeed=same_stage), saved, False)
    assert [change.what.key for change in error.value.changes] == ["deepspeed.zero_optimization.overlap_comm"]


def test_a_run_goes_on_with_a_longer_sequence_and_another_mixture(
    settings: dict, data: Path, tmp_path: Path
) -> None:
    sources = {"text": str(data)}
    output_dir = run(settings, max_steps=3, lr_scheduler_type="constant")
    before = curve(output_dir)
    changes = {
        "max_seq_length": 128,
        "gradient_accumulation_steps": 1,
        "lr_scheduler_type": "constant",
        "data": {
            "sources": {**sources, "more": str(data)},
            "weights": [{"until_tokens": 1024, "weights": {"text": 1}}, {"weights": {"text": 1, "more": 1}}],
        },
    }
    with refused(CheckpointError, code="change_not_allowed") as error:
        run(settings, **changes)
    assert {"max_seq_length", "data.sources"} <= set(error.value.keys)
    run(settings, **changes, allow_changes_on_resume=True)
    assert {"max_seq_length", "data.sources.more"} <= {
        change["key"] for line in metrics(output_dir) for change in line.get("changes", [])
    }
    lines = [line for line in metrics(output_dir) if "loss" in line]
    assert [m["tokens"] for m in lines] == [256 * step for step in range(1, 7)]
    assert curve(output_dir)[:2] == before[:2] and lines[3]["loss"] < lines[0]["loss"]


def test_from_a_pretrained_folder(own_trained: Path, settings: dict, tmp_path: Path) -> None:
    """init_from starts where the exported model stopped."""
    first = own_trained
    model = {**settings["model"], "init_from": str(first / "hf"), "variant": "te_linear"}
    second = run(settings, model=model, output_dir=str(tmp_path / "second"), learning_rate=1e-6, save_steps=3)
    start, step, *_ = metrics(second)
    assert step["loss"] < metrics(first)[0]["loss"] - 0.3
    assert start["eval_loss"] == pytest.approx(metrics(first)[-1]["eval_loss"], abs=2e-2)
    assert metrics(second)[-1]["eval_loss"] == pytest.approx(metrics(first)[-1]["eval_loss"], abs=2e-2)

    # a resume takes its weights from the checkpoint
    before = curve(second)
    shutil.rmtree(first)
    (second / "checkpoints/step-00000006/manifest.json").unlink()
    run(settings, model=model, output_dir=str(second), learning_rate=1e-6, save_steps=3)
    assert curve(second) == before


@pytest.mark.parametrize(("seed", "left_out"), [(42, [[24, 32]]), (43, [])])
def test_samples_left_out_are_places_in_one_order(
    folders: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process_group: None,
    capsys: pytest.CaptureFixture[str],
    seed: int,
    left_out: list[list[int]],
) -> None:
    """In another order they would be other samples, which nothing speaks against."""
    path = tmp_path / CHECKPOINT
    path.mkdir(parents=True)
    (path / MANIFEST).touch()
    raw = {
        "model": {"config": "tiny"},
        "data": {"sources": two(folders)},
        "max_steps": 100,
        "max_seq_length": 64,
    }

    def start(seed: int) -> RunState:
        keys = {"output_dir": str(tmp_path / "run"), "seed": seed, "allow_changes_on_resume": ["seed"]}
        args = TrainingArguments.from_dict({**raw, **keys}).resolve(1)
        stream = open_stream(args.data.sources, None, 64, args.seed)
        return setup.starting_point(args, args.deepspeed, load_config("tiny"), stream)[0]

    monkeypatch.setattr(setup, "read_state", lambda path: saved)
    monkeypatch.setattr(setup, "choose_checkpoint", lambda *_: None)
    saved = start(42)
    saved.step, saved.consumed_samples, saved.skipped_samples = 3, 40, [[24, 32]]
    saved = RunState(**json.loads(json.dumps(saved.__dict__)))
    monkeypatch.setattr(setup, "choose_checkpoint", lambda *_: path)
    monkeypatch.setattr(
        setup, "told_besides", lambda state, of: [f"besides {state.skipped_samples} {of.step}"]
    )
    now = start(seed)
    assert (now.step, now.consumed_samples, now.skipped_samples) == (3, 40, left_out)
    assert ("besides [[24, 32]] 3\n" in capsys.readouterr().out) == bool(left_out)
