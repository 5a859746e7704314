"""fp8_inference_demo/fp8_inference.py: the same tokens as transformers, FP8 one token at a time, streaming, errors."""

from __future__ import annotations

import itertools
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MistralForCausalLM, PreTrainedTokenizerFast

from fp8_inference_demo import fp8_inference, generation
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from tests import programs
from tests.conftest import small_config

ROOT = Path(__file__).resolve().parents[2]

# Accents, a script of three-byte characters and emoji of four: their bytes are spread over several tokens.
UNICODE_TEXT = "naïve café — 東京タワー, 🚀🎉 done. "


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random model. Weights ten times the usual give logits far apart, so that rounding
    does not decide which token is the likeliest."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "hf"
    MistralForCausalLM(small_config(initializer_range=0.2, sliding_window=24)).save_pretrained(path)
    byte_level_tokenizer().save_pretrained(path)
    return path


def load(folder: Path, compute: str, **options: object) -> generation.Generator:
    precision = Precision(PrecisionConfig(compute=compute, recipe="current"))
    options = {"sampling": generation.Sampling(temperature=0), "seed": 0, "ignore_eos": True} | options
    return generation.load(folder, precision, **options)  # type: ignore[arg-type]


def run_demo(*arguments: str | Path, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "fp8_inference_demo" / "fp8_inference.py"), *map(str, arguments)]
    return programs.run(command, input=typed, capture_output=True, text=True, encoding="utf-8", timeout=240)


def check_greedy(folder: Path, device: str) -> None:
    generator = load(folder, "fp32")
    ids, timing = generator.encode("def main"), generation.Timing()
    tokens = list(generator.tokens(ids, 40, timing))
    reference = MistralForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    expected = reference.generate(
        torch.tensor([ids], device=device),
        do_sample=False,
        max_new_tokens=40,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert ids + tokens == expected[0].tolist()
    assert len(set(tokens)) > 5, "a model that repeats one token proves little"
    assert (timing.prefill_tokens, timing.decode_tokens) == (len(ids), 39)


def test_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    check_greedy(folder, "cpu")


@pytest.mark.gpu
def test_greedy_tokens_are_those_of_transformers_on_a_gpu(folder: Path) -> None:
    check_greedy(folder, "cuda")


def test_a_prompt_begins_as_each_training_document(folder: Path) -> None:
    generator = load(folder, "fp32")
    text = generator.tokenizer("def main", add_special_tokens=False)["input_ids"]
    assert text and generator.encode("def main") == [generator.tokenizer.bos_token_id, *text]


def test_every_token_takes_its_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that is read twice a token and goes on by a second each time."""
    generator, seconds = load(folder, "fp32"), itertools.count()
    monkeypatch.setattr(generation.time, "perf_counter", lambda: next(seconds))
    timing = generation.Timing()
    assert len(list(generator.tokens(generator.encode("def main"), 41, timing))) == 41
    assert (timing.prefill_s, timing.decode_tokens, timing.decode_s) == (1, 40, 40)
    assert timing.line().endswith("; decode 40 tokens at 1.0 tokens/s")


def test_generation_stops_at_eos(folder: Path) -> None:
    generator = load(folder, "fp32")
    ids = generator.encode("def main")
    tokens = list(generator.tokens(ids, 20, generation.Timing()))
    generator.ignore_eos = False
    generator.model.config.eos_token_id = [tokens[5]]
    assert list(generator.tokens(ids, 20, generation.Timing())) == tokens[: tokens.index(tokens[5])]


def check_fp8(folder: Path, recipe: str) -> None:
    run = run_demo(
        "--model", folder, "--prompt", "def main", "--recipe", recipe, "--max_new_tokens", 6,
        "--temperature", 0, "--ignore_eos",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("def main")
    # two layers of seven projections; lm_head stays in bf16
    assert "14 of 15 GEMM modules ran FP8" in run.stderr
    assert "decode 5 tokens at" in run.stderr


@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.process
def test_fp8_generates_one_token_at_a_time(folder: Path, recipe: str) -> None:
    check_fp8(folder, recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.process
def test_fp8_generates_one_token_at_a_time_on_a_gpu(folder: Path, recipe: str) -> None:
    check_fp8(folder, recipe)


def test_fp8_without_fp8_modules_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = load(folder, "fp8")
    monkeypatch.setattr(
        generator.precision, "autocast", lambda: generator.precision.te.autocast(enabled=False)
    )
    with pytest.raises(generation.DemoError, match="no module ran FP8"):
        generation.answer(generator, "def", 2)


def test_same_seed_same_text(folder: Path) -> None:
    def draw(seed: int) -> list[int]:
        generator = load(folder, "bf16", sampling=generation.Sampling(1.5, top_k=0), seed=seed)
        return list(generator.tokens(generator.encode("def"), 12, generation.Timing()))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize(("temperature", "probability"), [(0.5, 0.881), (2.0, 0.622)])
def test_a_low_temperature_prefers_the_likely(temperature: float, probability: float) -> None:
    """Of two tokens whose logits are 1 apart the likelier one has 1 / (1 + exp(-1 / temperature))."""
    logits, random = torch.tensor([2.0, 3.0]), torch.Generator().manual_seed(0)
    sampling = generation.Sampling(temperature, top_k=0)
    drawn = sum(sampling.draw(logits, random) for _ in range(2000))
    assert drawn / 2000 == pytest.approx(probability, abs=0.03)  # three times the standard deviation


def test_sampling_limits() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0])  # probabilities .03, .63, .23, .09, .01
    random = torch.Generator().manual_seed(0)

    def drawn(**limits: float) -> set[int]:
        return {generation.Sampling(1.0, **limits).draw(logits, random) for _ in range(200)}  # type: ignore[arg-type]

    assert drawn(top_k=0) > {1, 2, 3}
    assert drawn(top_k=2) == {1, 2}
    assert drawn(top_k=0, top_p=0.8) == {1, 2}
    assert drawn(top_k=0, top_p=0.1) == {1}


@pytest.mark.parametrize("text", [UNICODE_TEXT, " leading space", "a\n\n  indented\tline\n"])
def test_streamed_text_is_the_text(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    context, ids = tokenizer.encode("say:"), tokenizer.encode(text)
    stream = generation.TextStream(tokenizer, context)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.rest() == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert sum(bool(piece) for piece in pieces) > 3, "it has to come piece by piece"


def test_incomplete_bytes_come_out_at_the_end() -> None:
    tokenizer = byte_level_tokenizer()
    half = tokenizer.encode("東")[:-1]
    stream = generation.TextStream(tokenizer, [])
    assert [stream.push(token) for token in half] == [""] * len(half)
    assert stream.rest() == tokenizer.decode(half)


@pytest.mark.process
def test_prompts_line_by_line(folder: Path) -> None:
    """To the end of the input: a blank line is no prompt, and the last line may end without a newline."""
    arguments = ("--model", folder, "--precision", "bf16", "--max_new_tokens", "3")
    run = run_demo(*arguments, typed="\ndef main\n \n\nreturn the")
    assert run.returncode == 0, run.stderr
    assert "def main" in run.stdout and "return the" in run.stdout
    assert run.stderr.count("prefill") == 2


def test_an_empty_line_ends_what_is_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = StringIO("def main\n\nreturn the\n")
    typed.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", typed)
    assert list(fp8_inference.prompts(fp8_inference.parse_arguments(["--model", "x"]))) == ["def main"]
    assert capsys.readouterr().err.count("prompt (empty line: end)> ") == 2


@pytest.mark.process
def test_prompt_file_and_run_folder(folder: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(UNICODE_TEXT, encoding="utf-8")
    run = run_demo(
        "--model", folder.parent, "--prompt_file", prompt, "--precision", "fp32", "--max_new_tokens", "2"
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(UNICODE_TEXT)


def test_generation_ends_at_the_last_position(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    generator = load(folder, "bf16")
    generator.model.config.max_position_embeddings = 12
    ids, timing = generator.encode("def main"), generation.Timing()
    list(generator.stream(ids, 100, timing))
    assert timing.prefill_tokens + timing.decode_tokens + 1 == 12
    assert "positions end" in capfd.readouterr().err


def test_prompt_errors(folder: Path) -> None:
    generator = load(folder, "bf16")
    with pytest.raises(generation.DemoError, match="max_position_embeddings is 512"):
        generator.encode("x y " * 600)
    generator.model.config.vocab_size = 100
    with pytest.raises(generation.DemoError, match="do not belong together"):
        generator.encode("def main")


def copy_without(folder: Path, target: Path, *names: str) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        if file.name not in names:
            (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.process
def test_missing_folder(tmp_path: Path) -> None:
    run = run_demo("--model", tmp_path / "nowhere", "--prompt", "x")
    assert run.returncode == 1
    assert "no such folder" in run.stderr and "Traceback" not in run.stderr


def test_folders_that_will_not_do(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        fp8_inference.find_model_folder(tmp_path)
    step = tmp_path / "run" / "checkpoints" / "step-00000010"
    step.mkdir(parents=True)
    for given in (tmp_path / "run", step):
        with pytest.raises(ValueError, match=r"python train/export\.py \S*step-00000010"):
            fp8_inference.find_model_folder(given)

    with pytest.raises(generation.DemoError, match=r"no tokenizer \(tokenizer\.json"):
        load(copy_without(folder, tmp_path / "bare", "tokenizer.json"), "bf16")
    with pytest.raises(ValueError, match="empty.*no file named model.safetensors"):
        load(copy_without(folder, tmp_path / "empty", "model.safetensors"), "bf16")
    broken = copy_without(folder, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(generation.DemoError, match="broken: its tokenizer cannot be read"):
        load(broken, "bf16")
    other = copy_without(folder, tmp_path / "llama")
    config = (other / "config.json").read_text().replace('"mistral"', '"llama"')
    (other / "config.json").write_text(config)
    with pytest.raises(ValueError, match="only mistral"):
        load(other, "bf16")


@pytest.mark.parametrize("damage", ["truncated", "incomplete", "misspelt"])
def test_damaged_models_end_with_an_error_and_no_traceback(
    damage: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = copy_without(folder, tmp_path / "damaged")
    weights, config = model / "model.safetensors", model / "config.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-8])
        words = "model.safetensors is truncated"
    elif damage == "incomplete":
        tensors = load_file(weights)
        del tensors["lm_head.weight"]
        save_file(tensors, weights, {"format": "pt"})
        words = "lm_head.weight is missing"
    else:
        config.write_text(config.read_text().replace("num_hidden_layers", "num_hiden_layers"))
        words = "did you mean num_hidden_layers?"
    monkeypatch.setattr(sys, "argv", ["demo", "--model", str(model), "--prompt", "x", "--precision", "fp32"])
    assert fp8_inference.main() == 1
    error = capfd.readouterr().err
    assert "error: " in error and words in error and "damaged" in error


@pytest.mark.parametrize(
    ("option", "value"),
    [("--top_p", "0"), ("--temperature", "-1"), ("--max_new_tokens", "0"), ("--top_k", "x")],
)
def test_bad_options(option: str, value: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fp8_inference.parse_arguments(["--model", "x", option, value])
    assert option in capfd.readouterr().err
