#!/usr/bin/env python3
"""Text -> token shards with a manifest: `python train/prepare_data.py --input PATH... --tokenizer DIR --output DIR`.

A document becomes BOS + its tokens + EOS; text never yields special ids, so a literal "</s>" in it stays text. A
document goes to the eval split by a hash of its text: equal texts stay on one side. Documents that cannot be read are
counted by reason, and more of them than --max_dropped end the run with status 1 and no manifest.

The work is split into tasks, which datatrove runs on this machine, as Slurm jobs or on a Ray cluster (--executor). The
same inputs and options give the same bytes, whatever runs them; the same command again goes on after a crash.
"""

import argparse
import importlib.util
import math
import os
import shutil
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

if importlib.util.find_spec("datatrove") is None:
    sys.exit("error: preparing data needs packages of its own: pip install -r requirements-prep.txt")

from train.data.format import Manifest
from train.prepare.blocks import encoder_of, read_progress
from train.prepare.corpus import ALLOWED, list_sources
from train.prepare.executors import run_local, run_ray, running_slurm, submit_slurm
from train.prepare.job import Finish, Job, begin, finish
from train.prepare.output import OutputFolder
from train.prepare.steps import add_arguments, options_of
from train.prepare.tally import Stage

TASK_BYTES = 16 << 20  # of input, by which the number of tasks is chosen: it must not depend on the machine
MOST_TASKS = 1000
PROGRESS_S = 5.0
SLURM_NAME = "prepare_data.slurm"  # stays in the output folder: the ids of the jobs and the log of the last


def job_of(args: argparse.Namespace) -> Job:
    """The job that the command line asks for.

    Raises:
        ValueError: inputs, tokenizer or options that cannot be meant.
    """
    tokenizer = Path(args.tokenizer).absolute()
    encoder_of(str(tokenizer))  # a wrong one is an error before the inputs are listed, which may take long
    steps = options_of(args)
    sources = list_sources(args.input)
    size = sum(source.bytes for source in sources)
    return Job(
        inputs=tuple(args.input),
        sources=tuple(sources),
        tokenizer=tokenizer,
        output=Path(args.output).absolute(),
        text_key=args.text_key,
        eval_fraction=args.eval_fraction,
        max_bytes=args.max_bytes,
        shard_tokens=args.shard_tokens,
        shuffle_seed=args.shuffle_seed,
        tasks=args.tasks or min(max(math.ceil(size / TASK_BYTES), 1), MOST_TASKS),
        steps=steps,
    )


def prepare(args: argparse.Namespace) -> Manifest | None:
    """Prepare `args.input` into `args.output`; see the command's --help for the fields. None: Slurm will.

    Raises:
        ValueError: bad inputs, tokenizer, output folder (DataError), or more documents dropped than allowed.
        RuntimeError: a worker died, or tasks failed.
    """
    job = job_of(args)
    with OutputFolder(job.output, args.overwrite, resumable=True) as output:
        begin(job)
        if args.executor == "local":
            run_local(job.stages(), job.stage_folder, args.workers or _cores(), Progress(job).show)
        elif args.executor == "ray":
            run_ray(job.stages(), job.stage_folder, args.workers or -1)
        if read_progress(job.results, job.tasks)[0] == job.tasks:
            return finish(job, output, args.max_dropped)
    submit(job, args)  # its jobs take the folder themselves
    return None


def submit(job: Job, args: argparse.Namespace) -> None:
    """Submit the stages of the job, the last of which writes the manifest, unless they are on their way already."""
    records = job.output / SLURM_NAME
    ids = records / "jobs.txt"
    if running := running_slurm(ids.read_text(encoding="utf-8").split() if ids.exists() else []):
        done, tally, tokens = read_progress(job.results, job.tasks)
        print(f"on its way: {len(running)} jobs wait or run ({', '.join(running)}); {done} of {job.tasks} tasks done, "
              f"{tally.kept:,} documents, {tokens:,} tokens")  # fmt: skip
        return
    shutil.rmtree(records, ignore_errors=True)  # of an earlier preparation, or attempt
    records.mkdir()
    stages = [(stage, job.stage_folder / stage.name) for stage in job.stages()]
    # the last one removes the work folder: its own records cannot be in there
    stages.append((Stage("finish", [Finish(job, args.max_dropped)], 1), records))
    jobs = submit_slurm(
        stages, args.workers or -1, args.slurm_partition, args.slurm_time, dict(args.slurm_args)
    )
    ids.write_text("\n".join([*jobs, ""]), encoding="utf-8")
    print(f"submitted {len(jobs)} jobs: {', '.join(jobs)}. {job.output / 'manifest.json'} is there when the last has "
          "ended; the same command again shows how far it is, and after a failure goes on")  # fmt: skip


class Progress:
    """A line with the rate every few seconds on stderr."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.start_s = self.last_s = time.monotonic()
        _, _, self.before = read_progress(job.results, job.tasks)  # tokens of an earlier, unfinished run

    def show(self) -> None:
        now = time.monotonic()
        if now - self.last_s < PROGRESS_S:
            return
        self.last_s = now
        done, tally, tokens = read_progress(self.job.results, self.job.tasks)
        rate = (tokens - self.before) / (now - self.start_s) / 1e6
        print(
            f"{done} of {self.job.tasks} tasks, {tally.kept:,} documents, {tally.text_bytes / 1e6:,.1f} MB, "
            f"{tokens:,} tokens in {now - self.start_s:.0f} s ({rate:.2f} M tokens/s), "
            f"{tally.dropped.total():,} dropped, {tally.by_step.total():,} removed",
            file=sys.stderr,
            flush=True,
        )


def _cores() -> int:
    return min(os.cpu_count() or 1, 16)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; numbers outside their range are errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help=f"files and folders of {ALLOWED}")
    add("--tokenizer", required=True, help="a folder with tokenizer.model or tokenizer.json")
    add("--output", required=True, help="the folder to write")
    add("--text_key", default="text", help="key or column of the text (default: text)")
    add("--eval_fraction", type=float, default=0.01, help="held-out share of documents (0.01)")
    add("--max_dropped", type=int, default=0, help="unreadable documents to tolerate (0)")
    add(
        "--max_bytes",
        type=int,
        help="stop before the text exceeds this many bytes, an equal share in each task",
    )
    add("--shard_tokens", type=int, default=1 << 28, help="tokens a shard holds at most (2^28)")
    add(
        "--shuffle_seed",
        type=int,
        help="shuffle the documents of each shard, by a seed for each task; default: no",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace the prepared data in --output, or what is unfinished there",
    )
    cluster = parser.add_argument_group("how it is run")
    add = cluster.add_argument
    add("--executor", choices=("local", "slurm", "ray"), default="local", help="where the tasks run (local)")
    add("--tasks", type=int, help=f"parts of the work (one for {TASK_BYTES >> 20} MiB, at most {MOST_TASKS})")
    add("--workers", type=int, help="tasks at a time (local: one a core, at most 16; clusters: all)")
    add("--slurm_partition", default="", help="of the jobs; required for slurm")
    add("--slurm_time", default="24:00:00", help="limit of a task (24:00:00)")
    add(
        "--slurm_args",
        nargs="*",
        type=_key_value,
        default=[],
        metavar="KEY=VALUE",
        help="more options of sbatch",
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    for name, low, high in (("eval_fraction", 0, 0.5), ("max_dropped", 0, None), ("max_bytes", 1, None),
                            ("shard_tokens", 1, None), ("workers", 1, None), ("tasks", 1, None),
                            ("shuffle_seed", 0, None)):  # fmt: skip
        value = getattr(args, name)
        if value is not None and not (low <= value and (high is None or value <= high)):
            parser.error(f"--{name} {value}: allowed is {low} to {'any' if high is None else high}")
    if args.executor == "slurm" and not args.slurm_partition:
        parser.error("--executor slurm needs --slurm_partition (sinfo lists them)")
    return args


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: KEY=VALUE is expected, such as account=team")
    return key, value


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 when the data was committed (slurm: submitted), else 1 with the reason on stderr."""
    args = parse_arguments(argv)
    try:
        manifest = prepare(args)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if manifest is not None:
        summarize(manifest)
    return 0


def summarize(manifest: Manifest) -> None:
    """What was committed, on stdout."""
    counts = manifest.documents
    print(f"documents: {counts['in']:,} in, {counts['out']:,} out, {sum(counts['dropped'].values()):,} dropped, "
          f"{sum(counts['removed'].values()):,} removed")  # fmt: skip
    print("\n".join(manifest.split_lines()))


if __name__ == "__main__":
    sys.exit(main())
