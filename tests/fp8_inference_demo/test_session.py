"""fp8_inference_demo/session.py: each option reaches what it is for."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8_inference_demo import fp8_inference
from fp8_inference_demo.completions import Options, Request
from fp8_inference_demo.errors import InferenceError
from fp8_inference_demo.sampling import Sampler, Sampling, row_seed
from fp8_inference_demo.session import Printer, Session
from tests.conftest import refused


def session_of(folder: Path, *options: object) -> Session:
    arguments = ["--model", str(folder), "--prompt", "x", *map(str, options)]
    return Session(fp8_inference.parse_arguments(arguments), folder)


def test_options_of_a_text_are_what_is_asked_for(folder: Path) -> None:
    given = ("--temperature", 0.3, "--top_k", 7, "--top_p", 0.6, "--min_p", 0.2, "--repetition_penalty", 1.4)
    session = session_of(folder, *given, "--max_new_tokens", 9, "--stop", "a", "--stop", "b", "--ignore_eos")
    sampling = Sampling(temperature=0.3, top_k=7, top_p=0.6, min_p=0.2, repetition_penalty=1.4)
    assert session.options == Options(sampling, max_new_tokens=9, stop=("a", "b"), ignore_eos=True)
    assert session_of(folder).options == Options(Sampling(), max_new_tokens=128, stop=(), ignore_eos=False)


def test_each_sample_of_each_prompt_has_a_seed_of_its_own(folder: Path) -> None:
    session = session_of(folder, "--seed", 5, "--num_samples", 3)
    assert session.requests(7, [1, 2]) == [Request([1, 2], row_seed(5, 7, i)) for i in range(3)]
    assert len({r.seed for number in range(3) for r in session.requests(number, [])}) == 9


def test_the_context_is_what_prompts_need_within_the_models_positions(folder: Path) -> None:
    session = session_of(folder, "--max_new_tokens", 12)  # of 512 positions
    assert [session.max_length(longest) for longest in (1, 500, 501, None)] == [13, 512, 512, 512]
    session.config.max_position_embeddings = 8192
    assert session.max_length(None) == 4096
    given = session_of(folder, "--max_length", 512)
    assert [given.max_length(longest) for longest in (1, 600, None)] == [512] * 3


def test_text_is_shown_while_it_grows_each_sample_behind_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once, also to a pipe: what is shown is what was flushed."""

    class Output(io.StringIO):
        def flush(self) -> None:
            shown.append(self.getvalue())

    shown: list[str] = []
    monkeypatch.setattr("sys.stdout", Output())
    first, second = (SimpleNamespace(text="", finish_reason=None) for _ in range(2))
    printer = Printer(3, lambda: bool(second.text))
    printer.before, printer.printed = 1, 1  # the first sample of three was in the batch before
    for one, text, finished in (
        (first, "ab", None),
        (second, "x", None),
        (first, "abc", "stop"),
        (second, "xy", "length"),
    ):
        one.text, one.finish_reason = text, finished
        assert printer.grown([first, second]) == bool(second.text), "whether it was interrupted"
    assert list(dict.fromkeys(shown)) == [
        "=== 2/3 ===\nab", "=== 2/3 ===\nabc", "=== 2/3 ===\nabc\n", "=== 2/3 ===\nabc\n=== 3/3 ===\nx",
        "=== 2/3 ===\nabc\n=== 3/3 ===\nxy", "=== 2/3 ===\nabc\n=== 3/3 ===\nxy\n",
    ]  # fmt: skip


@pytest.mark.parametrize("stop", [(), ("--stop", "never")])
def test_who_looks_at_a_text_sees_it_grow(folder: Path, stop: tuple[str, ...]) -> None:
    """Without a look, or a stop string, it comes at its end, which takes the host less."""
    session = session_of(folder, "--precision", "fp32", "--max_new_tokens", 8, "--ignore_eos", *stop)
    session.load(4, 1)
    requests, seen = session.requests(0, session.encode("def", "")), list[str]()
    (looked_at,), _ = session.complete(requests, lambda texts: seen.append(texts[0].text) or False)
    (alone,), run = session.complete(requests)
    assert len(set(seen)) > 2 and seen[-1] == looked_at.text == alone.text and looked_at.tokens == 8
    assert all(later.startswith(text) for text, later in itertools.pairwise(seen))
    assert session.timing.decode_tokens == 2 * run.timing.decode_tokens == 14, "of all batches"


def test_a_completion_that_ends_at_eos_says_so_and_counts_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Sampler.draw

    def with_eos(self: Sampler, logits: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        tokens = draw(self, logits, steps)
        tokens[0] = torch.where(steps[0] == 3, 2, tokens[0])
        return tokens

    monkeypatch.setattr(Sampler, "draw", with_eos)
    for options, first in (((), (4, "stop")), (("--ignore_eos",), (7, "length"))):
        session = session_of(folder, "--precision", "fp32", "--max_new_tokens", 7, *options)
        session.load(3, 2)
        completions, _ = session.complete([Request([1, 5, 6], seed) for seed in (0, 1)])
        assert [(c.tokens, c.finish_reason) for c in completions] == [first, (7, "length")]


def test_a_prompt_needs_room_for_a_token(folder: Path) -> None:
    for session, most in ((session_of(folder), 512), (session_of(folder, "--max_length", 40), 40)):
        session.check_length([1] * (most - 1), "this")
        session.check_length([1] * 9, "this", 10)
        for ids, given in (([1] * most, None), ([1] * 10, 10)):
            with refused(InferenceError, code="prompt_too_long", key="this"):
                session.check_length(ids, "this", given)
