"""What README.md and docs/ promise: tables written from the code, commands and messages that are there."""

from __future__ import annotations

import ast
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from model.config import CONFIGS, load_sizes, weight_shapes
from model.fp8.recipes import FP8_FEATURE_MULTIPLE
from scripts import tables
from test_fp8.compare_convergence import seconds_to_loss
from tests.imports import ROOT, imported_files, sources
from train import plan
from train.config.ds_config import KEYS
from train.config.load import build_arguments, load_arguments, resolve_arguments
from train.config.schema import all_keys
from train.record.run_folder import RunFolder

PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "examples/README"))]
PAGES += sorted((ROOT / "docs").glob("*.md"))
# A program of this project in a command, and the rest of the line.
COMMAND = re.compile(r"((?:train|test_fp8|fp8_inference_demo|scripts)/\w+\.py|run_training\.sh)(.*)")
OPTION = re.compile(r"(?<!\S)--([\w.]+)")
# Words for which the field has others: verified, seed noise, in addition, again, logged, continues, a check.
AVOIDED = re.compile(r"\b(?:proven|chance|besides|anew|told|goes on|a look)\b", re.IGNORECASE)
# What a message has in place of a name or a number.
HOLE = "\0"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_texts_use_the_words_of_the_field() -> None:
    """Of pages, and of docstrings, help texts and messages: strings with a space."""
    texts = {page.name: text_of(page) for page in PAGES}
    for file in sources():
        nodes = ast.walk(ast.parse(text_of(ROOT / file)))
        strings = (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
        texts[str(file)] = "\n".join(text for text in strings if " " in text)
    assert {name: found for name, text in texts.items() if (found := AVOIDED.findall(text))} == {}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_generated_tables_are_current(page: Path) -> None:
    current = tables.page_with(page, tables.PAGES[page]())
    assert current == text_of(page), "python scripts/tables.py writes it anew"


def test_configuration_page_lists_every_key_once() -> None:
    page = text_of(ROOT / "docs/configuration.md").partition(tables.BEGIN)[2]
    assert sorted(re.findall(r"^\| `([\w.]+)`<br>", page, re.M)) == sorted(all_keys())


def test_reliability_page_lists_run_files() -> None:
    page, folder = text_of(ROOT / "docs/reliability.md"), RunFolder("run")
    left = [path.name for path in vars(folder).values() if path.parent == folder.path]
    assert len(left) > 10 and [name for name in left if f"`{name}" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_cited_programs_options_and_keys_exist(page: Path) -> None:
    text = text_of(page).replace("\\\n", " ")
    for name, value in re.findall(r'^ +(\w)="(python .*?)"', text, re.M):
        text = text.replace(f"${name} ", f"{value} ")
    for command in COMMAND.finditer(text):
        check_command(*command.groups())
    keys = re.findall(r"`((?:model|data|precision|speed)\.\w+)", text)
    assert [key for key in keys if key not in all_keys()] == []
    options = re.findall(r"`--([\w.]+)(?=[` ])", text)
    unknown = [option for option in options if option not in every_option()]
    assert [option for option in unknown if option.removeprefix("deepspeed.") not in KEYS] == []


def check_command(program: str, rest: str) -> None:
    """Check the options of a command, also of a program that it starts."""
    own, _, run = re.split(r" #|[`;|]", rest)[0].partition(" -- ")
    if run:  # compare_convergence.py passes them to train.py
        check_command("train/train.py", f" {run}")
    if started := COMMAND.search(own):
        check_command(*started.groups())
        own = own[: started.start()]
    known = options_of(program)
    assert [option for option in OPTION.findall(own) if option not in known] == [], f"{program}{rest}"
    if program == "test_fp8/compare_convergence.py":  # --row NAME KEY=VALUE...
        keys = re.findall(r"(?<=[\s'])([a-z_]\w*(?:\.\w+)?)=", own)
        assert [key for key in keys if key not in all_keys()] == [], f"{program}{rest}"


@cache
def options_of(program: str) -> set[str]:
    """Return the options that the sources of a program and of its direct imports name."""
    if program in ("run_training.sh", "train/train.py"):
        return {*all_keys(), "help", "schema", "version"}
    files = [Path(program), *imported_files(Path(program))]
    found = {option for file in files for option in re.findall(r'"--(\w+)"', text_of(ROOT / file))}
    return found | {"help"} | (set(all_keys()) if program == "train/plan.py" else set())


@cache
def every_option() -> set[str]:
    """Return the options of all programs and scripts, and those of Slurm that the pages explain."""
    scripts = "".join(map(text_of, ROOT.glob("*.sh")))
    programs = (options_of(path.as_posix()) for path in sources())
    return {*all_keys(), *re.findall(r"--(\w+)", scripts), "gres"}.union(*programs)


def test_fenced_commands_are_complete() -> None:
    """From the file or as a browser shows it: to Python an indent is something, to the shell nothing."""
    codes = []
    for page in PAGES:
        for text in (text_of(page), re.sub("^    ", "", text_of(page), flags=re.M)):
            # a shell takes the end of a line behind a backslash away, in quotes too
            for code in re.findall(r'python -c "([^"]*)"', text.replace("\\\n", "")):
                codes.append(compile(code, page.name, "exec"))
    assert codes


def test_readme_tokenizer_fits_its_model() -> None:
    text = text_of(ROOT / "README.md")
    (model,) = re.findall(r"--model\.config (\w+)", text)
    assert f"--vocab_size {load_sizes(model).vocab_size} " in text and f"model/configs/{model}.json" in text


def test_cluster_page_plans(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    commands = re.findall(r"python train/plan\.py (.*)", text_of(ROOT / "docs/cluster.md"))
    for words in commands:
        assert plan.main(shlex.split(words, comments=True)) == 0, capsys.readouterr().err
    assert commands


def test_cluster_page_trial_uses_another_folder() -> None:
    """Its few steps have to be accepted, and leave nothing that the run would have to go on from."""
    text = text_of(ROOT / "docs/cluster.md").replace("\\\n", " ")
    (words,) = re.findall(r"run_training\.sh my_run\.json (.*--max_steps.*)", text)
    run = load_arguments(["train_config_fp8.json"])
    trial = resolve_arguments(load_arguments(["train_config_fp8.json", *shlex.split(words)]), 8)
    assert run.warmup_steps > trial.max_steps and trial.save_strategy == "no"
    assert trial.output_dir != run.output_dir


@cache
def messages() -> list[str]:
    """For each file of the sources its texts, what is put into them being HOLE. A message may be of several texts."""
    found = []
    for path in sources():
        texts = []
        for node in ast.walk(ast.parse(text_of(ROOT / path))):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else HOLE for v in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
        found.append("\n".join(texts))
    return [*found, text_of(ROOT / "scripts/setup_env.sh")]


def quoted() -> list[str]:
    pages = [text_of(ROOT / "docs" / name) for name in ("troubleshooting.md", "cluster.md")]
    return [" ".join(m.split()) for page in pages for m in re.findall(r"\*\*`([^`]+)`\*\*", page)]


def test_quoted_messages_exist() -> None:
    assert len(quoted()) >= 35
    for message in quoted():
        parts = [part.strip() for part in message.split("...") if part.strip(" .;:")]
        assert any(all(part in text for part in parts) for text in messages()), message


def blocks() -> list[dict[str, object]]:
    text = text_of(ROOT / "docs/getting-started.md") + text_of(ROOT / "docs/configuration.md")
    return [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```", text, re.M | re.S)]


def test_quoted_configurations_are_valid() -> None:
    runs = [block for block in blocks() if "max_steps" in block]
    assert len(runs) == 2
    for run in runs:
        resolve_arguments(build_arguments(run), 1)
    assert resolve_arguments(build_arguments(runs[0]), 2)


def test_shipped_models_fit_fp8() -> None:
    for path in CONFIGS.glob("*.json"):
        shapes = [shape for shape in weight_shapes(load_sizes(path.stem)).values() if len(shape) == 2]
        assert not [shape for shape in shapes if any(size % FP8_FEATURE_MULTIPLE for size in shape)], path


def test_readme_speeds_equal_results() -> None:
    report = json.loads(text_of(ROOT / "test_fp8/results/hare_1.1b_shipped_step.json"))
    page = text_of(ROOT / "README.md")
    rows = {r["row"]: r for r in report["results"]}
    base, mlp = rows["te_layer_fp8_delayed"], rows.pop("te_layer_fp8_delayed_mlp")
    memory = mlp["allocated_gib"] - base["allocated_gib"]
    slowdown = 100 * (mlp["tokens_per_second"] / base["tokens_per_second"] - 1)
    assert f"| {memory:.1f} GiB | {slowdown:.1f} % " in text_of(ROOT / "docs/hardware.md")
    for name, r in rows.items():
        speed = r["tokens_per_second"]
        line = next(
            line for line in page.splitlines() if f"{round(speed, -2):,.0f}" in line and line.startswith("|")
        )
        assert f"{r['ratio_to_best_bf16']:.2f}" in line, name
        assert f"{r['allocated_gib']:.0f}" in line, name


def times_to_loss(report: dict[str, Any], factor: float) -> list[float | None]:
    """Return the seconds of each case to `factor` times the final loss of the first one, or None."""
    target = factor * report["results"][0]["eval_loss"]
    curves = [r["curves"] for r in report["results"]]
    return [seconds_to_loss([*zip(c["eval_seconds"], c["eval_loss"], strict=True)], target) for c in curves]


@pytest.mark.parametrize("name", ["time_to_loss_106m", "time_to_loss_hare_1.1b"])
def test_times_to_a_loss_equal_results(name: str) -> None:
    report = json.loads(text_of(ROOT / f"test_fp8/results/{name}.json"))
    times = times_to_loss(report, 1)
    for result, seconds in zip(report["results"], times, strict=True):
        figures = "not reached"
        if seconds and times[0]:
            figures = rf"\b{seconds / 60:.1f}\b.*\b{times[0] / seconds:.2f}\b"
        loss = rf"\b{result['eval_loss']:.4f}\b"
        assert re.search(rf"^\|.*{loss}.*{figures}", text_of(ROOT / "docs/validation.md"), re.M), figures


def test_times_to_a_higher_loss_equal_results() -> None:
    report = json.loads(text_of(ROOT / "test_fp8/results/time_to_loss_106m.json"))
    times = times_to_loss(report, 1.01)
    for result, seconds in zip(report["results"], times, strict=True):
        assert seconds and times[0]
        row = rf"^\|.*\b{result['eval_loss']:.4f}\b.*\b{times[0] / seconds:.2f}\b\**( \||$)"
        assert re.search(row, text_of(ROOT / "docs/validation.md"), re.M), row


def test_readme_losses_equal_results() -> None:
    page = text_of(ROOT / "README.md")
    results = ROOT / "test_fp8/results"
    differences = {d["row"]: d for d in json.loads(text_of(results / "seeds_106m.json"))["differences"]}
    fp8, muon = differences["fp8"], differences["muon"]
    assert f"{fp8['mean_percent']:+.2f} % ± {fp8['half_width']:.2f} %" in page
    assert " and ".join(f"{percent:+.2f} %" for percent in muon["percent"]) in page
    runs = json.loads(text_of(results / "initial_weights.json"))["results"]
    final = {(r["model"], r["steps"], f"{r['eval_loss']:.3f}") for r in runs if r["eval_loss"]}
    lines = [line for line in page.splitlines() if line.startswith("|") and re.search(r"\d\.\d{3}", line)]
    measured = (("mistral_106m", 1000), ("mistral_106m", 1910), ("hare_1.1b", 191))
    for (model, steps), line in zip(measured, lines, strict=True):
        assert {(model, steps, loss) for loss in re.findall(r"\d\.\d{3}", line)} <= final


def test_fastest_configuration_is_the_measured_one() -> None:
    runs = json.loads(text_of(ROOT / "test_fp8/results/initial_weights.json"))["results"]
    complete = [r for r in runs if r["model"] == "mistral_106m" and r["steps"] == 1000 and r["eval_loss"]]
    best = min(complete, key=lambda r: r["eval_loss"])
    words, _, common = best["command"].partition(" -- ")
    overrides = re.findall(r"(\S+)=(\S+)", words)
    changed = [word for key, value in overrides for word in (f"--{key}", value)]
    measured, shipped = (
        vars(load_arguments(arguments))
        for arguments in (
            ["train_config_evidence", *shlex.split(common), *changed],
            ["train_config_fastest"],
        )
    )
    differing = {key for key in measured if measured[key] != shipped[key]}
    assert differing <= {
        "data",
        "output_dir",
        "max_eval_samples",
        "save_steps",
        "save_total_limit",
    }


def test_bf16_configuration_differs_only_in_precision() -> None:
    fp8, bf16 = (vars(load_arguments([f"train_config_{name}"])) for name in ("fp8", "bf16"))
    assert {key for key in fp8 if fp8[key] != bf16[key]} == {"precision", "output_dir"}


def test_decoding_speeds_equal_results() -> None:
    report = json.loads(text_of(ROOT / "test_fp8/results/decode_vllm.json"))
    page = text_of(ROOT / "docs/inference.md")
    speeds = [r["tokens_per_s"] for r in report["results"] if r["what"] == "decode"]
    assert len(speeds) == 12
    assert [speed for speed in speeds if f"{round(speed):,}" not in page] == []
