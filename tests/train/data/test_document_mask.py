"""data.document_mask: positions and labels of batches, and runs with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fixtures import write_jsonl
from tests.train.prepare.megatron_datasets import imported
from tests.train.runs import curve, metrics, run
from train.data.format import DataError, read_manifest
from train.data.stream import NO_LABEL, open_stream

T = 32


@pytest.fixture
def folder(tmp_path: Path, prepare, corpus: Path) -> Path:
    """Documents of about 50 tokens and many of a few, in several shards."""
    short = write_jsonl(tmp_path / "short.jsonl", ["fox", "a", "the dogs", "x", "moon"] * 40)
    assert prepare(tmp_path / "data", short, corpus, eval_fraction=0.1, shard_tokens=3000) == 0
    return tmp_path / "data"


def naive(folder: Path, split: str, seq_length: int) -> list[tuple[list[int], list[int], list[int]]]:
    """(input_ids, labels, positions) of each window, computed token by token."""
    documents = imported(folder, split)
    tokens = [token for document in documents for token in document]
    in_document = [place for document in documents for place in range(len(document))]
    windows = []
    for start in range(0, len(tokens) - seq_length, seq_length):
        positions = []
        for at in range(start, start + seq_length):
            new = at == start or in_document[at] == 0
            positions.append(0 if new else positions[-1] + 1)
        labels = [
            NO_LABEL if in_document[at] == 0 else tokens[at]
            for at in range(start + 1, start + seq_length + 1)
        ]
        windows.append((tokens[start : start + seq_length], labels, positions))
    return windows


@pytest.mark.parametrize(
    "split,seq_length",
    [
        ("train", T),
        ("train", 1),
        ("train", 7),
        ("train", 4096),
        ("eval", T),
        pytest.param("eval", 7, marks=pytest.mark.slow),
    ],
)
def test_positions_and_labels_follow_the_index(folder: Path, split: str, seq_length: int) -> None:
    stream = open_stream({"a": folder}, None, seq_length, seed=1, split=split, document_mask=True)
    plain = open_stream({"a": folder}, None, seq_length, seed=1, split=split)
    expected = naive(folder, split, seq_length)
    ids, labels, documents = stream.batch(0, stream.num_samples)
    positions = documents.positions
    assert positions.dtype == torch.int64 and positions.shape == ids.shape
    starts = {*(positions.flatten() == 0).nonzero().flatten().tolist(), ids.numel()}
    bounds = documents.cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds == sorted(bounds) and {*bounds} == starts
    for row, (_, window) in enumerate(stream.sample_ids(0, stream.num_samples)):
        assert tuple(t[row].tolist() for t in (ids, labels, positions)) == expected[window]
    assert torch.equal(ids, plain.batch(0, stream.num_samples)[0])  # the same samples in the same order
    missing = labels == NO_LABEL
    assert torch.equal(labels[~missing], plain.batch(0, stream.num_samples)[1][~missing])
    # what is not predicted is the token that begins each document
    assert (plain.batch(0, stream.num_samples)[1][missing] == read_manifest(folder).bos_id).all()


@pytest.mark.parametrize("bit", [5, *(pytest.param(bit, marks=pytest.mark.slow) for bit in (13, 63))])
def test_damaged_index(folder: Path, bit: int) -> None:
    """Ends that are far away, or before the ones before them, wherever the search for a sample's ends comes by."""
    shard = read_manifest(folder).split_shards("train")[0]
    path = folder / f"{shard.name}.index"
    ends = np.fromfile(path, "<u8")
    found = set()
    for at in range(0, len(ends) - 1, 3):
        flipped = ends.copy()
        flipped[at] ^= np.uint64(1 << bit)
        flipped.tofile(path)
        stream = open_stream({"a": folder}, None, T, seed=1, document_mask=True)
        try:
            stream.batch(0, stream.num_samples)
        except DataError as error:
            found.add((error.code, error.key))
    assert found == {("index_not_increasing", str(folder))}


@pytest.mark.parametrize(
    "variant,precision", [("te_layer", "delayed"), pytest.param("te_linear", "bf16", marks=pytest.mark.slow)]
)
def test_training_with_document_mask(settings: dict, folder: Path, variant: str, precision: str) -> None:
    """Through DeepSpeed: it learns, and resumes to the bit. tests/train/evaluation checks its evaluation loss."""
    compute = {"recipe": "delayed"} if precision == "delayed" else {"compute": precision}
    settings = {**settings, "precision": compute, "model": {**settings["model"], "variant": variant}}
    settings["data"] = {"sources": {"text": str(folder)}, "document_mask": True}
    whole = run(settings, save_steps=3, gradient_accumulation_steps=3)
    losses = curve(whole)
    assert losses[-1][1] < losses[0][1] - 0.3
    (whole / "checkpoints/step-00000006/manifest.json").unlink()
    assert curve(run(settings, save_steps=3, gradient_accumulation_steps=3)) == losses
    assert metrics(whole)[-1]["tokens"] == 6 * 3 * 2 * 64  # what was processed, with a label or without


def test_loss_weights_each_label_equally(settings: dict, folder: Path, tmp_path: Path) -> None:
    """However the samples of a step are cut into micro-batches, in float32 the numbers are the same: a mean of means
    would differ, since micro-batches differ in their number of labels."""
    settings["data"] = {"sources": {"text": str(folder)}, "document_mask": True}
    settings["precision"] = {"compute": "fp32"}
    curves = []
    for rows, accumulation in ((4, 1), (1, 4)):
        output_dir = run(
            settings,
            output_dir=str(tmp_path / f"rows{rows}"),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            max_steps=3,
        )
        curves.append(curve(output_dir))
    for one, four in zip(*curves, strict=True):
        assert one[1] == pytest.approx(four[1], rel=2e-6)
        assert one[2] == pytest.approx(four[2], rel=1e-5)
