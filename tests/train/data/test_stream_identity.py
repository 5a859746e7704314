"""240,000 sample ids are the same for any number of ranks and over interruptions; the memory that they take."""

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from test_fp8.common.folders import finish_folder, make_folder
from train.data.format import INDEX_DTYPE, Shard, token_dtype
from train.data.order import MixturePhase
from train.data.source import TokenSource
from train.data.stream import Batch, MicroBatches, SampleStream, open_stream

SAMPLES = 240_000
STEP = 960  # samples of an optimizer step over all ranks; every number of ranks below divides it
ACCUMULATION = 2
T = 8


def make_sparse_folder(folder: Path, shards: int, tokens: int, vocab_size: int = 32_000) -> Path:
    """A folder of `shards` train shards of `tokens` each that take no place on the disk: one document, all ids 0. Its
    hashes are not right."""
    folder.mkdir(parents=True)
    entries, size = [], tokens * token_dtype(vocab_size).itemsize
    for number in range(shards):
        path = folder / f"train_{number:05d}.ds"
        with open(path, "wb") as file:
            file.truncate(size)
        np.array([tokens], dtype=INDEX_DTYPE).tofile(path.with_name(path.name + ".index"))
        entries.append(Shard(path.name, "train", tokens, 1, size, "0" * 64, "0" * 64))
    finish_folder(folder, vocab_size, entries)
    return folder


class IdStream(SampleStream):
    """A stream whose batches are the sample ids themselves, [count, 2], so that very many can be compared."""

    def batch(self, start: int, count: int) -> Batch:
        ids = torch.tensor(self.sample_ids(start, count))
        return Batch(ids, ids)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Sources of 12,500, 5,000 and 1,751 windows: the samples are many epochs of each."""
    root = tmp_path_factory.mktemp("sources")
    sizes = {"a": [37_500, 62_503], "b": [40_001], "c": [7_500, 6_509]}
    return {
        name: str(make_folder(root / name, {"train": [np.zeros(size, dtype=np.int64) for size in parts]}))
        for name, parts in sizes.items()
    }


def opened(folders: dict[str, str]) -> IdStream:
    weights = [
        MixturePhase(until_tokens=72_000 * T, weights={"a": 0.6, "b": 0.3, "c": 0.1}),
        MixturePhase(until_tokens=168_001 * T - 3, weights={"a": 0.2, "c": 0.8}),
        MixturePhase(weights={"a": 0.35, "b": 0.35, "c": 0.3}),
    ]
    return IdStream([TokenSource(name, path, "train", T) for name, path in folders.items()], weights, seed=11)


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> np.ndarray:
    """The first ids, [SAMPLES, 2] of (source, window), asked for in one go."""
    return np.array(opened(folders).sample_ids(0, SAMPLES))


def consume(stream: IdStream, consumed: int, steps: int, world_size: int) -> np.ndarray:
    """What the ranks of a run get in `steps` optimizer steps from `consumed` samples on, in the order of the stream."""
    batch_size = STEP // ACCUMULATION // world_size
    ranks = [MicroBatches(stream, batch_size, rank, world_size) for rank in range(world_size)]
    parts = []
    for _ in range(steps):
        for micro_step in range(ACCUMULATION):
            parts += [rank.get(consumed, micro_step)[0] for rank in ranks]
        consumed += STEP
    for rank in ranks:
        rank.close()
    return torch.cat(parts).numpy()


@pytest.mark.parametrize("world_size", [1, 3, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_ids_are_the_same_for_any_number_of_ranks(folders, expected, world_size):
    found = consume(opened(folders), 0, SAMPLES // STEP, world_size)
    assert np.array_equal(found, expected[: len(found)]) and len(found) > SAMPLES - STEP


def test_ids_are_the_same_over_twenty_interruptions(folders, expected):
    """At each the process dies, what it has read ahead with it, and another number of ranks goes on from the number of
    consumed samples, which is all that is kept."""
    choice = random.Random(3)
    steps = SAMPLES // STEP
    stops = sorted(choice.sample(range(1, steps), 20)) + [steps]
    parts, done = [], 0
    for stop in stops:
        parts.append(consume(opened(folders), done * STEP, stop - done, choice.choice([1, 2, 3, 4, 8])))
        done = stop
    found = np.concatenate(parts)
    assert np.array_equal(found, expected[: len(found)])


def test_nothing_is_lost_or_repeated_in_any_epoch(folders, expected):
    for index, source in enumerate(opened(folders).sources):
        windows = expected[expected[:, 0] == index, 1]
        epochs = len(windows) // source.num_windows
        assert epochs >= 5
        whole = windows[: epochs * source.num_windows].reshape(epochs, source.num_windows)
        assert np.array_equal(np.sort(whole, axis=1), np.tile(np.arange(source.num_windows), (epochs, 1)))
        rest = windows[epochs * source.num_windows :]
        assert len(np.unique(rest)) == len(rest)


# ---------------------------------------------------------------- 600 billion tokens


def test_600_billion_tokens_take_little_memory(tmp_path):
    """Opening reads only the manifests and the sizes of files; a table of the windows would take 2.3 GB."""
    for name, shards in (("web", 600), ("code", 60)):
        make_sparse_folder(tmp_path / name, shards, 10**9)
    tracemalloc.start()
    sources = {name: tmp_path / name for name in ("web", "code")}
    stream = open_stream(sources, {"web": 0.7, "code": 0.3}, 2048, seed=1)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    for place in range(10):
        stream.sample_ids(place * 1_000_003, 1000)
    peak = tracemalloc.get_traced_memory()[1] - kept
    tracemalloc.stop()
    assert stream.num_tokens == 660 * 10**9 and kept < 3_500_000 and peak < 2_000_000
