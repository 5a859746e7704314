"""The data preparation from start to end: its options, resuming, running its pipelines, and writing the manifest."""

import argparse
import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep

from model.hub import local_folder
from train.data.encoder import TextEncoder
from train.data.format import TOKENIZER_FOLDER, DataError, Manifest
from train.files import write_durably
from train.prepare.blocks import ReadDocuments, WriteShards, load_encoder, read_results
from train.prepare.corpus import WORK_NAME, Source, list_sources
from train.prepare.dedup import DuplicateRemoval, DuplicateSearch, DuplicateSignatures
from train.prepare.executors import incomplete_tasks, run_local, run_ray, running_slurm, submit_slurm
from train.prepare.filters import find_step_options, make_filters
from train.prepare.ngrams import build_index, read_report
from train.prepare.output import IDENTITY_NAME, OutputFolder
from train.prepare.steps import StepOptions
from train.prepare.tally import Pipeline, Tally
from train.prepare.tokenizer import check_tokenizer, copy_tokenizer, sample_sources

logger = logging.getLogger(__name__)
TASK_BYTES = 16 << 20  # input bytes per task; the number of tasks must not depend on the machine
MAX_TASKS = 1000
WORK_VERSION = 2  # of the work folder; unfinished work of another version is not resumed
JOBS_NAME = "jobs.txt"  # in the work folder: the ids of the Slurm jobs
INDEX_FOLDER, DEDUP_FOLDER = "decontaminate", "dedup"  # in the scratch folder


@dataclass(frozen=True)
class Preparation:
    """The inputs and options that determine the output. Equal preparations give the same bytes with every executor.

    Attributes:
        inputs: the inputs as given on the command line.
        sources: the files of these inputs.
        tokenizer_is: what the ids depend on: the hash of the loaded defining file, and the BOS and EOS ids, which
            another file can define.
        eval_by: "position", or None to choose by a hash of the document.
        split_on: the separator of documents in .txt files, or None.
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
    shard_tokens: int
    shuffle_seed: int | None
    tasks: int
    steps: StepOptions

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "Preparation":
        """Build the preparation from the command line.

        Raises:
            ValueError: the inputs, the tokenizer or the options are invalid.
        """
        tokenizer = Path(local_folder(str(args.tokenizer), weights=False)).absolute()
        encoder = load_encoder(str(tokenizer))  # before the inputs, whose listing can be slow
        steps = find_step_options(args)
        sources = list_sources(args.input, args.split_on)
        eval_by = args.eval_by if args.eval_fraction < 1 else "hash"  # with 1 nothing is cut off
        if eval_by is None and args.split_on is None and len(sources) == 1 and sources[0].is_text:
            eval_by = "position"  # a hash would leave one split empty
            logger.info(
                f"a single text: its last {args.eval_fraction:.2%} become the eval split (--eval_by position)"
            )
        size = sum(source.bytes for source in sources)
        return cls(
            inputs=tuple(args.input),
            sources=tuple(sources),
            tokenizer=tokenizer,
            tokenizer_is=(encoder.loaded_sha256, encoder.bos_id, encoder.eos_id),
            output=Path(args.output).absolute(),
            text_key=args.text_key,
            eval_fraction=args.eval_fraction,
            eval_by=None if eval_by == "hash" else eval_by,
            split_on=args.split_on,
            shard_tokens=args.shard_tokens,
            shuffle_seed=args.shuffle_seed,
            tasks=args.tasks or min(max(math.ceil(size / TASK_BYTES), 1), MAX_TASKS),
            steps=steps,
        )

    def work(self, name: str) -> Path:
        """Return a file or subfolder of the work folder, which exists until the manifest is written."""
        return self.output / WORK_NAME / name

    def identity(self) -> dict[str, Any]:
        """Return everything that the output depends on, as JSON values."""
        values = asdict(self) | {"version": WORK_VERSION, "tokenizer": self.tokenizer_is}
        del values["output"], values["tokenizer_is"]
        return json.loads(json.dumps(values))

    def encoder(self) -> TextEncoder:
        """Return the copy of the tokenizer that `begin` made; the original folder may have changed since."""
        return load_encoder(str(self.work(TOKENIZER_FOLDER)))

    def begin(self, output: OutputFolder) -> list[Pipeline]:
        """Start the preparation, or resume it if the work folder belongs to the same preparation.

        A start checks the tokenizer on a sample of the texts and records the identity in the work folder.

        Returns:
            The pipelines.

        Raises:
            DataError: the tokenizer or an evaluation file is refused, or the folder holds unfinished work of another
                preparation and --overwrite is not set.
        """
        path, now = self.work(IDENTITY_NAME), self.identity()
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            changed = [key for key in now if before.get(key) != now[key]]
            if not changed:
                return self.pipelines()
            if not output.overwrite:
                raise DataError(
                    f"{self.output} holds an unfinished preparation with other inputs or options "
                    f"({', '.join(changed)}; the earlier ones are in {path}). Use the earlier ones to resume it, or "
                    "pass --overwrite to start again",
                    code="other_preparation",
                    key=changed[0],
                )
            output.restart()
        check = check_tokenizer(output.encoder, sample_sources(self.sources, self.text_key, self.split_on))
        copy_tokenizer(output.encoder, self.work(TOKENIZER_FOLDER))
        pipelines = self.pipelines()
        # last: a preparation that is refused leaves no work to resume
        write_durably(path, json.dumps(now | {"tokenizer_check": check}, indent=1) + "\n")
        return pipelines

    def pipelines(self) -> list[Pipeline]:
        """Return the pipelines in order; the last one writes the shards."""
        read, write = partial(ReadDocuments, self), partial(WriteShards, self)
        return make_pipelines(self.steps, self.work("scratch"), self.tasks, read, write)

    def finish(self, output: OutputFolder, max_dropped: int, max_damaged_files: int) -> Manifest:
        """Log the losses, check them against the limits, and commit the results of all tasks.

        Raises:
            DataError: an input changed during the preparation, more documents were dropped or more files were damaged
                than allowed, no document is left, or a split is empty.
        """
        output.encoder = self.encoder()
        paths = [(source, Path(source.path)) for source in self.sources]
        if changed := [
            path
            for source, path in paths
            if not path.exists() or Source.from_path(path, source.kind) != source
        ]:
            raise DataError(
                f"{len(changed)} input files changed during the preparation; the first one is {changed[0]}. Run the "
                "command again with --overwrite when the files are final",
                code="input_changed",
                key=str(changed[0]),
            )
        tally, shards, counts = read_results(self.work("results"), self.tasks, output.encoder.vocab_size)
        documents = tally.documents()
        tally.check(max_dropped, max_damaged_files, " with --overwrite")
        steps = asdict(self.steps)
        if self.steps.decontaminate:
            steps["evaluation_files"] = read_report(self.work("scratch") / INDEX_FOLDER)
        for name in ("eval_by", "split_on", "shuffle_seed"):
            if (value := getattr(self, name)) is not None:
                steps[name] = value
        begun = json.loads(self.work(IDENTITY_NAME).read_text(encoding="utf-8"))
        steps["tokenizer_check"] = begun["tokenizer_check"]
        return output.commit(
            shards,
            counts,
            inputs=list(self.inputs),
            text_key=self.text_key,
            eval_fraction=self.eval_fraction,
            documents=documents,
            text_bytes=tally.text_bytes,
            steps=steps,
        )


def make_pipelines(
    options: StepOptions,
    scratch: Path,
    tasks: int,
    read: Callable[[Tally], PipelineStep],
    write: Callable[[Tally], PipelineStep],
) -> list[Pipeline]:
    """Return the pipelines of a preparation. Also builds the index of the evaluation texts, immediately.

    Args:
        scratch: a folder that all tasks share.
        tasks: the number of tasks of each pipeline that reads the input.
        read, write: make the first block, and the last block of the last pipeline, with the tally of their pipeline.

    Raises:
        DataError: the evaluation texts cannot be read or are all too short.
    """
    index, duplicates = scratch / INDEX_FOLDER, scratch / DEDUP_FOLDER
    if options.decontaminate:
        build_index(options.decontaminate, options.decontaminate_key, options.decontaminate_ngram, index)
    tally, uncounted = Tally(), Tally()
    pipelines, blocks = [], [read(tally), *make_filters(options, index, tally)]
    if options.dedup:
        documents = [
            read(uncounted),
            *make_filters(options, index, uncounted),
        ]  # the last pipeline filters again
        signatures = DuplicateSignatures(duplicates, options.dedup, options.seed)
        pipelines = [
            Pipeline("duplicate_signatures", [*documents, signatures], tasks),
            Pipeline("duplicate_search", [DuplicateSearch(duplicates, tasks)], 1),
        ]
        blocks.append(DuplicateRemoval(duplicates, options.dedup, tally))
    return [*pipelines, Pipeline("tokenize", [*blocks, write(tally)], tasks)]


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
    preparation = Preparation.from_arguments(args)
    folder, ids = preparation.work("stages"), preparation.work(JOBS_NAME)
    if running := running_slurm(ids):
        results = sum(1 for _ in preparation.work("results").glob("*.json"))
        print(
            f"in progress: {len(running)} jobs are pending or running ({', '.join(running)}); {results} of "
            f"{preparation.tasks} tasks are complete. To start another preparation, cancel the jobs first: scancel "
            f"{' '.join(running)}"
        )
        return None
    output = OutputFolder(preparation.output, load_encoder(str(preparation.tokenizer)), args.overwrite)
    with output.open(resumable=True):
        pipelines = preparation.begin(output)
        if args.executor == "local":
            run_local(pipelines, folder, args.workers or min(os.cpu_count() or 1, 16))
        elif args.executor == "ray":
            run_ray(pipelines, folder, args.workers or -1)
        elif left := incomplete_tasks(pipelines[-1], folder):
            job = (args.slurm_partition, args.slurm_time, dict(args.slurm_args))
            jobs = submit_slurm(pipelines, folder, args.workers or -1, *job, ids)
            print(
                f"submitted {len(jobs)} jobs: {', '.join(jobs)}, for {len(left)} of {preparation.tasks} tasks. Run the "
                "same command again to see the progress, to resume after a failure, and to write the manifest"
            )
            return None
        return preparation.finish(output, args.max_dropped, args.max_damaged_files)
