"""A preparation as a whole: what it is made of, what it may go on from, how its stages are run, its manifest."""

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
from train.files import naming, write_durably
from train.prepare.blocks import ReadDocuments, WriteShards, encoder_of, read_results
from train.prepare.corpus import SLURM_NAME, WORK_NAME, Source, list_sources
from train.prepare.executors import need_slurm, run_local, run_ray, running_slurm, submit_slurm
from train.prepare.output import IDENTITY_NAME, OutputFolder
from train.prepare.steps import StepOptions, filters, options_of, passes, removal, report
from train.prepare.tally import Stage, Tally
from train.prepare.tokenizer import check_tokenizer, copy_tokenizer, report_lines, sample_sources

logger = logging.getLogger(__name__)
LAST_STAGE = "tokenize"
TASK_BYTES = 16 << 20  # of input, by which the number of tasks is chosen: it must not depend on the machine
MOST_TASKS = 1000
JOBS_NAME = "jobs.txt"
TOKENIZER_CHECK = "tokenizer_check.json"  # in the work folder: what check_tokenizer found


@dataclass(frozen=True)
class Preparation:
    """What is prepared from what, and how. The same one gives the same bytes, however its tasks are run.

    `inputs` as they were given; `sources`, the files behind them. max_bytes: of text, over all tasks. eval_by:
    "position", or None for the hash of a document. split_on: of .txt, or None. tokenizer_is: what the ids depend on,
    see `_what_is`.
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
        """The one that the command line asks for.

        Raises:
            ValueError: inputs, tokenizer or options that cannot be meant.
        """
        tokenizer = Path(local_folder(str(args.tokenizer), weights=False)).absolute()
        encoder = encoder_of(str(tokenizer))  # may be wrong, and to list the inputs may take long
        steps = options_of(args)
        sources = list_sources(args.input, args.split_on)
        eval_by = args.eval_by if args.eval_fraction < 1 else "hash"  # of all there is no end to cut off
        if eval_by is None and args.split_on is None and len(sources) == 1 and sources[0].is_text:
            eval_by = "position"  # a single document is in one split only
            logger.info(
                f"one text, so its last {args.eval_fraction:.2%} are the eval split (--eval_by position)"
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
        """A part of what is there until the manifest is: "new", "results", "stages", "scratch"."""
        return self.output / WORK_NAME / name

    def take_output(self, overwrite: bool = False) -> OutputFolder:
        return OutputFolder(self.output, encoder_of(str(self.tokenizer)), overwrite, resumable=True)

    def identity(self) -> dict[str, Any]:
        """Everything that the output depends on, as JSON values."""
        values = asdict(self)
        values["tokenizer"] = values.pop("tokenizer_is")
        del values["output"]
        return json.loads(json.dumps(values))

    def encoder(self) -> TextEncoder:
        """Return the tokenizer as it was when the preparation began: a copy, as the folder may change meanwhile."""
        return encoder_of(str(self.work(TOKENIZER_FOLDER)))

    def _unusual(self) -> dict[str, Any]:
        """What else the manifest has, where it was given."""
        names = ("eval_by", "split_on", "max_bytes", "shuffle_seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def begin(self, output: OutputFolder) -> None:
        """Try the tokenizer on a sample of the texts and note the identity in the work folder, or find that the same
        preparation was begun there.

        Raises:
            DataError: the tokenizer is refused. Or another preparation has completed tasks there, and `output` is not
                to be overwritten.
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
                    f"{self.output} holds an unfinished preparation of another kind:\n  "
                    + "\n  ".join(changed)
                    + "\nGive the former inputs and options to resume it, or --overwrite to start again",
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
        """How many tasks of the last stage are completed."""
        return sum(1 for _ in self.work("results").glob("*.json"))

    def stages(self) -> list[Stage]:
        """The stages in their order; the last one writes the shards."""
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
        """Commit what all tasks left. Logs what was dropped, removed and damaged first.

        Raises:
            DataError: an input has changed meanwhile, more documents were dropped or more files
                damaged than allowed, or no document is left, or a split is empty.
        """
        output.encoder = self.encoder()
        if changed := [source.path for source in self.sources if source.is_changed()]:
            raise DataError(
                f"{len(changed)} input files changed while they were read, the first is {changed[0]}; prepare them "
                "with --overwrite when they are what they shall be",
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
                f"--max_bytes {self.max_bytes} leaves no document: the first of each task is longer; raise it and "
                "--overwrite, or give a .txt --split_on",
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
    """What its ids depend on: the defining file as it was loaded, and the special ids, which another file chooses."""
    return encoder.loaded_sha256, encoder.bos_id, encoder.eos_id


def prepare(args: argparse.Namespace) -> Manifest | None:
    """Prepare `args.input` into `args.output`; see prepare_data.py's --help for the fields. None: Slurm will.

    Raises:
        DataError: bad inputs, tokenizer or output folder; more documents dropped, or files damaged, than
            allowed.
        PreparationError: a worker died, tasks failed, or Slurm does not tell whether it is at work.
    """
    preparation = Preparation.of(args)
    if _is_on_its_way(preparation):
        return None
    with naming(preparation.output), preparation.take_output(args.overwrite) as output:
        preparation.begin(output)
        if args.executor == "local":
            workers = args.workers or min(os.cpu_count() or 1, 16)
            run_local(preparation.stages(), preparation.work("stages"), workers)
        elif args.executor == "ray":
            run_ray(preparation.stages(), preparation.work("stages"), args.workers or -1)
        if args.executor != "slurm" or preparation.tasks_done() == preparation.tasks:
            return preparation.finish(output, args.max_dropped, args.max_damaged_files)
    _submit(preparation, args)  # its jobs take the folder themselves
    return None


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for each part of the identity that has changed."""
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    return [
        "sources: other files, or changed ones"
        if key == "sources"
        else f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in changed
    ]


# ---------------------------------------------------------------- Slurm


class Finish(PipelineStep):
    """The end of a preparation as a stage of its own, for jobs that end when nobody waits for them."""

    type, name = "MANIFEST", "finish"

    def __init__(self, preparation: Preparation, max_dropped: int, max_damaged_files: int) -> None:
        super().__init__()
        self.preparation, self.max_dropped = preparation, max_dropped
        self.max_damaged_files = max_damaged_files

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:  # type: ignore[override]
        with self.preparation.take_output() as output:
            self.preparation.finish(output, self.max_dropped, self.max_damaged_files)


def _is_on_its_way(preparation: Preparation) -> bool:
    """Whether jobs of an earlier call still wait or run, which it says."""
    ids = preparation.output / SLURM_NAME / JOBS_NAME
    running = running_slurm(ids.read_text(encoding="utf-8").split() if ids.exists() else [])
    if running:
        print(
            f"on its way: {len(running)} jobs wait or run ({', '.join(running)}); {preparation.tasks_done()} of "
            f"{preparation.tasks} tasks are done. For another preparation end them first: scancel {' '.join(running)}"
        )
    return bool(running)


def _submit(preparation: Preparation, args: argparse.Namespace) -> None:
    """Submit the stages, the last of which writes the manifest. No job of an earlier call waits or runs."""
    # where it is not, nothing is known of earlier jobs, and their records stay
    need_slurm(preparation.output)
    records = preparation.output / SLURM_NAME
    shutil.rmtree(records, ignore_errors=True)  # of an earlier preparation, or attempt
    records.mkdir()
    stages = [(stage, preparation.work("stages") / stage.name) for stage in preparation.stages()]
    # the last one removes the work folder: its own records cannot be in there
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
    print(f"submitted {len(jobs)} jobs: {', '.join(jobs)}. {preparation.output / 'manifest.json'} is there when the "
          "last has ended; the same command again shows how far it is, and after a failure goes on")  # fmt: skip
