#!/usr/bin/env python3
"""Generate text from a trained Mistral in FP8.

    python fp8_inference_demo/fp8_inference.py --model output/run --prompt "import os"
    python fp8_inference_demo/fp8_inference.py --model FOLDER --prompt_file prompt.txt --num_samples 3
    python fp8_inference_demo/fp8_inference.py --model FOLDER --prompts IN.jsonl --output OUT.jsonl
    python fp8_inference_demo/fp8_inference.py --model FOLDER --interactive
    python fp8_inference_demo/fp8_inference.py --model FOLDER < LINES     # a prompt a line; blank lines are none

FOLDER is a Hugging Face Mistral folder, also one in FP8 (train/export.py --format hf-fp8), the output folder of a run,
or org/name, a model of the Hugging Face Hub. Text goes to standard output as it comes, everything else to standard
error. A terminal also gets the prompt, and control characters are escaped there (\\x1b); a pipe or a file gets the
continuation alone, unchanged.

--prompts: a line is {"prompt": "..."} with any other fields; the same line with "choices" goes to --output: for each
sample its text, finish_reason ("stop": EOS or a stop string; "length") and tokens.

--interactive: the model continues the text so far, all that was typed and answered; a line typed begins a new line.
Ctrl-C ends the answer, Ctrl-D or an empty line the session.

Exit status: 0 done; 1 a line of standard input got no answer; 2 for what has to be changed first; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("decoding", "pydantic", "torch", "transformers")

from fp8_inference_demo.errors import InferenceError
from model.errors import UserError
from model.hub import local_folder
from model.keys import between, why_no_file


def find_model_folder(given: Path) -> Path:
    """Return the Hugging Face folder that `given` is, or that the run `given` exported.

    Raises InferenceError: it is neither.
    """
    if not given.is_dir():
        message = (
            f"--model {given}: no such folder; give a Hugging Face folder, a run's output_dir or a hub id"
        )
        raise InferenceError(message, code="not_found", key=str(given))
    for folder in (given, given / "hf"):
        if (folder / "config.json").is_file():
            return folder
    if given.name.startswith("step-") or (given / "checkpoints").is_dir():
        command = shlex.join(["python", "train/export.py", str(given), f"{given}-hf"])
        raise InferenceError(
            f"--model {given}: checkpoints that are not exported; run {command}, then give {given}-hf",
            code="not_exported",
            key=str(given),
        )
    raise InferenceError(
        f"--model {given}: no config.json there nor in hf/; give a Hugging Face folder or a run's output_dir",
        code="no_config_json",
        key=str(given),
    )


def temperature(text: str) -> float:
    """An argparse type: 0, or what float32 can divide by."""
    if not (value := float(text)) or 1e-6 <= value <= 100:
        return value
    raise argparse.ArgumentTypeError(f"{text}: allowed is 0 (the likeliest token) or 1e-6 to 100")


def utf8(text: str) -> str:
    """An argparse type: text that UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not UTF-8; convert it, or use --prompt_file"
        ) from error
    return text


def stop_string(text: str) -> str:
    """The argparse type of --stop."""
    if not text:
        raise argparse.ArgumentTypeError("allowed is a text of one character or more")
    return utf8(text)


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
        "Hugging Face Mistral folder, a run's output_dir, or org/name on the Hub",
        type=Path,
        required=True,
    )
    task = parser.add_argument_group(
        "what to do; without any of these: --interactive on a terminal, else a prompt a line"
    )
    task = task.add_mutually_exclusive_group()
    add(task, "--prompt", "text to continue", type=utf8)
    add(task, "--prompt_file", "UTF-8 file with the text to continue", type=Path)
    add(task, "--prompts", "file with a prompt a line; needs --output", type=Path, metavar="FILE.jsonl")
    task.add_argument("--interactive", action="store_true", help="type prompts; with history")
    add(parser, "--output", "new file for the completions of --prompts", type=Path)

    text = parser.add_argument_group("text")
    add(text, "--max_new_tokens", "tokens to generate at most", type=between(1), default=128)
    add(text, "--temperature", "0: always the likeliest token", type=temperature, default=0.8)
    add(text, "--top_k", "only the likeliest tokens; 0: all", type=between(0), default=50)
    add(text, "--top_p", "only the likeliest up to this sum", type=between(1e-6, 1, float), default=1.0)
    add(
        text, "--min_p", "only those with this part of the best one's", type=between(0, 1, float), default=0.0
    )
    add(
        text,
        "--repetition_penalty",
        "above 1: what was said becomes unlikelier",
        type=between(0.01, 100, float),
        default=1.0,
    )
    add(text, "--seed", "of the drawing", type=between(0), default=0)
    add(text, "--num_samples", "completions of each prompt", type=between(1), default=1)
    add(
        text,
        "--stop",
        "text that ends a completion, and is not part of it; may be given several times",
        type=stop_string,
        action="append",
        default=[],
        metavar="STRING",
    )
    text.add_argument("--ignore_eos", action="store_true", help="go on to max_new_tokens")

    engine = parser.add_argument_group("engine")
    add(engine, "--precision", "of the matrices", choices=("fp8", "bf16", "fp32"), default="fp8")
    add(
        engine,
        "--batch_size",
        "samples at a time, at most; default: 16",
        type=between(1),
    )
    add(
        engine,
        "--max_length",
        "tokens of the context, prompt and completion; default: what the prompts need, at most the sequence length of "
        "the training, or the model's positions if the folder does not record that",
        type=between(2),
    )
    arguments = parser.parse_args(argv)
    tasks = (arguments.prompt, arguments.prompt_file, arguments.prompts)
    if all(task is None for task in tasks):
        if sys.stdin is None:
            parser.error("there is no standard input to read prompts from; give --prompt")
        arguments.interactive |= sys.stdin.isatty()
    if problem := option_problem(arguments):
        parser.error(problem)
    return arguments


def option_problem(arguments: argparse.Namespace) -> str:
    """Return what is wrong with options together, or ""."""
    if arguments.prompts and not arguments.output:
        return "--prompts: needs --output FILE.jsonl"
    if arguments.output and not arguments.prompts:
        return "--output: goes with --prompts; other text goes to standard output"
    if arguments.output and (why := why_no_file(arguments.output)):
        return f"--output {arguments.output} {why}"
    if arguments.num_samples > 1 and not arguments.temperature:
        return "--num_samples: with --temperature 0 all samples are equal; give a temperature"
    if arguments.num_samples > 1 and arguments.interactive:
        return "--num_samples: a conversation has one; leave it out, or give a --prompt"
    return ""


def run(arguments: argparse.Namespace) -> int:
    """Do what is asked for and return the exit status. Raises UserError, ValueError, OSError."""
    from fp8_inference_demo.text import read_text

    prompt = arguments.prompt
    name = "--prompt" if arguments.prompt_file is None else f"--prompt_file {arguments.prompt_file}"
    if arguments.prompt_file is not None:  # before the imports, which take seconds
        prompt = read_text(arguments.prompt_file, name)
    folder = find_model_folder(Path(local_folder(str(arguments.model))))
    import torch

    from fp8_inference_demo.interactive import answer_lines, converse
    from fp8_inference_demo.prompts import complete_file
    from fp8_inference_demo.session import Session

    session, failed = Session(arguments, folder), 0
    try:
        if arguments.prompts is not None:
            complete_file(session, arguments.prompts, arguments.output)
        elif prompt is not None:
            session.answer_one(name, prompt)
        elif arguments.interactive:
            failed = converse(session)
        else:
            failed = answer_lines(session)
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and "allocate memory" not in str(error):  # torch's words on a CPU
            raise
        what = str(error).split("\n")[0] or "no memory left"
        message = f"{what}; give a smaller --batch_size or --max_length"
        raise InferenceError(message, code="out_of_memory", key="--batch_size") from error
    return int(failed > 0)


def main() -> int:
    arguments = parse_arguments()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that is not UTF-8 shows what it can
        sys.stdout.reconfigure(errors="replace")
    try:
        return run(arguments)
    except BrokenPipeError:  # who read standard output has enough
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
