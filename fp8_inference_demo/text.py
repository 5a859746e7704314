"""Convert between text and tokens, without torch: load a tokenizer, encode prompts, decode token by token up to a stop
string."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8_inference_demo.errors import InferenceError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def read_text(path: Path, name: str) -> str:
    """Read a UTF-8 file, without its byte order mark. Raises InferenceError for invalid UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{name} is not UTF-8 ({error}); convert it (iconv -t UTF-8)"
        raise InferenceError(message, code="not_utf8", key=name) from error


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a Hugging Face folder. Raises ValueError if it is missing or cannot be read."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InferenceError(
            f"--model {folder} has no tokenizer ({' or '.join(TOKENIZER_FILES)}); copy the model's tokenizer into it",
            code="no_tokenizer",
            key=str(folder),
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # tokenizers raises a plain Exception for a broken file
        raise InferenceError(
            f"--model {folder}: the tokenizer cannot be read: {error}",
            code="unreadable_tokenizer",
            key=str(folder),
        ) from error


def encode(tokenizer: Any, prompt: str, vocab_size: int) -> list[int]:
    """Return the token ids of a prompt, starting with BOS like each training document.

    Raises ValueError if there are no tokens to start with, or if the tokenizer belongs to another model.
    """
    bos = tokenizer.bos_token_id
    # as in training: "</s>" in a text is plain text, not EOS
    ids = tokenizer(prompt, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    ids = ([] if bos is None else [bos]) + list(ids)
    if not ids:
        raise InferenceError(
            "the prompt is empty and the tokenizer has no BOS token; enter some text",
            code="empty_prompt",
        )
    if max(ids) >= vocab_size:
        raise InferenceError(
            f"the tokenizer returns the id {max(ids)}, but the model has {vocab_size} tokens; "
            "use the tokenizer of this model",
            code="wrong_tokenizer",
        )
    return ids


def eos_tokens(tokenizer: Any, config: Any) -> set[int]:
    """Return the token ids that end a text, from the model's configuration and the tokenizer."""
    ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return {token for token in [*ids, tokenizer.eos_token_id] if token is not None}


class TextStream:
    """Incremental decoder of token ids. Returns a character only when all tokens with its bytes have been added."""

    CONTEXT_TOKENS = 8

    def __init__(self, tokenizer: Any, context: Sequence[int]):
        """context: the ids before the first piece, because a tokenizer decodes the start of a text differently."""
        self.tokenizer = tokenizer
        self.ids = list(context[-self.CONTEXT_TOKENS :])
        # ids[start:done] are already decoded; they are the context of the following ids
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
        """Return the text that the tokens since the last piece complete, often ''."""
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.start, self.done = self.done, len(self.ids)
        return text

    def rest(self) -> str:
        """Return the remaining text, even if its last character is incomplete."""
        return self._new_text()


class StopStrings:
    """Cuts a stream of text before the first stop string. Holds back text that may be the start of a stop string.

    The first complete stop string counts. If several end at the same place, the longest counts. So the result does not
    depend on how the text is split into pieces.
    """

    def __init__(self, stop: Sequence[str]):
        self.stop = stop
        self.held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """Add a piece and return the text that is now certain, often ''. Do not call it after `found` is set."""
        text = self.held + piece
        places = [(text.find(stop), len(stop)) for stop in self.stop]
        if ends := [(start + length, start) for start, length in places if start >= 0]:
            self.found, self.held = True, ""
            return text[: min(ends)[1]]
        held = max((_overlap(text, stop) for stop in self.stop), default=0)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are the start of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
