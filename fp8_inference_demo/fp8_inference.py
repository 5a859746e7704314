#!/usr/bin/env python3
"""Generate text from a trained Mistral in FP8, with a key/value cache, streamed as it comes.

    python fp8_inference_demo/fp8_inference.py --model output/run --prompt "import os"
    python fp8_inference_demo/fp8_inference.py --model FOLDER --prompt_file prompt.txt --precision bf16
    python fp8_inference_demo/fp8_inference.py --model FOLDER            # a prompt a line, from standard input

FOLDER is a Hugging Face Mistral folder, or the output folder of a run. Text goes to standard output, everything else
to standard error. Blank lines are no prompts. With --precision fp8, a module that was to run FP8 and did not is an
error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.keys import between


def find_model_folder(given: Path) -> Path:
    """The Hugging Face folder that `given` is, or that the run `given` exported.

    Raises ValueError: neither; it says what to do.
    """
    if not given.is_dir():
        raise ValueError(f"--model {given}: no such folder; give a Hugging Face folder or a run's output_dir")
    for folder in (given, given / "hf"):
        if (folder / "config.json").is_file():
            return folder
    steps = [given] if given.name.startswith("step-") else sorted(given.glob("**/step-*"))
    if steps:
        out = given.with_name(f"{given.name}-hf") if steps == [given] else given / "hf"
        raise ValueError(
            f"--model {given}: checkpoints, and no exported model yet; export the one you want: "
            f"python train/export.py {steps[-1]} {out}"
        )
    raise ValueError(
        f"--model {given}: no config.json there nor in hf/; give a Hugging Face folder or a run's output_dir"
    )


def prompts(arguments: argparse.Namespace) -> Iterable[str]:
    """The prompts asked for: one, or standard input's lines as they come."""
    if arguments.prompt is not None:
        return [arguments.prompt]
    if arguments.prompt_file is not None:
        return [arguments.prompt_file.read_text(encoding="utf-8")]
    return _typed_prompts()


def _typed_prompts() -> Iterator[str]:
    """Lines that are not blank, up to the end of the input; on a terminal a blank one ends it, too."""
    terminal = sys.stdin.isatty()
    while True:
        if terminal:
            print("prompt (empty line: end)> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if line.strip():
            yield line.rstrip("\n")
        elif terminal or not line:
            return


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="Hugging Face Mistral folder, or a run's output_dir"
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text to continue")
    prompt.add_argument("--prompt_file", type=Path, help="UTF-8 file with the text to continue")
    parser.add_argument("--precision", choices=("fp8", "bf16", "fp32"), default="fp8", help="default: fp8")
    parser.add_argument(
        "--recipe",
        choices=("current", "block"),
        default="current",
        help="FP8 scaling, default current; delayed scaling needs the amax history of a training run",
    )
    parser.add_argument("--max_new_tokens", type=between(1), default=128, help="default: 128")
    parser.add_argument(
        "--temperature", type=between(0, kind=float), default=0.8, help="0: greedy; default: 0.8"
    )
    parser.add_argument("--top_k", type=between(0), default=50, help="likeliest tokens, 0: all; default: 50")
    parser.add_argument("--top_p", type=between(1e-6, 1, float), default=1.0, help="their sum; default: 1")
    parser.add_argument("--seed", type=between(0), default=0, help="of the drawing; default: 0")
    parser.add_argument("--ignore_eos", action="store_true", help="go on to max_new_tokens")
    return parser.parse_args(argv)


def generate(arguments: argparse.Namespace, folder: Path) -> int:
    """Answer every prompt; the exit status. Raises ValueError, OSError."""
    from fp8_inference_demo.generation import DemoError, Sampling, answer, load
    from model.fp8.precision import Precision
    from model.fp8.recipes import PrecisionConfig

    precision = Precision(PrecisionConfig(compute=arguments.precision, recipe=arguments.recipe))
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    generator = load(folder, precision, sampling, arguments.seed, arguments.ignore_eos)
    kind = "FP8" if precision.fp8 else arguments.precision
    print(f"{folder}: {kind} on {precision.device}, {precision.te.version}", file=sys.stderr)
    interactive = arguments.prompt is None and arguments.prompt_file is None
    failed = False
    for prompt in prompts(arguments):
        try:
            answer(generator, prompt, arguments.max_new_tokens)
        except DemoError as error:
            if not interactive:
                raise
            failed = True
            print(f"error: {error}", file=sys.stderr)
    return int(failed)


def main() -> int:
    arguments = parse_arguments()
    try:
        return generate(arguments, find_model_folder(arguments.model))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
