"""fp8_inference_demo/text.py: streamed text is the text, and ends before a stop string however it is cut."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from fp8_inference_demo import InferenceError
from fp8_inference_demo.text import StopStrings, TextStream, encode, eos_tokens, load_tokenizer
from tests.conftest import refused, small_config

# Accents, a script of three-byte characters and emoji of four: their bytes are spread over several tokens.
UNICODE_TEXT = "naïve café — 東京タワー, 🚀🎉 done. "


def pieces_of(stream: TextStream, ids: list[int]) -> list[str]:
    pieces = []
    for token in ids:
        stream.add(token)
        pieces.append(stream.piece())
    return pieces


@pytest.mark.parametrize("text", [UNICODE_TEXT, " leading space", "a\n\n  indented\tline\n"])
def test_streamed_text_equals_decoded_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    context, ids = tokenizer.encode("say:"), tokenizer.encode(text)
    stream = TextStream(tokenizer, context)
    pieces = pieces_of(stream, ids)
    assert "".join(pieces) + stream.rest() == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert sum(bool(piece) for piece in pieces) > 3, "it has to come piece by piece"


def test_incomplete_bytes_are_emitted_at_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    half = tokenizer.encode("東")[:-1]
    stream = TextStream(tokenizer, [])
    assert pieces_of(stream, half) == [""] * len(half)
    assert stream.rest() == tokenizer.decode(half)


def stopped(pieces: list[str], stop: tuple[str, ...]) -> tuple[str, bool]:
    """The text before the first stop string, with what is held back at the end, and whether there was one."""
    stops, text = StopStrings(stop), ""
    for piece in pieces:
        text += stops.push(piece)
        if stops.found:
            break
    return text + stops.held, stops.found


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ("END",), "one "),
        ("one EN", ("END",), None),
        ("aaab", ("aab",), "a"),
        ("abcab", ("abd", "cab"), "ab"),
        ("xabc", ("abcd", "bc"), "xa"),
        ("xabc", ("abc", "bc"), "x"),
        ("END", ("END",), ""),
        ("a\n\nb", ("\n\n",), "a"),
        ("nothing", (), None),
    ],
)
def test_stop_string_across_pieces(text: str, stop: tuple[str, ...], expected: str | None) -> None:
    wanted = (text, False) if expected is None else (expected, True)
    for count in range(len(text)):
        for cuts in itertools.combinations(range(1, len(text)), count):
            pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
            assert stopped(pieces, stop) == wanted, pieces


def test_partial_stop_string_is_held_back() -> None:
    stops = StopStrings(("</end>", "STOP"))
    pieces = ["text <", "b> S", "TO", "RE"]
    assert [stops.push(piece) for piece in pieces] == ["text ", "<b> ", "", "STORE"]


def test_prompt_starts_with_bos(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer("def main", add_special_tokens=False)["input_ids"]
    assert text and encode(tokenizer, "def main", 512) == [tokenizer.bos_token_id, *text]
    assert encode(tokenizer, "", 512) == [tokenizer.bos_token_id]
    marks = encode(tokenizer, f"a {tokenizer.bos_token}b{tokenizer.eos_token}", 512)[1:]
    assert marks and not {tokenizer.bos_token_id, tokenizer.eos_token_id} & set(marks), (
        "in a text they are letters"
    )


def test_invalid_prompts_raise(tokenizer: PreTrainedTokenizerFast) -> None:
    with refused(InferenceError, code="wrong_tokenizer"):
        encode(tokenizer, "def main", 100)
    without = copy.deepcopy(tokenizer)
    without.bos_token = None
    with refused(InferenceError, code="empty_prompt"):
        encode(without, "", 512)


def test_eos_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    eos = tokenizer.eos_token_id
    assert eos_tokens(tokenizer, small_config(eos_token_id=[5, 6])) == {5, 6, eos}
    assert eos_tokens(tokenizer, small_config(eos_token_id=None)) == {eos}


def test_folder_without_tokenizer_raises(tmp_path: Path) -> None:
    with refused(InferenceError, code="no_tokenizer", key=str(tmp_path)):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with refused(InferenceError, code="unreadable_tokenizer", key=str(tmp_path)):
        load_tokenizer(tmp_path)
