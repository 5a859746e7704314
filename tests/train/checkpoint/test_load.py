"""What of a checkpoint a run continues with, and when a save counts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from tests.train.runs import metrics, run
from train.checkpoint import files, save
from train.checkpoint.files import RunState
from train.checkpoint.load import has_fp8_state_of
from train.files import without_patterns

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
def test_fp8_state_is_kept_where_the_modules_have_the_same(key: str) -> None:
    """Histories of another length, or scales for another range, would be those of other tensors."""
    now = Precision(PrecisionConfig(**USUAL | {key: (OTHER_STATE | SAME_STATE)[key]}))
    saved = RunState(3, 24, 0, 1, 1, {}, {}, precision=vars(PrecisionConfig(**USUAL)))
    assert has_fp8_state_of(saved, now) is (key in SAME_STATE)


@pytest.mark.parametrize(
    ("own", "same"), [({"recipe": "current"}, True), ({"compute": "bf16"}, True), ({}, False)]
)
def test_a_key_that_nothing_reads_changes_no_state(own: dict, same: bool) -> None:
    """Another version may have had another default for it."""
    now = Precision(PrecisionConfig(**USUAL | own))
    saved = RunState(3, 24, 0, 1, 1, {}, {}, precision=vars(now.config) | {"amax_history_len": 1024})
    assert has_fp8_state_of(saved, now) is same


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_folder_that_a_glob_takes_for_a_pattern_is_gone_on_from(settings: dict, stage: int) -> None:
    """At ZeRO 3 exported, too."""
    folder = Path(settings["output_dir"]).with_name("run[lr=3e-4]*")
    settings |= {"output_dir": str(folder), "deepspeed": f"ds_config_zero{stage}.json"}
    for steps in (2, 3):
        run(settings, max_steps=steps, allow_changes_on_resume=["max_steps"], lr_scheduler_type="constant")
    assert [m["step"] for m in metrics(folder)] == [1, 2, 3] and (folder / "hf/config.json").is_file()


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


def saver_of_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> save.Saver:
    """Of a run without a model."""

    def capture(engine: Any, path: Path, take: Any) -> None:
        take("weights.pt", {"weights": torch.arange(400_000.0)})

    monkeypatch.setattr(save, "capture_checkpoint", capture)
    monkeypatch.setattr(save, "rank_state", lambda module, precision: {"torch_rng": torch.get_rng_state()})
    nothing: Any = SimpleNamespace(module=None)
    return save.Saver(nothing, folder / "checkpoints", nothing, 1)


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
