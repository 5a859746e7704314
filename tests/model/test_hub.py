"""Models and tokenizers that are named as org/name on the Hugging Face Hub; the download itself is a stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from model.hub import local_folder


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, dict[str, Any]]]:
    monkeypatch.chdir(tmp_path)
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **which: calls.append((name, which)) or "/cache/snapshot",
    )
    return calls


def test_an_id_of_the_hub_is_downloaded_without_pickles(downloads: list) -> None:
    assert local_folder("mistralai/Mistral-7B-v0.3") == "/cache/snapshot"
    assert local_folder("org/tokenizer.v1", weights=False) == "/cache/snapshot"
    (_, all_files), (name, small) = downloads
    assert name == "org/tokenizer.v1" and "*.safetensors" not in small["allow_patterns"]
    assert "*.safetensors" in all_files["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in all_files["allow_patterns"])


def test_a_path_is_never_downloaded(downloads: list) -> None:
    Path("data").mkdir()
    for name in (
        "tiny",
        "data/absent",
        "configs/absent.json",
        "/data/absent",
        "./org/name",
        "a/b/c",
        "~/model",
        "",
    ):
        assert local_folder(name) == name
    assert downloads == []
