"""Convert between text and tokens without importing torch.

Loads a tokenizer, encodes prompts, and decodes tokens one by one up to a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8_inference_demo import InferenceError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def read_text(path: Path, name: str) -> str:
    """Read a UTF-8 text file and drop its byte order mark.

    name: the option and the file, for the error message. Raises InferenceError for invalid UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{name} is not valid UTF-8: {error}. Convert the file, for example with iconv -t UTF-8."
        raise InferenceError(message, code="not_utf8", key=name) from error


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer from a Hugging Face model folder.

    Raises InferenceError if the tokenizer is missing or cannot be read.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InferenceError(
            f"--model {folder} has no tokenizer ({' or '.join(TOKENIZER_FILES)}). "
            "Copy the model's tokenizer files into this folder.",
            code="no_tokenizer",
            key=str(folder),
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # tokenizers raises a plain Exception for a broken file
        raise InferenceError(
            f"--model {folder}: the tokenizer files cannot be read ({error}). "
            "Copy the model's tokenizer files into this folder again.",
            code="unreadable_tokenizer",
            key=str(folder),
        ) from error


def encode(tokenizer: Any, prompt: str, vocab_size: int) -> list[int]:
    """Return the token ids of a prompt, starting with BOS if the tokenizer has BOS, as in each training document.

    Raises InferenceError if the prompt has no tokens, or if a token id exceeds the model's vocabulary.
    """
    bos = tokenizer.bos_token_id
    # as in training, "</s>" in the prompt is plain text, not EOS
    ids = tokenizer(prompt, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    ids = ([] if bos is None else [bos]) + list(ids)
    if not ids:
        raise InferenceError(
            "the prompt is empty, and the tokenizer has no BOS token to start from. Enter a prompt.",
            code="empty_prompt",
        )
    if max(ids) >= vocab_size:
        raise InferenceError(
            f"the tokenizer returned token id {max(ids)}, but the model's vocabulary has only {vocab_size} tokens. "
            "Use the tokenizer that belongs to this model.",
            code="wrong_tokenizer",
        )
    return ids


def eos_tokens(tokenizer: Any, config: Any) -> set[int]:
    """Return the EOS token ids listed in the model's configuration and in the tokenizer."""
    ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return {token for token in [*ids, tokenizer.eos_token_id] if token is not None}


class TextStream:
    """Incremental decoder from token ids to text.

    A character can span several tokens. The decoder returns a character only after all of its tokens were added.
    """

    CONTEXT_TOKENS = 8

    def __init__(self, tokenizer: Any, context: Sequence[int]):
        """Create a decoder for the tokens that follow the token ids `context`, usually the prompt.

        The decoder needs the context because a tokenizer decodes the first token of a text differently.
        """
        self.tokenizer = tokenizer
        self.ids = list(context[-self.CONTEXT_TOKENS :])
        # ids[start:done] are already decoded and serve as context for the next ids
        self.start, self.done = 0, len(self.ids)

    def rest(self) -> str:
        """Return the remaining text after the last piece, including an incomplete last character."""
        before, now = (
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (self.ids[self.start : self.done], self.ids[self.start :])
        )
        return now[len(before) :]

    def add(self, token: int) -> None:
        self.ids.append(token)

    def piece(self) -> str:
        """Return the new text since the last piece, or "" if the last character of the text is still incomplete."""
        text = self.rest()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.start, self.done = self.done, len(self.ids)
        return text


class StopStrings:
    """Filter that cuts streamed text off before a stop string.

    Text that may be the start of a stop string is held back. The stop string that is completed first counts. If the
    same character completes several stop strings, the longest one counts. The result therefore does not depend on how
    the text is split into pieces.
    """

    def __init__(self, stop: Sequence[str]):
        self.stop = stop
        self.held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """Add a piece of text, and return all held text that cannot be part of a stop string (possibly "").

        Do not call this method after `found` is set.
        """
        text = self.held + piece
        places = [(text.find(stop), len(stop)) for stop in self.stop]
        if ends := [(start + length, start) for start, length in places if start >= 0]:
            self.found, self.held = True, ""
            return text[: min(ends)[1]]
        held = max((_overlap(text, stop) for stop in self.stop), default=0)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that is a suffix of `text`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
