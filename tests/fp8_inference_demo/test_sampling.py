"""fp8_inference_demo/sampling.py: the probabilities of transformers' logits processors, and draws that follow them,
reproducible in any batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fp8_inference_demo.sampling import Sampler, Sampling, mix, row_seed, uniform

DRAWS = 20_000
PROMPT = [3, 39, 39, 11]  # 39: a likely one
OPTIONS = {
    "temperature": dict(temperature=0.7),
    "top_k": dict(top_k=5),
    "top_p": dict(top_p=0.8),
    "min_p": dict(min_p=0.1),
    "repetition_penalty": dict(repetition_penalty=1.6),
    "top_k top_p": dict(top_k=9, top_p=0.7),
    "all": dict(temperature=1.4, top_k=12, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
}


def sampling(**options: float) -> Sampling:
    return Sampling(**dict(dict(temperature=1.0, top_k=0), **options))  # type: ignore[arg-type]


def logits_of() -> Tensor:
    return 2 * torch.randn(40, generator=torch.Generator().manual_seed(0))


def transformers_probabilities(logits_V: Tensor, wanted: Sampling, prompt: list[int]) -> Tensor:
    """In the order in which generate() applies them."""
    processors = LogitsProcessorList()
    if wanted.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(wanted.repetition_penalty))
    processors.append(TemperatureLogitsWarper(wanted.temperature))
    if wanted.top_k:
        processors.append(TopKLogitsWarper(wanted.top_k))
    if wanted.top_p < 1:
        processors.append(TopPLogitsWarper(wanted.top_p))
    if wanted.min_p:
        processors.append(MinPLogitsWarper(wanted.min_p))
    return processors(torch.tensor([prompt]), logits_V[None].clone()).softmax(-1)[0]  # type: ignore[arg-type]


def draw_many(logits_V: Tensor, wanted: Sampling, draws: int = DRAWS, step: int = 0) -> Tensor:
    sampler = Sampler(wanted, draws, step + 1, len(logits_V), "cpu")
    sampler.begin([PROMPT] * draws, [row_seed(0, 0, i) for i in range(draws)])
    return sampler.draw(logits_V.expand(draws, -1), torch.full((draws,), step))


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """In standard deviations from its mean, the number of free cells (a normal distribution, nearly). Cells of fewer
    than five expected draws are one."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    cells = torch.cat([expected[~rare], expected[rare].sum()[None]]).clamp(min=1e-9)
    found = torch.cat([counts[~rare], counts[rare].sum()[None]])
    if cells[-1] < 5:
        cells, found = cells[:-1], found[:-1]
    free = len(cells) - 1
    return float((((found - cells) ** 2 / cells).sum() - free) / (2 * free) ** 0.5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_sample_distribution_equals_transformers(options: dict[str, float]) -> None:
    wanted, logits = sampling(**options), logits_of()
    probabilities = transformers_probabilities(logits, wanted, PROMPT)
    counts = draw_many(logits, wanted).bincount(minlength=len(logits))
    assert not counts[probabilities == 0].any()
    assert counts[probabilities > 1e-3].all(), "each token that may come does"
    assert abs(chi_square(counts, probabilities)) < 3.5


def support(logits_V: Tensor, wanted: Sampling) -> Tensor:
    """Return which tokens can be drawn, by uniform numbers from 0 to 1."""
    sampler = Sampler(wanted, 4096, 1, len(logits_V), "cpu")
    sampler.uniform[0] = torch.arange(4096) / 4096
    drawn = sampler.draw(logits_V.expand(4096, -1), torch.zeros(4096, dtype=torch.int64))
    return drawn.bincount(minlength=len(logits_V)) > 0


@pytest.mark.parametrize("seed", range(3))
def test_top_k_top_p_min_p_equal_transformers(seed: int) -> None:
    """Logits close together, so that each token is likely enough to be met."""
    logits = torch.randn(24, generator=torch.Generator().manual_seed(seed))
    for top_k, top_p, min_p in itertools.product((0, 1, 6, 100), (0.05, 0.5, 0.95, 1.0), (0.0, 0.2, 1.0)):
        wanted = sampling(temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
        kept = transformers_probabilities(logits, wanted, PROMPT) > 0
        assert support(logits, wanted).equal(kept), wanted


def test_ties_at_a_limit_are_kept() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    for limit in (dict(top_k=2), dict(top_p=0.7), dict(top_k=4, top_p=0.7)):
        assert support(logits, sampling(**limit)).tolist() == [False, True, True, True, False], limit


def test_greedy_with_repetition_penalty() -> None:
    logits = logits_of()
    second, best = logits.topk(2).indices.flip(0).tolist()
    sampler = Sampler(sampling(temperature=0, repetition_penalty=3.0), 2, 2, len(logits), "cpu")
    for prompts, expected in (([[best], [0]], [second, best]), ([[0], [0]], [best, best])):
        sampler.begin(prompts, [0, 0])
        drawn = [sampler.draw(logits.expand(2, -1), torch.full((2,), step)).tolist() for step in (0, 1)]
        assert drawn[0] == expected, "the tokens of the prompt count"
        assert drawn[1][1] == second, "the drawn tokens count too"


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_non_finite_logits_return_no_token(temperature: float) -> None:
    rows = logits_of().repeat(5, 1)
    rows[1, 3], rows[2, 4], rows[3, 5], rows[4] = torch.nan, torch.inf, -torch.inf, -torch.inf
    wanted = sampling(temperature=temperature, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    sampler = Sampler(wanted, 5, 1, rows.shape[1], "cpu")
    sampler.begin([PROMPT] * 5, [1] * 5)
    drawn = sampler.draw(rows, torch.zeros(5, dtype=torch.int64))
    assert (drawn == -1).tolist() == [False, True, True, False, True]


def test_sampling_is_independent_of_the_batch() -> None:
    rows = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    wanted = sampling(top_k=50, top_p=0.95, repetition_penalty=1.3)
    seeds, steps = [row_seed(5, i, 0) for i in range(6)], torch.tensor([0, 1, 5, 5, 900, 2])
    batch = Sampler(wanted, len(seeds) + 2, 1000, 300, "cpu")  # a batch may have room for more
    batch.begin([PROMPT] * 6, seeds)
    together = batch.draw(rows, steps)
    alone = Sampler(wanted, 1, 901, 300, "cpu")
    for row in range(6):
        alone.begin([PROMPT], seeds[row : row + 1])
        assert alone.draw(rows[row : row + 1], steps[row : row + 1]) == together[row]


def test_sampling_by_seed_row_and_step() -> None:
    logits = torch.zeros(1000)
    draws = [draw_many(logits, sampling(), 200, step) for step in (0, *range(20))]
    assert draws[0].equal(draws[1]) and torch.stack(draws).unique().numel() > 950


def test_random_numbers_are_uniform() -> None:
    """Over the seeds of a step and the steps of a seed; neighbors in both directions are independent."""
    numbers = uniform(mix(torch.arange(64))[:, None], torch.arange(1024))
    assert numbers.min() >= 0 and numbers.max() < 1 and numbers.unique().numel() == numbers.numel()
    cells = {"": numbers * 256, "low bits": (numbers * 2.0**40 % 1) * 256}
    pairs = {"steps": (numbers[:, :-1], numbers[:, 1:]), "seeds": (numbers[:-1], numbers[1:])}
    cells |= {name: (a * 16).floor() * 16 + b * 16 for name, (a, b) in pairs.items()}
    for name, values in cells.items():
        counts = values.long().flatten().bincount(minlength=256)
        assert abs(chi_square(counts, torch.full((256,), 1 / 256))) < 3.5, name


def test_mix_equals_splitmix64() -> None:
    """The published sequence of seed 0 (its state grows by the golden ratio)."""
    golden = -0x61C8864680B583EB
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix(torch.tensor(golden) * n).item() % 2**64 for n in (1, 2, 3)] == published
    numbers = uniform(torch.tensor(0), torch.arange(3)).tolist()
    assert numbers == [(number >> 11) / 2**53 for number in published]


def test_sampling_compiles_without_graph_break() -> None:
    """A value of the device that the host reads breaks a full graph."""
    wanted = sampling(top_k=5, top_p=0.9, min_p=0.05, repetition_penalty=1.2)
    sampler, drawn = Sampler(wanted, 2, 1, 40, "cpu"), []
    for draw in (sampler.draw, torch.compile(sampler.draw, fullgraph=True, backend="eager")):
        sampler.begin([PROMPT] * 2, [1, 2])
        drawn.append(draw(logits_of().expand(2, -1), torch.zeros(2, dtype=torch.int64)))
    assert drawn[0].equal(drawn[1])
