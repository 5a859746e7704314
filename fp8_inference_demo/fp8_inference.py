#!/usr/bin/env python3
"""Generate text with a trained Mistral model in FP8.

    python fp8_inference_demo/fp8_inference.py --model output/run --prompt "import os"
    python fp8_inference_demo/fp8_inference.py --model FOLDER --prompt_file prompt.txt --num_samples 3
    python fp8_inference_demo/fp8_inference.py --model FOLDER --prompts IN.jsonl --output OUT.jsonl
    python fp8_inference_demo/fp8_inference.py --model FOLDER --interactive
    python fp8_inference_demo/fp8_inference.py --model FOLDER < LINES     # one prompt per line; skips blank lines

FOLDER is a Hugging Face Mistral folder, in bf16 or FP8 (train/export.py --format hf-fp8), the output folder of a run,
or org/name, a model on the Hugging Face Hub. The text is streamed to standard output; all messages go to standard
error. On a terminal, the prompt is printed too, and control characters are escaped (\\x1b). A pipe or a file receives
only the unchanged continuation.

--prompts: each line is a JSON object {"prompt": "..."}, with any other fields. --output receives the same object with
"choices": the text, the finish_reason ("stop": EOS or a stop string; "length") and the tokens of each sample.

--interactive: the model continues the whole conversation, and each typed line starts a new line of it. Ctrl-C stops
the answer. Ctrl-D or an empty line ends the session.

Exit status: 0 done; 1 a line of standard input could not be answered; 2 the input must be fixed first; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import require_packages

require_packages("decoding", "pydantic", "torch", "transformers")

from fp8_inference_demo.errors import InferenceError
from model.errors import UserError
from model.hub import local_folder
from model.keys import between, file_problem, unicode


def find_model_folder(given: Path) -> Path:
    """Return the folder with config.json: `given`, or the hf/ folder of the run `given`.

    Raises InferenceError if there is none.
    """
    if not given.is_dir():
        message = (
            f"--model {given}: folder not found. Pass a Hugging Face folder, a run's output_dir or a Hub id."
        )
        raise InferenceError(message, code="not_found", key=str(given))
    for folder in (given, given / "hf"):
        if (folder / "config.json").is_file():
            return folder
    if given.name.startswith("step-") or (given / "checkpoints").is_dir():
        command = shlex.join(["python", "train/export.py", str(given), f"{given}-hf"])
        raise InferenceError(
            f"--model {given}: this checkpoint is not exported. Run {command}, then pass --model {given}-hf.",
            code="not_exported",
            key=str(given),
        )
    raise InferenceError(
        f"--model {given}: no config.json or hf/config.json. Pass a Hugging Face folder or a run's output_dir.",
        code="no_config_json",
        key=str(given),
    )


def temperature(text: str) -> float:
    """Parse --temperature: 0, or a value that float32 can divide by."""
    if not (value := float(text)) or 1e-6 <= value <= 100:
        return value
    raise argparse.ArgumentTypeError(f"{text}: use 0 (the most likely token) or a value from 1e-6 to 100")


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
        "Hugging Face Mistral folder, output_dir of a run, or org/name on the Hub",
        type=Path,
        required=True,
    )
    task = parser.add_argument_group(
        "task (default: --interactive on a terminal, otherwise one prompt per line of standard input)"
    )
    task = task.add_mutually_exclusive_group()
    add(task, "--prompt", "text to continue", type=unicode)
    add(task, "--prompt_file", "UTF-8 file with the text to continue", type=Path)
    add(task, "--prompts", "JSON Lines file of prompts; needs --output", type=Path, metavar="FILE.jsonl")
    task.add_argument("--interactive", action="store_true", help="continue a conversation that you type")
    add(parser, "--output", "new file for the completions of --prompts", type=Path)

    text = parser.add_argument_group("text")
    add(text, "--max_new_tokens", "maximum number of tokens to generate", type=between(1), default=128)
    add(text, "--temperature", "0: always the most likely token", type=temperature, default=0.8)
    add(text, "--top_k", "sample from this many most likely tokens; 0: all", type=between(0), default=50)
    add(
        text,
        "--top_p",
        "sample from the most likely tokens up to this total probability",
        type=between(1e-6, 1, float),
        default=1.0,
    )
    add(
        text,
        "--min_p",
        "drop tokens below this fraction of the highest probability",
        type=between(0, 1, float),
        default=0.0,
    )
    add(
        text,
        "--repetition_penalty",
        "values above 1 make tokens that already occurred less likely",
        type=between(0.01, 100, float),
        default=1.0,
    )
    add(text, "--seed", "random seed of the sampling", type=between(0), default=0)
    add(text, "--num_samples", "completions per prompt", type=between(1), default=1)
    add(
        text,
        "--stop",
        "text that ends a completion and is not part of it; can be repeated",
        type=unicode,
        action="append",
        default=[],
        metavar="STRING",
    )
    text.add_argument("--ignore_eos", action="store_true", help="continue after EOS up to --max_new_tokens")

    engine = parser.add_argument_group("engine")
    add(engine, "--precision", "precision of the matrices", choices=("fp8", "bf16", "fp32"), default="fp8")
    add(
        engine,
        "--batch_size",
        "maximum number of samples per batch; default: 16",
        type=between(1),
    )
    add(
        engine,
        "--max_length",
        "context length in tokens, prompt plus completion; default: the length that the prompts need, up to the "
        "sequence length of the training, or up to max_position_embeddings if the folder does not record it",
        type=between(2),
    )
    arguments = parser.parse_args(argv)
    tasks = (arguments.prompt, arguments.prompt_file, arguments.prompts)
    if all(task is None for task in tasks):
        arguments.interactive |= sys.stdin.isatty()
    if problem := option_problem(arguments):
        parser.error(problem)
    return arguments


def option_problem(arguments: argparse.Namespace) -> str:
    """Return which options do not fit together, or ""."""
    if arguments.prompts and not arguments.output:
        return "--prompts needs --output FILE.jsonl"
    if arguments.output and not arguments.prompts:
        return "--output is only for --prompts; other completions go to standard output"
    if arguments.output and (problem := file_problem(arguments.output)):
        return f"--output {arguments.output} {problem}"
    if "" in arguments.stop:
        return "--stop: the string is empty; pass at least one character"
    if arguments.num_samples > 1 and arguments.interactive:
        return "--num_samples: --interactive generates one answer; remove --num_samples, or pass --prompt"
    return ""


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen task and return the exit status.

    Raises UserError, ValueError or OSError for problems that the user can fix.
    """
    from fp8_inference_demo.text import read_text

    prompt = arguments.prompt
    name = "--prompt" if arguments.prompt_file is None else f"--prompt_file {arguments.prompt_file}"
    if arguments.prompt_file is not None:  # before the slow imports, which take seconds
        prompt = read_text(arguments.prompt_file, name)
    folder = find_model_folder(Path(local_folder(str(arguments.model))))
    import torch

    from fp8_inference_demo.interactive import answer_lines, hold_conversation
    from fp8_inference_demo.prompts import complete_file
    from fp8_inference_demo.session import Session

    session = Session(arguments, folder)
    try:
        if arguments.prompts is not None:
            complete_file(session, arguments.prompts, arguments.output)
        elif prompt is not None:
            session.answer_one(name, prompt)
        elif arguments.interactive:
            hold_conversation(session)
        else:
            return 1 if answer_lines(session) else 0
    except torch.OutOfMemoryError as error:
        message = f"{error}; use a smaller --batch_size or --max_length"
        raise InferenceError(message, code="out_of_memory", key="--batch_size") from error
    return 0


def main() -> int:
    arguments = parse_arguments()
    try:
        return run(arguments)
    except BrokenPipeError:  # the reader of standard output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
