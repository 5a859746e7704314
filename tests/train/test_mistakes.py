"""What a user gets wrong, and hears of at once: one message that names it, what is allowed and what to do, status 2,
and nothing changed in output_dir. All of it before torch is imported or a rank started.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.mistakes import (
    Mistake,
    World,
    a_file_as_output,
    a_llama_folder,
    another_tokenizer_beside_the_data,
    broken_config,
    damaged_checkpoint,
    data_as_output,
    export_as_output,
    export_by_a_link,
    export_of_somebody_else,
    held_out_by_a_larger_fraction,
    held_out_by_another_tokenizer,
    hf_folder,
    huge_model,
    keys,
    little_disk,
    model_file,
    no_config,
    no_weights,
    options,
    output_of_somebody_else,
    part_of_somebody_else,
    raw_text_as_data,
    second_run,
    shortened_data,
    sources_of_two_eval_fractions,
    sources_of_two_tokenizers,
    tracker_that_is_not_installed,
    unfinished_data,
    weights_of_another_model,
    weights_that_are_cut_off,
)
from tests.train.runs import ROOT
from train import launch, train
from train.preflight import check, machine

MISTAKES: list[tuple[str, Mistake, list[str]]] = [
    ("a misspelt key", keys(learnin_rate=1), ["learnin_rate: unknown key", "did you mean learning_rate?"]),
    ("a misspelt option", options("--learning_rat", "1"), ["learning_rat", "did you mean learning_rate?"]),
    ("an option without its value", options("--learning_rate"), ["--learning_rate needs a value"]),
    ("a key of a section at the top", keys(recipe="current"), ["recipe: unknown key", "precision.recipe"]),
    (
        "a rate that no step can take",
        keys(learning_rate=1e300),
        ["learning_rate: 1e+300", "above 0 and of at most 100"],
    ),
    ("a word for a number", keys(max_steps="many"), ['max_steps: "many"', "an integer above 0"]),
    ("a choice that there is not", keys(precision__compute="fp4"), ['"fp4"', "fp8, bf16, fp16, fp32"]),
    ("no such configuration", no_config, ["CONFIG: no file", "confg.json", "train_config_tiny.json"]),
    ("a configuration that is no JSON", broken_config, ["broken.json", "line 1 column"]),
    ("a warmup beyond the end", keys(warmup_steps=7), ["warmup_steps 7, max_steps 6", "longer than the run"]),
    (
        "a batch that does not divide",
        keys(train_batch_size_tokens=1000, gradient_accumulation_steps=None),
        ["train_batch_size_tokens: 1000 is not divisible", "896 or 1024"],
    ),
    (
        "rows that FP8 does not take",
        keys(per_device_train_batch_size=1, max_seq_length=40),
        ["per_device_train_batch_size 1, max_seq_length 40", "divisible by 16"],
    ),
    (
        "data that is not there",
        keys(data__sources={"text": "data/pretrian"}),
        ["data/pretrian does not exist", "train/prepare_data.py"],
    ),
    ("text that is not prepared", raw_text_as_data, ["text.txt is a file", "train/prepare_data.py"]),
    ("data whose preparation was cut short", unfinished_data, ["no manifest.json", "prepare_data.py"]),
    ("data that was not copied whole", shortened_data, [".ds has", "the manifest says", "prepare or copy"]),
    (
        "an evaluation split of less than a sample",
        keys(max_seq_length=2048, max_steps=6, per_device_train_batch_size=1),
        ["the eval split has", "one sample needs 2049", "--eval_fraction"],
    ),
    (
        "another tokenizer beside the data",
        another_tokenizer_beside_the_data,
        ["tokenizer.model is not the tokenizer that made the data", "put the tokenizer back"],
    ),
    (
        "sources of two tokenizers",
        sources_of_two_tokenizers,
        ["'mine' and 'theirs'", "different tokenizers", "prepare both with the same"],
    ),
    (
        "an evaluation set of another tokenizer",
        held_out_by_another_tokenizer,
        ["'text' and 'held_out'", "different tokenizers"],
    ),
    (
        "sources of two eval fractions",
        sources_of_two_eval_fractions,
        ["'theirs' and 'mine'", "--eval_fraction"],
    ),
    (
        "an evaluation set of a larger fraction",
        held_out_by_a_larger_fraction,
        ["'text' and 'held_out'", "0.5"],
    ),
    ("a weight of no source", keys(data__weights={"txet": 1}), ["data.weights: there is no source 'txet'"]),
    (
        "a model of fewer ids than the tokenizer",
        model_file(vocab_size=256),
        ["vocabulary of 512, the model one of 256", "vocab_size", "model's tokenizer"],
    ),
    (
        "samples longer than the model's positions",
        model_file(max_position_embeddings=32),
        ["max_seq_length 64", "max_position_embeddings 32"],
    ),
    ("a model that there is not", keys(model__config="hare"), ["model.config: 'hare'", "hare_1.1b", "tiny"]),
    ("a Llama folder", a_llama_folder, ["hf/config.json", "'llama'", "only mistral is supported"]),
    (
        "a misspelt key of the model",
        model_file(num_hiden_layers=2),
        ["num_hiden_layers", "num_hidden_layers"],
    ),
    (
        "heads that do not divide",
        model_file(num_attention_heads=3),
        ["num_attention_heads 3", "not a multiple of num_key_value_heads 2"],
    ),
    (
        "weights that are not there",
        keys(model__init_from="output/first/hf"),
        ["model.init_from: 'output/first/hf' is not a folder"],
    ),
    (
        "weights of another model",
        weights_of_another_model,
        ["model.init_from:", "another model: intermediate_size: 512 there, 256 in model.config"],
    ),
    (
        "weights that are cut off",
        weights_that_are_cut_off,
        ["model.init_from:", "hf/model.safetensors", "cut off", "copy or download it again"],
    ),
    ("a folder without weights", no_weights, ["model.init_from:", "has no weights", "such as a run's hf/"]),
    (
        "a checkpoint that was never committed",
        damaged_checkpoint,
        ["resume_from_checkpoint", "step-00000003 has no manifest.json", "give auto, never, or the path"],
    ),
    ("a package that is missing", tracker_that_is_not_installed, ['report_to "wandb"', "pip install"]),
    ("a file as output_dir", a_file_as_output, ["output_dir", "is not a folder", "choose another folder"]),
    ("prepared data as output_dir", data_as_output, ["output_dir", "prepared data", "choose another folder"]),
    ("an export as output_dir", export_as_output, ["is a checkpoint, an export", "--resume_from_checkpoint"]),
    (
        "somebody's own model where the run's will be",
        export_of_somebody_else,
        ["output_dir", "hf exists and is no export", "in the end", "move it away, or choose another"],
    ),
    ("a link there", export_by_a_link, ["output_dir", "hf is a link", "in the end", "move it away"]),
    (
        "somebody else's folder",
        output_of_somebody_else,
        ["output_dir", "cannot be written", "choose another"],
    ),
    (
        "somebody else's checkpoints",  # as if there were none, the run would begin anew
        part_of_somebody_else("checkpoints", os.R_OK),
        ["run/checkpoints cannot be read by this user", "give another folder"],
    ),
    (
        "one of somebody else's",
        part_of_somebody_else("checkpoints/step-00000004", os.R_OK),
        ["checkpoints/step-00000004 cannot be read by this user"],
    ),
    (
        "checkpoints that may only be read",  # the first save would be the end
        part_of_somebody_else("checkpoints", os.W_OK),
        ["output_dir", "run/checkpoints cannot be written", "choose another"],
    ),
    (
        "metrics that may only be read",
        part_of_somebody_else("metrics.jsonl", os.W_OK),
        ["output_dir", "run/metrics.jsonl cannot be written", "choose another"],
    ),
    ("a second run in the same folder", second_run, ["run is in use by another run", "another output_dir"]),
    ("too little disk", little_disk, ["output_dir", "1.0 MB are free", "first save", "make room"]),
    (
        "a large model without a GPU",
        options("--model.config", "hare_1.1b"),
        ["model.config hare_1.1b: 1,123 M", "no CUDA device", "--precision.backend reference"],
    ),
    (
        "an attention that a CPU has not",
        keys(model__attention_backend="flash"),
        ['model.attention_backend "flash"', "torch's alone", "set it to auto"],
    ),
    (
        "Transformer Engine without a GPU",
        keys(precision__backend="transformer_engine"),
        ['precision.backend "transformer_engine"', "no CUDA device", "auto or reference"],
    ),
    ("fp16 without a GPU", keys(precision__compute="fp16"), ['precision.compute "fp16"', "bf16 or fp32"]),
    (
        "a model that no GPU here holds",
        huge_model,
        ["GPU memory", "7,242 M parameters at ZeRO 1 on 1 rank", "107.9 GiB", "80.0", "higher ZeRO stage"],
    ),
    (
        "what DeepSpeed is not to do",
        keys(deepspeed={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
        ["zero_optimization.offload_optimizer", "not supported", "remove it"],
    ),
]


@pytest.mark.parametrize(
    ("mistake", "words"), [row[1:] for row in MISTAKES], ids=[row[0].replace(" ", "_") for row in MISTAKES]
)
def test_a_mistake_is_told_at_once(
    world: World, mistake: Mistake, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = mistake(world) or []
    before, begun = world.content(), time.perf_counter()
    assert train.main([world.config(), *more]) == 2
    assert time.perf_counter() - begun < 5
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("error") == 1, out + err
    assert not [word for word in words if word not in err], err
    assert world.content() == before and (before or not world.output.is_dir())


def test_several_mistakes_come_in_one_message(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    keys(data__sources={"text": "data/pretrian"}, model__attention_backend="flash")(world)
    world.disk(1e6)
    assert train.main([world.config()]) == 2
    err = capsys.readouterr().err
    assert "3 problems keep this run from starting" in err and err.count("data/pretrian does not exist") == 1
    assert "model.attention_backend" in err and "no room for the first save" in err


@pytest.mark.parametrize(("rank", "looks"), [(0, 1), (1, 0)])
def test_one_of_the_ranks_looks_for_mistakes(
    world: World, monkeypatch: pytest.MonkeyPatch, rank: int, looks: int
) -> None:
    """Under torchrun or srun, where no launcher of ours has: of hundreds each would tell the same."""
    asked: list[int] = []
    monkeypatch.setattr(train.launchers, "rank", lambda: rank)
    monkeypatch.setattr(train, "check", lambda *_: asked.append(rank) or [])
    monkeypatch.setattr(
        train, "fail", lambda message, *_, **__: "goes on" if "was not seen" in message else 0
    )
    assert train.main([world.config()]) == "goes on"
    assert len(asked) == looks


# ---------------------------------------------------------------- by the launcher


def launched(world: World, *options: str) -> int:
    return launch.main([*options, str(launch.TRAIN), world.config()])


def test_the_launcher_checks_before_it_starts_ranks(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    keys(data__sources={"text": "data/pretrian"})(world)
    assert launched(world, "--nproc", "2") == 2
    assert capsys.readouterr().err.count("data/pretrian does not exist") == 1
    keys(data__sources={"text": str(world.others)})(world)
    world.devices(80, 80)
    assert launched(world, "--nproc", "4") == 2
    assert "4 ranks are to start on this node, and it has 2 CUDA devices" in capsys.readouterr().err
    assert check.CHECKED not in os.environ
    with pytest.raises(AssertionError, match="was not seen"):  # it goes on to start them
        launched(world, "--nproc", "2")
    assert os.environ.pop(check.CHECKED)  # so that rank 0 does not look again
    with pytest.raises(SystemExit) as end:
        launch.main(["--nproc", "1", str(ROOT / "train/trian.py"), world.config()])
    assert end.value.code == 2 and "trian.py: no such script" in capsys.readouterr().err


def test_processes_that_were_killed_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "COUNTERS", tmp_path / "vmstat")
    assert machine.memory_kills() == 0  # no Linux
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 7\n")
    assert machine.memory_kills() == 7


@pytest.mark.interpreter
def test_cuda_devices_are_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(name: str) -> None:
        raise OSError

    monkeypatch.setattr(machine.ctypes, "CDLL", no_driver)
    assert machine.cuda_devices() == []
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(machine, "QUERY", "print(5); print(7)")
    assert machine.cuda_devices() == [5, 7]
    monkeypatch.setattr(machine, "QUERY", "print(5); raise SystemExit(1)")
    assert machine.cuda_devices() is None  # not known: nothing is refused


NOTHING_HEAVY = """
import sys
from train import launch, train
for main, words in ((launch.main, ["--nproc", "2", str(launch.TRAIN)]), (train.main, [])):
    assert main([*words, *sys.argv[1:]]) == 2
print([name for name in ("torch", "transformers", "deepspeed", "pandas") if name in sys.modules])
"""


@pytest.mark.interpreter
def test_what_is_wrong_is_found_without_torch(world: World) -> None:
    """Also that a model is too large, or has no room: in a second, and before the next 3 GB are in memory."""
    keys(data__sources={"text": "data/pretrian"}, model__config="hare_1.1b")(world)
    keys(deepspeed="ds_config_zero3.json", model__init_from=hf_folder(world))(world)
    done = subprocess.run(
        [sys.executable, "-c", NOTHING_HEAVY, world.config()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr
    assert done.stderr.count("data/pretrian does not exist") == 2 and "another model" in done.stderr
