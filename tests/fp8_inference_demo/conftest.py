"""A small random model with a tokenizer of bytes, as a Hugging Face folder; the command, called in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MistralForCausalLM, PreTrainedTokenizerFast

from fp8_inference_demo import fp8_inference
from model.errors import UserError
from tests.conftest import refused, small_config

Demo = Callable[..., int]
Output = Callable[[], str]


def refuse(*arguments: object, code: str, key: str | None = None) -> UserError:
    """Check that the command with these arguments raises an error of this code and key, and return it."""
    with refused(UserError, code=code, key=key) as caught:
        fp8_inference.run(fp8_inference.parse_arguments([*map(str, arguments)]))
    return caught.value


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """BPE over bytes: few merges, so that most characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["def main(): return the value of the thing"] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A Hugging Face folder with a random model. Weights ten times the usual give logits far apart, so that rounding
    does not decide which token is the likeliest."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "hf"
    MistralForCausalLM(small_config(initializer_range=0.2, sliding_window=24)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Demo:
    """demo(argument..., typed=standard input) -> exit status."""

    def run(*arguments: object, typed: bytes = b"") -> int:
        monkeypatch.setattr(sys, "argv", ["demo", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
        return fp8_inference.main()

    return run


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Output:
    """output() -> what went to standard output since the last call."""
    return lambda: capsys.readouterr().out
