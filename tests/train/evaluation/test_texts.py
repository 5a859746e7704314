"""DATA as batches: which tokens are predicted, and how often, wherever documents and rows end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from train.data.stream import NO_LABEL
from train.evaluation.texts import Documents, Source

NO_ENCODER: Any = None
LENGTHS = [3, 8, 5, 2, 16, 7, 1, 9, 4, 4, 4]


def documents(**how: Any) -> Documents:
    """Documents of these LENGTHS. All tokens are different."""
    found = Documents(size=3, **how)
    found.add(Source("a", NO_ENCODER), np.split(np.arange(sum(LENGTHS)), np.cumsum(LENGTHS)[:-1]))
    return found


def predicted(found: Documents, world: int) -> Counter[int]:
    """How often each token is predicted, by all ranks; from the one before it."""
    times: Counter[int] = Counter()
    for rank in range(world):
        for batch, _, _ in found.batches(rank, world):
            at = batch.labels != NO_LABEL
            assert (batch.labels[at] == batch.input_ids[at] + 1).all()
            times.update(batch.labels[at].tolist())
    return times


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("length", [1, 4, 8, 11, 100])
def test_each_token_is_predicted_once(length: int, world: int) -> None:
    begins = {0, *np.cumsum(LENGTHS)[:-1].tolist()}
    every = set(range(sum(LENGTHS)))
    for how, unseen in (
        ({"stride": None}, {0}),  # one behind the other: what follows a document is predicted, too
        ({"stride": None, "document_mask": True}, begins),
        ({"stride": length}, begins),
        ({"stride": max(1, length // 2)}, begins),
    ):
        found = documents(length=length, **how)
        assert predicted(found, world) == Counter(every - unseen), how
        ended = sum(sum(rows.documents) for rank in range(world) for rows in found.batches(rank, world))
        alone = how["stride"] is not None
        assert ended == len(LENGTHS) - (alone and LENGTHS.count(1)), how
