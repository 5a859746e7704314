#!/usr/bin/env python3
"""Generate text in FP8 with a trained Mistral, Llama or Qwen3 model.

    python fp8_inference_demo/fp8_inference.py --model output/run --prompt "import os"
    python fp8_inference_demo/fp8_inference.py --model FOLDER --prompt_file prompt.txt --num_samples 3
    python fp8_inference_demo/fp8_inference.py --model FOLDER --prompts IN.jsonl --output OUT.jsonl
    python fp8_inference_demo/fp8_inference.py --model FOLDER < LINES     # one prompt per line

FOLDER is one of these: a Hugging Face folder with a model in bf16 or FP8 (train/export.py --format hf-fp8), the
output_dir of a training run, or org/name, a model on the Hugging Face Hub.

Text is streamed to standard output. Messages go to standard error. On a terminal, the prompt is printed before its
continuation, and control characters are escaped (\\x1b). A pipe or a file receives only the unchanged continuation.

--prompts reads JSON objects {"prompt": "..."}, one per line. Other keys are copied. --output receives each object with
the additional key "choices". This is a list with the "text", the "finish_reason" and the number of "tokens" for each
sample. finish_reason is "stop" after EOS or a stop string, and "length" after --max_new_tokens or at the end of the
context.

Exit status: 0 if all prompts were answered, 1 if a line of standard input could not be answered, 2 if an option or an
input is invalid, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import end_with_reader, require_packages

require_packages("decoding", "pydantic", "torch", "transformers")

from fp8_inference_demo import InferenceError
from model.errors import UserError
from model.hf_folder import local_folder
from model.keys import between, file_problem, unicode


def find_model_folder(given: Path) -> Path:
    """Return the Hugging Face folder for the value of --model: `given` itself, or its subfolder hf.

    Raises InferenceError if neither folder contains a config.json.
    """
    for folder in (given, given / "hf"):
        if (folder / "config.json").is_file():
            return folder
    if given.name.startswith("step-") or (given / "checkpoints").is_dir():
        command = shlex.join(["python", "train/export.py", str(given), f"{given}-hf"])
        raise InferenceError(
            f"--model {given} contains no exported model. To export the checkpoint, run {command}. Then pass --model "
            f"{given}-hf.",
            code="not_exported",
            key=str(given),
        )
    raise InferenceError(
        f"--model {given} does not exist, or contains neither config.json nor hf/config.json. Pass a Hugging Face "
        "folder, a run's output_dir, or org/name.",
        code="no_config_json",
        key=str(given),
    )


def temperature(text: str) -> float:
    """Parse --temperature. The limits keep logits / temperature finite in float32."""
    if not (value := float(text)) or 1e-6 <= value <= 100:
        return value
    raise argparse.ArgumentTypeError(
        f"{text} is invalid; use 0 for greedy decoding, or a value from 1e-6 to 100"
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(group: argparse._ActionsContainer, name: str, help: str, **options: object) -> None:
        default = options.get("default")
        shown = "" if default is None or default == [] else f"; default: {default}"
        group.add_argument(name, help=help + shown, **options)  # type: ignore[arg-type]

    add(
        parser,
        "--model",
        "Hugging Face folder with a Mistral, Llama or Qwen3 model, output_dir of a training run, or org/name on the "
        "Hub",
        type=Path,
        required=True,
    )
    task = parser.add_argument_group("task (default: one prompt per line of standard input)")
    task = task.add_mutually_exclusive_group()
    add(task, "--prompt", "prompt to continue", type=unicode)
    add(task, "--prompt_file", "UTF-8 text file that contains a single prompt to continue", type=Path)
    add(task, "--prompts", "JSON Lines file with prompts; requires --output", type=Path, metavar="FILE.jsonl")
    add(parser, "--output", "JSON Lines file to which the completions of --prompts are written", type=Path)

    text = parser.add_argument_group("text")
    add(text, "--max_new_tokens", "maximum number of new tokens per completion", type=between(1), default=128)
    add(
        text,
        "--temperature",
        "sampling temperature; 0 selects greedy decoding (always the most likely token)",
        type=temperature,
        default=0.8,
    )
    add(
        text,
        "--top_k",
        "sample only from the N most likely tokens; 0 allows all tokens",
        type=between(0),
        default=50,
    )
    add(
        text,
        "--top_p",
        "sample only from the smallest set of most likely tokens whose total probability reaches this value",
        type=between(1e-6, 1, float),
        default=1.0,
    )
    add(
        text,
        "--min_p",
        "drop tokens with a probability below this fraction of the highest probability",
        type=between(0, 1, float),
        default=0.0,
    )
    add(
        text,
        "--repetition_penalty",
        "repetition penalty; values above 1 make tokens that already occur in the text less likely",
        type=between(0.01, 100, float),
        default=1.0,
    )
    add(text, "--seed", "random seed for sampling", type=between(0), default=0)
    add(text, "--num_samples", "number of completions per prompt", type=between(1), default=1)
    add(
        text,
        "--stop",
        "end a completion where this text first occurs, and omit the text from the output; can be given more than "
        "once",
        type=unicode,
        action="append",
        default=[],
        metavar="STRING",
    )
    text.add_argument(
        "--ignore_eos",
        action="store_true",
        help="ignore the EOS token and continue until --max_new_tokens tokens are generated",
    )

    engine = parser.add_argument_group("engine")
    add(
        engine,
        "--precision",
        "precision of the weight matrices",
        choices=("fp8", "bf16", "fp32"),
        default="fp8",
    )
    add(
        engine,
        "--batch_size",
        "maximum number of samples per batch; default: 16",
        type=between(1),
    )
    add(
        engine,
        "--max_length",
        "context length in tokens (prompt plus generated tokens); default: the longest prompt plus --max_new_tokens, "
        "capped at the training sequence length, or at max_position_embeddings if the model folder does not record the "
        "training sequence length",
        type=between(2),
    )
    arguments = parser.parse_args(argv)
    if problem := option_problem(arguments):
        parser.error(problem)
    return arguments


def option_problem(arguments: argparse.Namespace) -> str:
    """Return an error message for the first invalid option or combination of options, or "" if all are valid."""
    if arguments.prompts and not arguments.output:
        return "--prompts requires a file for the completions; pass --output FILE.jsonl"
    if arguments.output and not arguments.prompts:
        return "--output requires --prompts; without --prompts, completions are printed to standard output"
    if arguments.output and (problem := file_problem(arguments.output)):
        return f"--output {arguments.output} {problem}"
    if "" in arguments.stop:
        return "--stop is an empty string; pass at least one character"
    return ""


def run(arguments: argparse.Namespace) -> int:
    """Run the task selected by the arguments and return the exit status.

    Raises UserError, ValueError or OSError for problems that the user can fix.
    """
    from fp8_inference_demo.text import read_text

    prompt = arguments.prompt
    name = "--prompt" if arguments.prompt_file is None else f"--prompt_file {arguments.prompt_file}"
    if arguments.prompt_file is not None:  # read the file before the imports, which take seconds
        prompt = read_text(arguments.prompt_file, name)
    folder = find_model_folder(Path(local_folder(str(arguments.model))))
    import torch

    from fp8_inference_demo.session import Session, answer_lines, complete_file

    session = Session(arguments, folder)
    try:
        if arguments.prompts is not None:
            complete_file(session, arguments.prompts, arguments.output)
        elif prompt is not None:
            session.answer_one(name, prompt)
        else:
            return 1 if answer_lines(session) else 0
    except torch.OutOfMemoryError as error:
        message = f"out of memory: {error} Use a smaller --batch_size or --max_length."
        raise InferenceError(message, code="out_of_memory", key="--batch_size") from error
    return 0


def main() -> int:
    try:
        with end_with_reader():
            return run(parse_arguments())
    except (UserError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
