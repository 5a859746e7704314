"""240,000 sample ids are the same for any number of ranks and over interruptions."""

import json
import random

import numpy as np
import pytest
import torch

from tests.folders import make_folder
from train.data.order import MixturePhase
from train.data.source import TokenSource
from train.data.stream import Batch, MicroBatches, SampleStream

SAMPLES = 240_000
STEP = 960  # samples of an optimizer step over all ranks; every number of ranks below divides it
ACCUMULATION = 2
T = 8


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


def test_sample_ids_are_stable_over_interruptions(folders):
    """At each the process dies, what it has read ahead with it, and another number of ranks goes on from the number of
    samples drawn from each source, which is all that is kept."""
    choice = random.Random(3)
    steps = SAMPLES // STEP
    stops = sorted(choice.sample(range(1, steps), 20)) + [steps]
    parts, done, drawn = [], 0, {}
    for stop in stops:
        stream = opened(folders)
        stream.seek(done * STEP, drawn)
        parts.append(consume(stream, done * STEP, stop - done, choice.choice([1, 2, 3, 4, 8])))
        done, drawn = stop, json.loads(json.dumps(stream.drawn_at(stop * STEP)))
    assert np.array_equal(np.concatenate(parts), opened(folders).sample_ids(0, SAMPLES))
