"""fp8_inference_demo/session.py: each option reaches what it is for."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8_inference_demo import InferenceError, fp8_inference
from fp8_inference_demo.sampling import Sampling
from fp8_inference_demo.session import Printer, Session
from tests.conftest import refused
from tests.fp8_inference_demo.conftest import Output


def session_of(folder: Path, *options: object) -> Session:
    arguments = ["--model", str(folder), "--prompt", "x", *map(str, options)]
    return Session(fp8_inference.parse_arguments(arguments), folder)


def test_options_are_passed_to_sampling(folder: Path) -> None:
    given = ("--temperature", 0.3, "--top_k", 7, "--top_p", 0.6, "--min_p", 0.2, "--repetition_penalty", 1.4)
    sampling = Sampling(temperature=0.3, top_k=7, top_p=0.6, min_p=0.2, repetition_penalty=1.4)
    assert session_of(folder, *given).sampling == sampling
    assert session_of(folder).sampling == Sampling()


def test_context_length(folder: Path) -> None:
    session = session_of(folder, "--max_new_tokens", 12)  # of 512 positions
    assert [session.max_length(longest) for longest in (1, 500, 501, None)] == [13, 512, 512, 512]
    session.config.max_position_embeddings = 8192
    assert session.max_length(None) == 4096
    given = session_of(folder, "--max_length", 40)
    assert [given.max_length(longest) for longest in (1, 600, None)] == [40] * 3
    given.check_length([1] * 39, "this")
    given.check_length([1] * 9, "this", 10)
    for ids, most in (([1] * 40, None), ([1] * 10, 10)):
        with refused(InferenceError, code="prompt_too_long", key="this"):
            given.check_length(ids, "this", most)


def test_samples_are_streamed_in_order(
    output: Output,
) -> None:
    first, second = (SimpleNamespace(text="", finish_reason=None) for _ in range(2))
    printer = Printer(3)
    printer.before, printer.printed = 1, 1  # the first sample of three was in the batch before
    shown = []
    for one, text, finished in (
        (first, "ab", None),
        (second, "x", None),
        (first, "abc", "stop"),
        (second, "xy", "length"),
    ):
        one.text, one.finish_reason = text, finished
        printer.on_text([first, second])
        shown.append(output())
    assert shown == ["=== 2/3 ===\nab", "", "c\n=== 3/3 ===\nx", "y\n"]


@pytest.mark.parametrize("stop", [(), ("--stop", "never")])
def test_completion_text_grows_with_callback(folder: Path, stop: tuple[str, ...]) -> None:
    """Without a look, or a stop string, it comes at its end, which takes the host less."""
    session = session_of(folder, "--precision", "fp32", "--max_new_tokens", 8, "--ignore_eos", *stop)
    session.load(4, 1)
    requests, seen = session.requests(0, session.encode("def", "")), list[str]()
    (looked_at,), _ = session.complete(requests, lambda texts: seen.append(texts[0].text))
    (alone,), run = session.complete(requests)
    assert len(set(seen)) > 2 and seen[-1] == looked_at.text == alone.text and looked_at.tokens == 8
    assert all(later.startswith(text) for text, later in itertools.pairwise(seen))
    assert session.timing.decode_tokens == 2 * run.timing.decode_tokens == 14, "of all batches"


@pytest.mark.parametrize(("options", "tokens", "reason"), [((), 1, "stop"), (("--ignore_eos",), 8, "length")])
def test_eos_ends_a_completion(folder: Path, options: tuple[str, ...], tokens: int, reason: str) -> None:
    """Unless --ignore_eos is given. Here, the first generated token is EOS."""
    session = session_of(folder, "--precision", "fp32", "--max_new_tokens", 8, *options)
    session.load(4, 1)
    (request,) = session.requests(0, [1, 5])
    first = next(iter(session.engine.generate([request.ids], session.sampling, [request.seed], 1)))
    session.config.eos_token_id = first[0]
    (completion,), _ = session.complete([request])
    assert (completion.tokens, completion.finish_reason) == (tokens, reason)
