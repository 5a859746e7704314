"""The mixture of sources: weights at every prefix, over phases too; resuming with other sources; what is refused."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import refused
from tests.folders import make_folder
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.load import build_arguments
from train.data.format import DataError
from train.data.order import Drawn, Mixture, MixturePhase
from train.data.stream import SampleStream, open_stream

T = 16


def mixture(stages: list[tuple[int, list[float]]]) -> Mixture:
    """With samples of one token, from the first samples and the weights of the phases."""
    names = [str(index) for index in range(len(stages[0][1]))]
    ends = [start for start, _ in stages[1:]] + [None]
    weights = [dict(zip(names, weights, strict=True)) for _, weights in stages]
    phases = [MixturePhase(weights=w, until_tokens=u) for w, u in zip(weights, ends, strict=True)]
    return Mixture(phases, names, 1)


def start_of(sources: int) -> Drawn:
    return Drawn(0, (0,) * sources, (0.0,) * sources)


def worst_deviation(stages: list[tuple[int, list[float]]], samples: int) -> float:
    """Of what any source has given at any prefix from its target, in samples."""
    source, drawn = mixture(stages).draw(start_of(len(stages[0][1])), samples)
    stops = [start for start, _ in stages[1:]] + [samples]
    worst = 0.0
    for index in range(len(stages[0][1])):
        given, target = np.cumsum(source == index), np.empty(samples)
        reached = 0.0
        for (start, weights), stop in zip(stages, stops, strict=True):
            share = weights[index] / math.fsum(weights)
            target[start:stop] = reached + share * np.arange(1, stop - start + 1)
            reached += share * (stop - start)
            assert share or not (source[start:stop] == index).any()
        worst = max(worst, float(np.abs(given - target).max()))
        assert drawn.samples[index] == given[-1]
        assert drawn.deficits[index] == pytest.approx(target[-1] - given[-1], abs=1e-6)
    return worst


def random_stages(choice: random.Random) -> list[tuple[int, list[float]]]:
    count, stages, start = choice.randint(1, 6), [], 0
    for _ in range(choice.randint(1, 6)):
        weights: list[float] = [
            choice.choice([0, 0, 1, 2, 3, 7, choice.randint(1, 100)]) for _ in range(count)
        ]
        weights[choice.randrange(count)] += 1
        stages.append((start, weights))
        start += choice.choice([1, 2, 3, choice.randint(1, 30), choice.randint(1, 3000)])
    return stages


@pytest.mark.parametrize("seed", range(30))
def test_random_phases(seed):
    """In any parts, and through JSON: the same order."""
    choice = random.Random(seed)
    stages = random_stages(choice)
    sources, samples = len(stages[0][1]), stages[-1][0] + 2000
    assert worst_deviation(stages, samples) < 3, stages
    whole, end = mixture(stages).draw(start_of(sources), samples)
    parts, drawn = [], start_of(sources)
    while drawn.position < samples:
        count = min(choice.randint(1, 700), samples - drawn.position)
        part, drawn = mixture(stages).draw(drawn, count)
        position, *values = json.loads(json.dumps(vars(drawn))).values()
        drawn = Drawn(position, *map(tuple, values))
        parts.append(part)
    assert np.array_equal(np.concatenate(parts), whole) and drawn == end


@pytest.mark.parametrize(
    "weights, beginning",
    [([0.7, 0.3], "01001000100100100010"), ([5, 2, 1], "01002010010020100100"), ([1], "0" * 20)],
)
def test_single_phase_order_is_stable(weights, beginning):
    """Each sample is from the source that is furthest behind."""
    found = mixture([(0, weights)]).draw(start_of(len(weights)), 20)[0]
    assert "".join(map(str, found)) == beginning


# ---------------------------------------------------------------- streams


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """Three sources, of which each token id says from which it is: a below 100, b below 200, c below 300."""
    names, made = ["a", "b", "c"], {}
    for index, name in enumerate(names):
        tokens = [np.arange(size) % 100 + 100 * index for size in (1500, 700 + 300 * index)]
        made[name] = str(make_folder(tmp_path / name, {"train": tokens, "eval": [tokens[1]]}))
    return made


def staged(*stages: tuple[int | None, dict[str, float]]) -> list[MixturePhase]:
    return [MixturePhase(until_tokens=until, weights=weights) for until, weights in stages]


WEIGHTS = staged((100 * T, {"a": 1}), (200 * T + 1, {"a": 0.5, "b": 0.5, "c": 0}), (None, {"b": 1, "c": 3}))


def names_of(stream: SampleStream, start: int, count: int) -> str:
    return "".join(stream.sources[source].name for source, _ in stream.sample_ids(start, count))


def test_phases(folders):
    stream = open_stream(folders, WEIGHTS, T, seed=1)
    assert names_of(stream, 0, 100) == "a" * 100
    # sample 200 begins at token 200 * T, before the boundary; sample 201 is the first beyond
    assert names_of(stream, 100, 101).count("a") in (50, 51) and "c" not in names_of(stream, 100, 101)
    assert "a" not in names_of(stream, 201, 400) and names_of(stream, 201, 400).count("c") in (299, 300, 301)
    assert stream.fingerprint()["sources"]["c"]["weight_from_sample"] == {"0": 0, "100": 0, "201": 0.75}
    found = [stream.weights_at(sample) for sample in (0, 99, 100, 201)]
    assert found == [{"a": 1}, {"a": 1}, {"a": 0.5, "b": 0.5}, {"b": 0.25, "c": 0.75}]


def test_single_phase_list_equals_plain_weights(folders):
    plain = {"a": 2.0, "b": 1.0, "c": 1.0}
    one, other = open_stream(folders, plain, T, 1), open_stream(folders, staged((None, plain)), T, 1)
    assert one.sample_ids(0, 500) == other.sample_ids(0, 500) and one.fingerprint() == other.fingerprint()
    assert one.fingerprint()["sources"]["a"]["weight"] == 0.5


def test_added_source_repeats_and_skips_nothing(folders):
    """4,000 samples of a; then b joins, and later c at other weights."""
    seen: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    position, drawn = 0, {}
    for names, count in (("a", 4000), ("ab", 4000), ("abc", 999), ("bc", 500), ("abc", 1000)):
        weights = dict.fromkeys(names, 1.0)
        stream = open_stream({name: folders[name] for name in names}, weights, T, seed=1)
        stream.seek(position, drawn)
        ids = stream.sample_ids(position, count)
        for source, window in ids:
            seen[stream.sources[source].name].append(window)
        for index in range(len(names)):
            assert abs([source for source, _ in ids].count(index) - count / len(names)) <= 1
        position += count
        drawn = json.loads(json.dumps(drawn | stream.drawn_at(position)))
    for name, windows in seen.items():
        alone = open_stream({name: folders[name]}, None, T, seed=1)
        assert windows == [window for _, window in alone.sample_ids(0, len(windows))]
        assert drawn[name]["samples"] == len(windows)


# ---------------------------------------------------------------- what is refused

# weights, the key of the first problem, and what else the message names: sources, values
REFUSED = [
    ({"a": 1, "d": 1}, "data.weights", ["'d'", "'b'", "'c'"]),
    ({"a": 1, "b": 1, "c": 0}, "data.weights", ["'c'"]),
    ({"a": 1, "b": 1, "c": -1}, "data.weights", ["'c'", "-1"]),
    ({"a": 1, "b": 1, "c": math.inf}, "data.weights.c", ["Infinity"]),
    ([], "data.weights", []),
    ([(None, {"a": 1, "b": 1, "d": 1, "c": 1})], "data.weights[0]", ["'d'"]),
    ([(None, {"a": 1, "b": 1, "c": -1})], "data.weights[0]", ["'c'", "-1"]),
    ([(None, {"a": 1, "b": 1})], "data.weights", ["'c'"]),
    ([(50, {"a": 1, "b": 1, "c": 1})], "data.weights[0]", ["until_tokens"]),
    ([(None, {"a": 1, "b": 1}), (None, {"c": 1})], "data.weights[0]", ["until_tokens"]),
    ([(0, {"a": 1, "b": 1}), (None, {"c": 1})], "data.weights[0]", ["until_tokens", "0"]),
    ([(500, {"a": 1, "b": 1}), (500, {"a": 1}), (None, {"c": 1})], "data.weights[1]", ["until_tokens", "500"]),
    ([(500, {"a": 0}), (None, {"a": 1, "b": 1, "c": 1})], "data.weights[0]", []),
]  # fmt: skip
MALFORMED = [
    ([{"until_token": 5, "weights": {"a": 1}}], "data.weights[0].until_token", ["until_tokens"]),
    ([{"until_tokens": 5}], "data.weights[0].weights", []),
    ([{"weights": {"a": "1"}}], "data.weights[0].weights.a", []),
    ([{"weights": {"a": 1}, "until_tokens": 1.5}], "data.weights[0].until_tokens", ["1.5"]),
    ([{"weights": {"a": 1}}, 7], "data.weights[1]", ["7"]),
    ("even", "data.weights", ['"even"']),
]


def as_json(weights) -> object:
    if isinstance(weights, dict):
        return weights
    return [{"weights": each} | ({} if until is None else {"until_tokens": until}) for until, each in weights]


def arguments(weights: object) -> TrainingArguments:
    data = {"sources": {name: f"data/{name}" for name in "abc"}, "weights": weights}
    return build_arguments({"model": {"config": "tiny"}, "data": data, "max_steps": 5})


@pytest.mark.parametrize(
    "weights, key, named", [*((as_json(weights), *more) for weights, *more in REFUSED), *MALFORMED]
)
def test_invalid_weights_name_phase_and_source(weights, key, named):
    with refused(ConfigurationError, key=key) as error:
        arguments(weights)
    assert all(name in str(error.value) for name in named)


def test_empty_phase_raises(folders):
    weights = staged((100, {"a": 1, "b": 1}), (101, {"c": 1}), (None, {"a": 1}))
    with refused(DataError, code="stage_without_sample", key="data.weights[1]"):
        open_stream(folders, weights, T, seed=1)
