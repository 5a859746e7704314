"""What of a checkpoint a run goes on with, what a resume is told; what a save takes; exported types."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MistralForCausalLM

from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from tests.conftest import refused, small_config
from tests.train.checkpoint.test_resume_changes import resumed, state_of
from tests.train.runs import metrics, run
from train import export, setup
from train.checkpoint import files, save
from train.checkpoint import load as room
from train.checkpoint.files import CheckpointError, RunState, describe_file, wait_for_files
from train.checkpoint.load import has_fp8_state_of
from train.checkpoint.resume import SIZES, allowing
from train.files import size_text, without_patterns

USUAL: dict[str, Any] = {"recipe": "delayed", "backend": "reference"}
OTHER_STATE = {
    "compute": "bf16",
    "recipe": "current",
    "fp8_format": "hybrid",
    "amax_history_len": 7,
    "reduce_amax": False,
    "bf16_modules": ["*.o_proj"],
}
SAME_STATE = {"margin": 3, "amax_compute_algo": "most_recent", "health_steps": 5}


@pytest.mark.parametrize("key", [*OTHER_STATE, *SAME_STATE])
def test_fp8_state_is_gone_on_with_where_it_is_that_of_the_modules(key: str) -> None:
    """Histories of another length, or scales for another range, would be those of other tensors."""
    now = Precision(PrecisionConfig(**USUAL | {key: (OTHER_STATE | SAME_STATE)[key]}))
    saved = RunState(3, 24, 0, 1, 1, {"precision": vars(PrecisionConfig(**USUAL))}, {})
    assert has_fp8_state_of(saved, now) is (key in SAME_STATE)
    assert has_fp8_state_of(replace(saved, train_config={}, precision={}), now), "before there was a choice"


@pytest.mark.parametrize(
    ("own", "same"), [({"recipe": "current"}, True), ({"compute": "bf16"}, True), ({}, False)]
)
def test_what_nothing_reads_is_no_other_state(own: dict, same: bool) -> None:
    """A checkpoint of a version with another default; a rollback to it, too."""
    now = Precision(PrecisionConfig(**USUAL | own))
    saved = RunState(3, 24, 0, 1, 1, {"precision": vars(now.config) | {"amax_history_len": 1024}}, {})
    assert has_fp8_state_of(saved, now) is same


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_folder_that_a_glob_takes_for_a_pattern_is_gone_on_from(settings: dict, stage: int) -> None:
    """At ZeRO 3 exported, too."""
    folder = Path(settings["output_dir"]).with_name("run[lr=3e-4]*")
    settings |= {"output_dir": str(folder), "deepspeed": f"ds_config_zero{stage}.json"}
    for steps in (2, 3):
        run(settings, max_steps=steps, allow_changes_on_resume=["max_steps"], lr_scheduler_type="constant")
    assert [m["step"] for m in metrics(folder)] == [1, 2, 3] and (folder / "hf/config.json").is_file()


def test_moments_that_a_checkpoint_replaces_are_not_kept(
    settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rollback DeepSpeed would have two of each in memory: it has linked them in the steps before."""
    linked, load = list[bool](), setup.load_checkpoint

    def loads(engine: Any, *given: Any) -> None:
        engine.optimizer._hp_optimizer_states_linked = True  # as after a step
        load(engine, *given)
        linked.append(engine.optimizer._hp_optimizer_states_linked)

    monkeypatch.setattr(setup, "load_checkpoint", loads)
    for steps in (2, 3):
        run(settings, max_steps=steps, lr_scheduler_type="constant")
    assert linked == [False]


def test_a_folder_by_a_relative_path_has_one_without_a_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """output_dir may be one: "output/run[lr=3e-4]"."""
    monkeypatch.chdir(tmp_path)
    folder = Path("output/run[1]")
    folder.mkdir(parents=True)
    (folder / "a").write_text("here")
    with without_patterns(folder) as plain:
        assert "[" not in str(plain) and (plain / "a").read_text() == "here"
    assert (folder / "a").exists()


@pytest.mark.parametrize("size", SIZES)
def test_a_model_of_other_sizes_goes_on_from_no_checkpoint(size: str) -> None:
    """Whatever is allowed: its weights would have other shapes, or be shared."""
    assert {"num_key_value_heads", "head_dim", "tie_word_embeddings", "vocab_size"} < {*SIZES}
    old, new = state_of({}), state_of({})
    old.model_config[size], new.model_config[size] = 1, 2
    with refused(CheckpointError, code="cannot_change", key="model.config") as error:
        resumed(new, old, True)
    assert [change.what.key for change in error.value.changes] == [f"model configuration.{size}"]


def test_what_moments_in_8_bits_lose_on_other_ranks_is_said() -> None:
    for states, said in (("int8", True), ("fp8", True), ("bf16_remainder", False), ("fp32", False)):
        changes = {"precision.optimizer_states": states}
        old, new = state_of(changes), state_of(changes)
        assert not [line for line in resumed(new, old, False) if "rounded" in line], "on as many ranks"
        old.world_size = 2
        lines = [line for line in resumed(new, old, False) if "rounded" in line]
        assert len(lines) == said


def test_each_key_is_named_once_in_the_option() -> None:
    assert allowing(["seed", "data.sources", "seed"]) == "--allow_changes_on_resume seed,data.sources"


def test_sizes_for_people() -> None:
    given = {
        0: "0.0 MB",
        2_345_678: "2.3 MB",
        999_949_999: "999.9 MB",
        10**9: "1.0 GB",
        1234 * 10**9: "1,234.0 GB",
    }
    assert {number: size_text(number) for number in given} == given


@pytest.mark.parametrize(("shown_after_s", "committed"), [(59.0, True), (62.0, False)])
def test_files_of_other_machines_are_waited_for_as_long_as_nfs_may_hide_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown_after_s: float, committed: bool
) -> None:
    """60 s: acdirmax."""
    now, file = [0.0], tmp_path / "rank_00008.pt"

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= shown_after_s:
            file.write_bytes(b"12345")

    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    file.write_bytes(b"12345")
    entry = describe_file(file)
    file.unlink()
    if committed:
        wait_for_files(tmp_path, [entry])
    else:
        with pytest.raises(OSError, match="rank_00008.pt"):
            wait_for_files(tmp_path, [entry])


def saver_of_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> save.Saver:
    """Of a run without a model."""

    def capture(engine: Any, path: Path, take: Any) -> None:
        take("weights.pt", {"weights": torch.arange(400_000.0)})

    monkeypatch.setattr(save, "capture_checkpoint", capture)
    monkeypatch.setattr(save, "rank_state", lambda module, precision: {"torch_rng": torch.get_rng_state()})
    nothing: Any = SimpleNamespace(module=None)
    return save.Saver(nothing, folder / "checkpoints", nothing, 1, print)


@pytest.mark.usefixtures("process_group")
def test_a_manifest_counts_when_all_that_it_names_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a power cut would leave one of files that are empty."""
    synced: list[tuple[str, int]] = []

    def sync(descriptor: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((file.name.removesuffix(".tmp"), 0 if file.is_dir() else file.stat().st_size))

    saver = saver_of_weights(tmp_path, monkeypatch)
    monkeypatch.setattr(os, "fsync", sync)
    saver.begin(RunState(3, 24, 0, 1, 1, {}, {}), background=False)
    job = saver.finish()
    assert job is not None
    sizes = {file.name: file.stat().st_size for file in job.path.iterdir()}
    assert files.read_manifest(job.path).keys() == sizes.keys() - {files.MANIFEST}
    entries, of_all = (job.path.name, 0), (job.path.parent.name, 0)
    written = [(name, sizes[name]) for name in ("weights.pt", "rank_00000.pt", files.RUN_STATE)]
    assert synced == [*written, entries, of_all, (files.MANIFEST, sizes[files.MANIFEST]), entries]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("background", "waited_s", "seconds"), [(False, 5.0, 5.0), (True, 5.0, 12.0)])
def test_a_save_tells_how_long_it_took_and_training_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, waited_s: float, seconds: float
) -> None:
    """Writing takes 5 s, of which training waits for all; in the background it has trained 7 s before. The room that
    was asked for holds the files."""
    now, waits, write = [0.0], threading.Event(), save.write_tensors

    def written(path: Path, value: Any) -> dict[str, Any]:
        if path.name == "weights.pt":
            assert waits.wait(30)
            now[0] += 5
        return write(path, value)

    monkeypatch.setattr(save, "write_tensors", written)
    monkeypatch.setattr(save, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    saver = saver_of_weights(tmp_path, monkeypatch)
    if not background:
        waits.set()
    saver.begin(RunState(3, 24, 0, 1, 1, {}, {}), background)
    assert saver.pending
    if thread := saver._thread:
        now[0] += 7
        joins: Any = SimpleNamespace(join=lambda: (waits.set(), thread.join()))
        saver._thread = joins
    job = saver.finish()
    assert job is not None and (job.waited_s, job.seconds) == (waited_s, seconds) and not saver.pending
    assert files.problems(job.path) == []
    size = sum(file.stat().st_size for file in job.path.iterdir())
    assert size < job.needed < 1.1 * size


# ---------------------------------------------------------------- exported


@pytest.mark.parametrize(
    ("compute", "dtype", "tied"),
    [
        ("fp32", "float32", False),
        ("fp8", "bfloat16", True),
        ("bf16", "bfloat16", False),
        ("fp16", "float16", True),
    ],
)
def test_an_export_has_the_type_of_training_and_each_weight_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compute: str, dtype: str, tied: bool
) -> None:
    config = small_config(tie_word_embeddings=tied, num_hidden_layers=1, vocab_size=64)
    weights = {name: tensor.double() for name, tensor in MistralForCausalLM(config).state_dict().items()}
    if tied:
        del weights["lm_head.weight"]
    lengths = {"max_seq_length": config.max_position_embeddings}
    state = SimpleNamespace(
        model_config=config.to_dict(), precision={"compute": compute}, train_config=lengths
    )
    monkeypatch.setattr(export, "read_state", lambda path: state)
    monkeypatch.setattr(room, "read_hf_weights", lambda path, config: weights)
    monkeypatch.setattr(export, "TextEncoder", Path)
    monkeypatch.setattr(
        export, "_name_ends", lambda config, encoder, state: []
    )  # test_export.py has a tokenizer
    paths = tmp_path / "step-00000003", tmp_path / "hf", "hf", tmp_path / "tokenizer"
    assert export._write_model(*paths) == []
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == dtype
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == weights.keys()
    for name, tensor in found.items():
        assert tensor.dtype == getattr(torch, dtype) and torch.equal(tensor, weights[name].to(tensor.dtype))
    missing = weights.popitem()[0]
    with refused(CheckpointError, code="other_weights", key=str(paths[0])) as error:
        export._write_model(*paths)
    assert missing in str(error.value)


def test_what_the_system_refuses_has_another_status_than_what_a_user_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1: another start may succeed; 2: the command has to be another."""
    monkeypatch.setattr("sys.argv", ["export.py", str(tmp_path), str(tmp_path / "out")])
    monkeypatch.setattr(export, "checkpoint_of", lambda given: given)
    for error, status in (
        (OSError(5, "Input/output error"), 1),
        (CheckpointError("of another run"), 2),
    ):

        def fails(path: Path, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(export, "read_state", fails)
        with pytest.raises(SystemExit) as stop:
            export.main()
        assert stop.value.code == status
