"""fp8_inference_demo/fp8_inference.py: the command, what it prints where, and how it ends."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8_inference_demo import fp8_inference
from fp8_inference_demo.engine import Engine
from fp8_inference_demo.sampling import Sampler
from tests import programs
from tests.fp8_inference_demo.conftest import Demo

ROOT = Path(__file__).resolve().parents[2]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def say(folder: Path, demo: Demo) -> Demo:
    """say(option...) -> exit status, of a prompt."""
    base = ["--model", folder, "--prompt", "def main", "--precision", "fp32", "--max_new_tokens", 12]
    return lambda *options: demo(*base, "--ignore_eos", *options)


def check_fp8(folder: Path, tmp_path: Path) -> None:
    """In a process of its own: FP8 ran, and standard output has the continuation alone."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("def main", encoding="utf-8")
    command = [
        sys.executable,
        str(ROOT / "fp8_inference_demo" / "fp8_inference.py"),
        "--model",
        folder.parent,
    ]
    command += ["--prompt_file", prompt, "--max_new_tokens", "6", "--temperature", "0", "--ignore_eos"]
    run: subprocess.CompletedProcess[str] = programs.run(
        [*map(str, command)], capture_output=True, text=True, encoding="utf-8", timeout=240
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() and "def main" not in run.stdout
    assert "FP8" in run.stderr and "decode 5 tokens at" in run.stderr


@pytest.mark.process
def test_fp8_generates(folder: Path, tmp_path: Path) -> None:
    check_fp8(folder, tmp_path)


@pytest.mark.gpu
@pytest.mark.process
def test_fp8_generates_on_a_gpu(folder: Path, tmp_path: Path) -> None:
    check_fp8(folder, tmp_path)


def test_a_seed_reproduces_the_text(say: Demo, capsys: Captured) -> None:
    texts = []
    for seed in (1, 1, 2):
        assert say("--temperature", 1.5, "--top_k", 0, "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_samples_come_one_behind_the_other(say: Demo, capsys: Captured) -> None:
    """Also in batches of two, with the tokens of all; the first one is what one sample alone is."""
    assert say() == 0
    alone = capsys.readouterr().out
    outputs, tokens = [], []
    for batch_size in (3, 2):
        assert say("--num_samples", 3, "--batch_size", batch_size) == 0
        out, error = capsys.readouterr()
        outputs.append(out)
        tokens.append(re.findall(r"(?:prefill|decode) \d+ tokens", error))
    assert outputs[0] == outputs[1] and tokens[0] == tokens[1] != []
    texts = (
        outputs[0].removeprefix("=== 1/3 ===\n").replace("=== 3/3 ===", "=== 2/3 ===").split("=== 2/3 ===\n")
    )
    assert texts[0] == alone and len(set(texts)) == 3


def test_a_text_ends_before_a_stop_string(say: Demo, capsys: Captured) -> None:
    """One that is spread over tokens."""
    options = ("--temperature", 0, "--max_new_tokens", 30)
    assert say(*options) == 0
    whole = capsys.readouterr()
    text = whole.out.removesuffix("\n")
    assert say(*options, "--stop", text[-1] + "never") == 0
    assert capsys.readouterr().out == whole.out, "what was held back comes out"
    stop = text[4:8]
    assert say(*options, "--stop", "never", "--stop", stop) == 0
    captured = capsys.readouterr()
    assert captured.out == text[: text.index(stop)] + "\n"
    assert "decode 29 tokens" in whole.err and "decode 29 tokens" not in captured.err, (
        "and nothing is computed behind"
    )


def test_a_text_ends_at_eos(
    folder: Path, demo: Demo, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    draw = Sampler.draw
    monkeypatch.setattr(
        Sampler, "draw", lambda self, logits, steps: torch.where(steps == 3, 2, draw(self, logits, steps))
    )
    base = ("--model", folder, "--prompt", "def main", "--precision", "fp32", "--temperature", 0)
    texts = []
    for options in ((), ("--ignore_eos",), ("--max_new_tokens", 3)):
        assert demo(*base, "--max_new_tokens", 12, *options) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[2] != texts[1]


def test_the_end_of_the_context_is_told(say: Demo, capsys: Captured) -> None:
    assert say("--max_length", 10) == 0
    captured = capsys.readouterr()
    assert (
        captured.out.strip()
        and "the context ends at 10 tokens; --max_length may be up to 512" in captured.err
    )
    assert say("--prompt", "z" * 508, "--max_new_tokens", 20) == 0
    assert "note: the context ends at 512 tokens, as the model's positions do\n" in capsys.readouterr().err
    assert say("--max_length", 3) == 2
    assert "--prompt has" in capsys.readouterr().err
    assert say("--max_length", 600) == 2
    assert "max_position_embeddings of the model, 512" in capsys.readouterr().err


def test_logits_that_are_not_finite_name_the_position(
    say: Demo, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    draw = Sampler.draw
    monkeypatch.setattr(
        Sampler, "draw", lambda self, logits, steps: torch.where(steps == 2, -1, draw(self, logits, steps))
    )
    assert say() == 2
    assert "--prompt: the logits of row 0 are not finite at new token 2" in capsys.readouterr().err


def test_out_of_memory_ends_with_what_to_do(
    say: Demo, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def raising(error: Exception) -> Callable[..., None]:
        def load(*arguments: object) -> None:
            raise error

        return load

    def no_room(*arguments: object) -> None:
        torch.empty(2**60, dtype=torch.uint8)

    for load, words in (
        (
            raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")),
            "CUDA out of memory",
        ),
        (raising(MemoryError()), "no memory left"),
        (no_room, "allocate"),
    ):
        monkeypatch.setattr(Engine, "load", load)
        assert say() == 2
        error = capsys.readouterr().err
        assert words in error and error.endswith("; give a smaller --batch_size or --max_length\n")
    monkeypatch.setattr(Engine, "load", raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        say()


def test_folders_that_will_not_do(tmp_path: Path, demo: Demo, capsys: Captured) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        fp8_inference.find_model_folder(tmp_path)
    step = tmp_path / "run" / "checkpoints" / "step-00000010"
    step.mkdir(parents=True)
    with pytest.raises(ValueError, match="never finished"):
        fp8_inference.find_model_folder(step)
    (step / "manifest.json").touch()
    for given in (tmp_path / "run", step):
        with pytest.raises(
            ValueError, match=r"no exported model yet; .*python train/export\.py \S*step-00000010"
        ):
            fp8_inference.find_model_folder(given)
    (tmp_path / "run/hf").mkdir()
    (tmp_path / "run/hf/config.json").touch()
    for given in (step.parent, step):
        with pytest.raises(
            ValueError, match=r"checkpoints, and the run's exported model is \S*run/hf; export the"
        ):
            fp8_inference.find_model_folder(given)
    assert demo("--model", tmp_path / "nowhere", "--prompt", "x") == 2
    assert "no such folder" in capsys.readouterr().err


def test_the_newest_finished_checkpoint_of_the_run_is_the_one_to_export(tmp_path: Path) -> None:
    """Neither one that another run of the folder left, which was set aside, nor one whose save was killed."""
    run, steps = tmp_path / "my run", (100_000_000, 12, 9)
    (run / "checkpoints.discarded-20260101" / "step-00000020").mkdir(parents=True)
    (run / "checkpoints.discarded-20260101" / "step-00000020" / "manifest.json").touch()
    with pytest.raises(ValueError, match=r"no config\.json"):
        fp8_inference.find_model_folder(run)
    for step in steps:
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    for step in steps[:0:-1]:
        (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").touch()
        for given in (run, run / "checkpoints"):
            with pytest.raises(ValueError) as raised:
                fp8_inference.find_model_folder(given)
            command = f"python train/export.py '{run}/checkpoints/step-{step:08d}' '{run}/hf'"
            assert str(raised.value).endswith(f"export the one you want: {command}")


def test_an_export_that_its_run_has_gone_on_from_is_told(
    folder: Path, tmp_path: Path, demo: Demo, capsys: Captured
) -> None:
    """Once, before anything takes time; train/evaluate.py would take the newer checkpoint."""
    run = tmp_path / "run"
    shutil.copytree(folder, run / "hf")
    for step in (20, 56):
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (run / "checkpoints" / "step-00000020" / "manifest.json").touch()

    def told(given: Path) -> str:
        assert demo("--model", given, "--prompt", "x", "--max_length", 10**6) == 2
        return capsys.readouterr().err.partition("error: ")[0]

    origin = run / "hf" / "exported_from.json"
    origin.write_text('{"checkpoint": "step-00000020", "manifest_sha256": "12"}')
    assert told(run) == "", "it is of the newest one"
    (run / "checkpoints" / "step-00000056" / "manifest.json").touch()
    note = told(run)
    assert note.startswith(f"note: {run}/hf is the model of step 20, and") and note.count("\n") == 1
    assert note.endswith(f": python train/export.py {run}/checkpoints/step-00000056 {run}/hf\n")
    assert told(run / "hf") == "", "where just this was asked for"
    origin.write_text("[]")
    assert told(run) == "", "nobody says what it is of"


@pytest.mark.parametrize("damage", ["truncated", "incomplete", "misspelt", "other"])
def test_damaged_models_end_with_an_error_and_no_traceback(
    damage: str, folder: Path, tmp_path: Path, demo: Demo, capsys: Captured
) -> None:
    model = tmp_path / "damaged"
    model.mkdir()
    for file in folder.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    weights, config = model / "model.safetensors", model / "config.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-8])
        words = f"{weights} has {weights.stat().st_size:,} bytes, by its own header {weights.stat().st_size + 8:,}"
    elif damage == "incomplete":
        tensors = load_file(weights)
        del tensors["lm_head.weight"]
        save_file(tensors, weights, {"format": "pt"})
        words = "lm_head.weight is missing"
    elif damage == "misspelt":
        config.write_text(config.read_text().replace("num_hidden_layers", "num_hiden_layers"))
        words = "did you mean num_hidden_layers?"
    else:
        config.write_text(config.read_text().replace('"mistral"', '"llama"'))
        words = "only mistral"
    assert demo("--model", model, "--prompt", "x", "--precision", "fp32") == 2
    error = capsys.readouterr().err
    assert "error: " in error and words in error and "damaged" in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--top_p", "0"], "--top_p"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--temperature", "1e-50"], "1e-6 to 100"),
        (["--max_new_tokens", "0"], "--max_new_tokens"),
        (["--top_k", "x"], "--top_k"),
        (["--stop", ""], "allowed is a text"),
        (["--prompt", "caf\udce9"], "is not UTF-8"),
        (["--prompts", "a.jsonl"], "needs --output"),
        (["--prompts", "a.jsonl", "--output", "./a.jsonl"], "is the file of --prompts"),
        (["--prompt", "a", "--output", "b"], "goes with --prompts or --report"),
        (["--prompt", "a", "--interactive"], "not allowed with"),
        (["--num_samples", "2", "--temperature", "0"], "all samples are equal"),
        (["--num_samples", "2", "--interactive"], "a conversation has one"),
        (["--report", "a", "--output", "b.txt"], "ends in .json"),
        (["--recipe", "current"], "--recipe"),
    ],
)
def test_bad_options(options: list[str], words: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        fp8_inference.parse_arguments(["--model", "x", *options])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "least", "most", "below", "above"),
    [
        ("--temperature", "1e-6", "100", "9e-7", "100.1"),
        ("--top_k", "0", "50000", "-1", "1.5"),
        ("--top_p", "1e-6", "1", "9e-7", "1.001"),
        ("--min_p", "0", "1", "-0.1", "1.001"),
        ("--repetition_penalty", "0.01", "100", "0.009", "101"),
        ("--seed", "0", "9" * 15, "-1", "x"),
        ("--max_new_tokens", "1", "99999", "0", "x"),
        ("--num_samples", "1", "999", "0", "x"),
        ("--batch_size", "1", "999", "0", "x"),
        ("--max_length", "2", "99999", "1", "x"),
    ],
)
def test_limits_of_options(option: str, least: str, most: str, below: str, above: str) -> None:
    def parsed(text: str) -> float:
        arguments = fp8_inference.parse_arguments(["--model", "x", "--prompt", "a", option, text])
        return vars(arguments)[option.removeprefix("--")]

    assert [parsed(least), parsed(most)] == [float(least), float(most)]
    for text in (below, above):
        with pytest.raises(SystemExit):
            parsed(text)


def test_no_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """As where a shell closes it: <&-."""
    monkeypatch.setattr(sys, "stdin", None)
    assert fp8_inference.parse_arguments(["--model", "x", "--prompt", "a"]).prompt == "a"
    with pytest.raises(SystemExit):
        fp8_inference.parse_arguments(["--model", "x"])
    assert "give --prompt" in capsys.readouterr().err
