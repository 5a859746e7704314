"""The data preparation from start to end: its options, resuming, running its stages, and writing the manifest."""

import argparse
import json
import logging
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep

from model.hub import local_folder
from train.data.encoder import TextEncoder
from train.data.format import MANIFEST_NAME, TOKENIZER_FOLDER, DataError, Manifest
from train.files import write_durably
from train.prepare.blocks import ReadDocuments, WriteShards, encoder_of, read_results
from train.prepare.corpus import SLURM_NAME, WORK_NAME, Source, list_sources
from train.prepare.executors import need_slurm, run_local, run_ray, running_slurm, submit_slurm
from train.prepare.output import IDENTITY_NAME, OutputFolder
from train.prepare.steps import StepOptions, filters, options_of, passes, removal, report
from train.prepare.tally import Stage, Tally
from train.prepare.tokenizer import check_tokenizer, copy_tokenizer, report_lines, sample_sources

logger = logging.getLogger(__name__)
LAST_STAGE = "tokenize"
TASK_BYTES = 16 << 20  # input bytes per task; the number of tasks must not depend on the machine
MOST_TASKS = 1000
JOBS_NAME = "jobs.txt"
TOKENIZER_CHECK = "tokenizer_check.json"  # in the work folder: the result of check_tokenizer


@dataclass(frozen=True)
class Preparation:
    """The inputs and options that determine the output. Equal preparations give the same bytes with every executor.

    Attributes:
        inputs: the inputs as given on the command line.
        sources: the files of these inputs.
        tokenizer_is: the properties of the tokenizer that determine the ids; see `_what_is`.
        eval_by: "position", or None to choose by a hash of the document.
        split_on: the separator of documents in .txt files, or None.
        max_bytes: the limit for the text, over all tasks.
    """

    inputs: tuple[str, ...]
    sources: tuple[Source, ...]
    tokenizer: Path
    tokenizer_is: tuple[str, int, int]
    output: Path
    text_key: str
    eval_fraction: float
    eval_by: str | None
    split_on: str | None
    max_bytes: int | None
    shard_tokens: int
    shuffle_seed: int | None
    tasks: int
    steps: StepOptions

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Preparation":
        """Build the preparation from the command line.

        Raises:
            ValueError: the inputs, the tokenizer or the options are invalid.
        """
        tokenizer = Path(local_folder(str(args.tokenizer), weights=False)).absolute()
        encoder = encoder_of(str(tokenizer))  # before the inputs, whose listing can be slow
        steps = options_of(args)
        sources = list_sources(args.input, args.split_on)
        eval_by = args.eval_by if args.eval_fraction < 1 else "hash"  # with 1 nothing is cut off
        if eval_by is None and args.split_on is None and len(sources) == 1 and sources[0].is_text:
            eval_by = "position"  # a hash would leave one split empty
            logger.info(
                f"a single text: its last {args.eval_fraction:.2%} become the eval split (--eval_by position)"
            )
        size = sum(source.bytes for source in sources)
        same = ("text_key", "eval_fraction", "split_on", "max_bytes", "shard_tokens", "shuffle_seed")
        return cls(
            inputs=tuple(args.input),
            sources=tuple(sources),
            tokenizer=tokenizer,
            tokenizer_is=_what_is(encoder),
            output=Path(args.output).absolute(),
            tasks=args.tasks or min(max(math.ceil(size / TASK_BYTES), 1), MOST_TASKS),
            steps=steps,
            eval_by=None if eval_by == "hash" else eval_by,
            **{name: getattr(args, name) for name in same},
        )

    def work(self, name: str) -> Path:
        """Return a subfolder of the work folder, which exists until the manifest is written.

        Args:
            name: "new", "results", "stages" or "scratch", or a file name.
        """
        return self.output / WORK_NAME / name

    def take_output(self, overwrite: bool = False) -> OutputFolder:
        return OutputFolder(self.output, encoder_of(str(self.tokenizer)), overwrite, resumable=True)

    def identity(self) -> dict[str, Any]:
        """Return everything that the output depends on, as JSON values."""
        values = asdict(self)
        values["tokenizer"] = values.pop("tokenizer_is")
        del values["output"]
        return json.loads(json.dumps(values))

    def encoder(self) -> TextEncoder:
        """Return the copy of the tokenizer that `begin` made; the original folder may have changed since."""
        return encoder_of(str(self.work(TOKENIZER_FOLDER)))

    def _unusual(self) -> dict[str, Any]:
        """Return the options that the manifest records only if they are set."""
        names = ("eval_by", "split_on", "max_bytes", "shuffle_seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def begin(self, output: OutputFolder) -> None:
        """Start the preparation, or resume it if the work folder belongs to the same preparation.

        A start checks the tokenizer on a sample of the texts and records the identity in the work folder.

        Raises:
            DataError: the tokenizer is refused, or the folder holds completed tasks of another preparation and
                --overwrite is not set.
        """
        path = self.work(IDENTITY_NAME)
        now = self.identity()
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            changed = _changes(before, now)
            if not changed and self.work(TOKENIZER_CHECK).exists():
                return
            is_begun = (
                any(self.work("stages").glob("*/completions/*")) or (self.output / MANIFEST_NAME).exists()
            )
            if changed and is_begun and not output.overwrite:
                raise DataError(
                    f"{self.output} holds an unfinished preparation with other inputs or options:\n  "
                    + "\n  ".join(changed)
                    + "\nUse the earlier inputs and options to resume it, or pass --overwrite to start again",
                    code="other_preparation",
                    key=changed[0].partition(":")[0],
                )
            if changed:
                output.begin_anew()
        check = check_tokenizer(output.encoder, sample_sources(self.sources, self.text_key, self.split_on))
        for line in report_lines(check):
            logger.warning(line)
        copy_tokenizer(output.encoder, self.work(TOKENIZER_FOLDER))
        write_durably(self.work(TOKENIZER_CHECK), json.dumps(check) + "\n")
        write_durably(path, json.dumps(now, indent=1) + "\n")

    def tasks_done(self) -> int:
        """Return the number of completed tasks of the last stage."""
        return sum(1 for _ in self.work("results").glob("*.json"))

    def stages(self) -> list[Stage]:
        """Return the stages in order; the last one writes the shards."""
        scratch, tally = self.work("scratch"), Tally()
        stages = passes(self.steps, scratch, self.tasks, ReadDocuments(self, Tally()))
        pipeline = [
            ReadDocuments(self, tally),
            *filters(self.steps, scratch, tally),
            *removal(self.steps, scratch, tally),
            WriteShards(self, tally),
        ]
        return [*stages, Stage(LAST_STAGE, pipeline, self.tasks)]

    def finish(self, output: OutputFolder, max_dropped: int, max_damaged_files: int) -> Manifest:
        """Log the losses, check them against the limits, and commit the results of all tasks.

        Raises:
            DataError: an input changed during the preparation, more documents were dropped or more files were damaged
                than allowed, no document is left, or a split is empty.
        """
        output.encoder = self.encoder()
        if changed := [source.path for source in self.sources if source.is_changed()]:
            raise DataError(
                f"{len(changed)} input files changed during the preparation; the first one is {changed[0]}. Run the "
                "command again with --overwrite when the files are final",
                code="input_changed",
                key=changed[0],
            )
        tally, shards, counts = read_results(self.work("results"), self.tasks, output.encoder.vocab_size)
        documents = tally.documents()
        if tally.dropped or tally.by_step or tally.damaged:
            logger.warning(tally.table())
        tally.check(max_dropped, max_damaged_files, " and run it again with --overwrite")
        if not tally.read and self.max_bytes is not None:
            raise DataError(
                f"--max_bytes {self.max_bytes} leaves no document, because the first document of each task is longer. "
                "Run again with a larger --max_bytes and --overwrite, or divide .txt files with --split_on",
                code="no_documents",
                key="--max_bytes",
            )
        return output.commit(
            shards,
            counts,
            inputs=list(self.inputs),
            text_key=self.text_key,
            eval_fraction=self.eval_fraction,
            documents=documents,
            text_bytes=tally.text_bytes,
            steps=asdict(self.steps)
            | report(self.steps, self.work("scratch"))
            | self._unusual()
            | {"tokenizer_check": json.loads(self.work(TOKENIZER_CHECK).read_text(encoding="utf-8"))},
        )


def _what_is(encoder: TextEncoder) -> tuple[str, int, int]:
    """Return what the ids depend on: the hash of the loaded defining file, the BOS id and the EOS id.

    The special ids are listed separately, because another file can define them.
    """
    return encoder.loaded_sha256, encoder.bos_id, encoder.eos_id


def prepare(args: argparse.Namespace) -> Manifest | None:
    """Prepare `args.input` into `args.output`.

    Args:
        args: the options of prepare_data.py.

    Returns:
        The manifest, or None if Slurm jobs were submitted or are still running.

    Raises:
        DataError: the inputs, the tokenizer or the output folder are invalid; more documents were dropped or more
            files were damaged than allowed.
        PreparationError: a worker died, tasks failed, or the state of the Slurm jobs is unknown.
    """
    preparation = Preparation.of(args)
    if _is_on_its_way(preparation):
        return None
    with preparation.take_output(args.overwrite) as output:
        preparation.begin(output)
        if args.executor == "local":
            workers = args.workers or min(os.cpu_count() or 1, 16)
            run_local(preparation.stages(), preparation.work("stages"), workers)
        elif args.executor == "ray":
            run_ray(preparation.stages(), preparation.work("stages"), args.workers or -1)
        if args.executor != "slurm" or preparation.tasks_done() == preparation.tasks:
            return preparation.finish(output, args.max_dropped, args.max_damaged_files)
    _submit(preparation, args)  # after releasing the folder: the jobs lock it themselves
    return None


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for each changed part of the identity."""
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    return [
        "sources: other or modified files"
        if key == "sources"
        else f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in changed
    ]


# ---------------------------------------------------------------- Slurm


class Finish(PipelineStep):
    """A stage that finishes the preparation, for Slurm, where the command does not wait for the jobs."""

    type, name = "MANIFEST", "finish"

    def __init__(self, preparation: Preparation, max_dropped: int, max_damaged_files: int) -> None:
        super().__init__()
        self.preparation, self.max_dropped = preparation, max_dropped
        self.max_damaged_files = max_damaged_files

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:  # type: ignore[override]
        with self.preparation.take_output() as output:
            self.preparation.finish(output, self.max_dropped, self.max_damaged_files)


def _is_on_its_way(preparation: Preparation) -> bool:
    """Return whether Slurm jobs of an earlier command are still pending or running; if so, print their state."""
    ids = preparation.output / SLURM_NAME / JOBS_NAME
    running = running_slurm(ids.read_text(encoding="utf-8").split() if ids.exists() else [])
    if running:
        print(
            f"in progress: {len(running)} jobs are pending or running ({', '.join(running)}); "
            f"{preparation.tasks_done()} of {preparation.tasks} tasks are done. To start another preparation, cancel "
            f"the jobs first: scancel {' '.join(running)}"
        )
    return bool(running)


def _submit(preparation: Preparation, args: argparse.Namespace) -> None:
    """Submit the stages and a last job that writes the manifest. No earlier job may be pending or running."""
    # first: without Slurm, the records of earlier jobs must not be deleted
    need_slurm(preparation.output)
    records = preparation.output / SLURM_NAME
    shutil.rmtree(records, ignore_errors=True)  # from an earlier preparation or attempt
    records.mkdir()
    stages = [(stage, preparation.work("stages") / stage.name) for stage in preparation.stages()]
    # the last job removes the work folder, so its own records are elsewhere
    finish = Finish(preparation, args.max_dropped, args.max_damaged_files)
    stages.append((Stage("finish", [finish], 1), records))
    jobs = submit_slurm(
        stages,
        args.workers or -1,
        args.slurm_partition,
        args.slurm_time,
        dict(args.slurm_args),
        records / JOBS_NAME,
    )
    print(f"submitted {len(jobs)} jobs: {', '.join(jobs)}. The last one writes {preparation.output / 'manifest.json'}. "
          "Run the same command again to see the progress, or to resume after a failure")  # fmt: skip
