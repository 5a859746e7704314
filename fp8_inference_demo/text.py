"""Text and tokens, without torch: a folder's tokenizer, prompts to token ids, and token ids to text piece by piece, up
to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8_inference_demo.errors import InferenceError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def decoded(text: bytes, where: str) -> str:
    """UTF-8 -> text. Raises ValueError: it names the byte that is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        byte = text[error.start]
        raise InferenceError(
            f"{where}: byte {error.start + 1} (0x{byte:02x}) is not UTF-8; convert it (iconv -t UTF-8)",
            code="not_utf8",
            key=where,
        ) from error


def read_text(path: Path, name: str) -> str:
    """A file in UTF-8, without a byte order mark. Raises ValueError: a folder; a byte that is not, which it names."""
    if path.is_dir():
        raise InferenceError(f"{name} is a folder; give a file with the text", code="not_a_file", key=name)
    return decoded(path.read_bytes(), name).removeprefix("\ufeff")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder. Raises ValueError: none there, or one that cannot be read."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InferenceError(
            f"--model {folder}: no tokenizer ({' or '.join(TOKENIZER_FILES)}); copy the model's into it",
            code="no_tokenizer",
            key=str(folder),
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception for a broken file
        raise InferenceError(
            f"--model {folder}: its tokenizer cannot be read: {error}",
            code="unreadable_tokenizer",
            key=str(folder),
        ) from error


def encode(tokenizer: Any, prompt: str, vocab_size: int) -> list[int]:
    """Token ids of a prompt, BOS first, as each training document begins.

    Raises ValueError: nothing to begin with, or a tokenizer of another model.
    """
    bos = tokenizer.bos_token_id
    # as in training, where "</s>" in a text is letters
    ids = tokenizer(prompt, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    ids = ([] if bos is None else [bos]) + list(ids)
    if not ids:
        raise InferenceError(
            "the prompt is empty and the tokenizer has no BOS token to begin with; give some text",
            code="empty_prompt",
        )
    if max(ids) >= vocab_size:
        raise InferenceError(
            f"the tokenizer gives the id {max(ids)} and the model has {vocab_size} tokens; "
            "they do not belong together",
            code="wrong_tokenizer",
        )
    return ids


def eos_tokens(tokenizer: Any, config: Any) -> set[int]:
    """The token ids that end a text, of the model's configuration and of the tokenizer."""
    ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return {token for token in [*ids, tokenizer.eos_token_id] if token is not None}


class TextStream:
    """Token ids -> text, piece by piece. A character whose bytes are spread over several tokens comes out once it is
    complete."""

    CONTEXT_TOKENS = 8

    def __init__(self, tokenizer: Any, context: Sequence[int]):
        """`context`: the ids before the first piece. A tokenizer decodes a word differently at the start of a text."""
        self.tokenizer = tokenizer
        self.ids = list(context[-self.CONTEXT_TOKENS :])
        # ids[start:done] are out already, and the context of what follows
        self.start, self.done = 0, len(self.ids)

    def _new_text(self) -> str:
        before, now = (
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (self.ids[self.start : self.done], self.ids[self.start :])
        )
        return now[len(before) :]

    def add(self, token: int) -> None:
        self.ids.append(token)

    def piece(self) -> str:
        """The text that the tokens since the last piece complete, often ''."""
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.start, self.done = self.done, len(self.ids)
        return text

    def rest(self) -> str:
        """All that has not come out, complete or not."""
        return self._new_text()


class StopStrings:
    """Pieces of text -> the text before the first stop string, piece by piece. What may begin one is held back.

    The stop string that is complete first counts, of several that end together the longest; so the text does not depend
    on how it is cut into pieces.
    """

    def __init__(self, stop: Sequence[str]):
        self.stop = stop
        self.held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that is sure now, often ''. Not to be called again once one is `found`."""
        text = self.held + piece
        places = [(text.find(stop), len(stop)) for stop in self.stop]
        if ends := [(start + length, start) for start, length in places if start >= 0]:
            self.found, self.held = True, ""
            return text[: min(ends)[1]]
        held = max((_overlap(text, stop) for stop in self.stop), default=0)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` begin `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
