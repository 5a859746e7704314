"""Prepare text for training: read the options, resume unfinished work, run the pipelines, and write the manifest."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document

from model.hf_folder import local_folder
from train.data.encoder import TextEncoder
from train.data.format import SPLITS, TOKENIZER_FOLDER, DataError, Manifest, Shard, count, token_dtype
from train.files import write_durably
from train.prepare.corpus import WORK_NAME, Source, list_sources, read_share
from train.prepare.dedup import remove_duplicates, search_duplicates, write_signatures
from train.prepare.executors import Pipeline, run_local, run_slurm
from train.prepare.filters import StepOptions, build_index, filter_documents, find_step_options, read_report
from train.prepare.output import IDENTITY_NAME, OutputFolder, SplitWriter
from train.prepare.readers import Damaged, Dropped
from train.prepare.tally import Tally
from train.prepare.tokenizer import check_tokenizer, copy_tokenizer, sample_sources

logger = logging.getLogger(__name__)
TASK_BYTES = 16 << 20  # input bytes per task; does not depend on the host, so all hosts write the same shards
MAX_TASKS = 1000
WORK_VERSION = 2  # version of the work folder's format; unfinished work of another version is not resumed
INDEX_FOLDER, DEDUP_FOLDER = "scratch/decontaminate", "scratch/dedup"  # in the work folder
BATCH_DOCUMENTS = 16  # number of documents encoded at a time; even books of several MB then fit into memory

load_encoder = lru_cache(1)(TextEncoder)  # loads the tokenizer once per process


def cut_for_eval(text: str, eval_fraction: float) -> tuple[str, str]:
    """Cut off the end of a text for the eval split: at a line end if possible, or else at a space, or else anywhere.

    Returns:
        The beginning and the end. The end has between `eval_fraction` and twice `eval_fraction` of the characters. The
        end is empty if the text is too short to be cut.
    """
    length = len(text.rstrip())
    most = min(round(length * (1 - eval_fraction)), length - 1)
    for mark in ("\n", " ", ""):
        at = text.rfind(mark, 0, most) + 1 if mark else most
        if length - at <= 2 * (length - most) and text[:at].strip():
            return text[:at], text[at:]
    return text, ""


def read_results(
    results: Path, tasks: int, vocab_size: int
) -> tuple[Tally, list[Shard], dict[str, np.ndarray]]:
    """Read and add up the results that `Preparation.write` wrote for each task.

    Returns:
        The document counts; the shards, ordered by split and then by task; for each split, how often each token id
        occurs, [vocab_size].

    Raises:
        OSError: if the results of a task are missing.
    """
    tally, shards = Tally(), []
    counts = {split: np.zeros(vocab_size, dtype=np.int64) for split in SPLITS}
    for rank in range(tasks):
        values = json.loads((results / f"{rank:05d}.json").read_text(encoding="utf-8"))
        tally.add(Tally.from_json(values["tally"]))
        shards += [Shard(**shard) for shard in values["shards"]]
        with np.load(results / f"{rank:05d}.npz") as found:
            for split in SPLITS:
                counts[split] += found[split]
    shards.sort(key=lambda shard: SPLITS.index(shard.split))  # the sort is stable and keeps the task order
    return tally, shards, counts


@dataclass(frozen=True)
class Preparation:
    """The inputs and options of a data preparation. They determine every byte of the output files.

    Attributes:
        inputs: the inputs as given on the command line.
        sources: the files found in the inputs.
        tokenizer_is: everything that determines the token ids: the hash of the tokenizer's main file, the BOS id and
            the EOS id. Other tokenizer files can define BOS and EOS.
        eval_by: "position" to use the end of each document for evaluation, or None to choose whole documents by a hash.
        split_on: separator between the documents in .txt files, or None.
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
    tasks: int
    steps: StepOptions

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> Preparation:
        """Build the preparation from the parsed command line of prepare_data.py.

        Raises:
            ValueError: if the inputs, the tokenizer or the options are invalid.
        """
        tokenizer = Path(local_folder(str(args.tokenizer), weights=False)).absolute()
        # Load the tokenizer before listing the inputs, which can be slow.
        encoder = load_encoder(str(tokenizer))
        steps = find_step_options(args)
        sources = list_sources(args.input, args.split_on)
        eval_by = args.eval_by if args.eval_fraction < 1 else "hash"  # with 1, documents are not cut
        if eval_by is None and args.split_on is None and len(sources) == 1 and sources[0].is_text:
            eval_by = "position"  # a hash would assign the only document to one split
            logger.info(
                f"the input is a single text, so the last {args.eval_fraction:.2%} of this text is used as the eval "
                "split (--eval_by position)"
            )
        size = sum(source.bytes for source in sources)
        return cls(
            inputs=tuple(args.input),
            sources=tuple(sources),
            tokenizer=tokenizer,
            tokenizer_is=(encoder.sha256, encoder.bos_id, encoder.eos_id),
            output=Path(args.output).absolute(),
            text_key=args.text_key,
            eval_fraction=args.eval_fraction,
            eval_by=None if eval_by == "hash" else eval_by,
            split_on=args.split_on,
            shard_tokens=args.shard_tokens,
            tasks=args.tasks or min(max(math.ceil(size / TASK_BYTES), 1), MAX_TASKS),
            steps=steps,
        )

    def work(self, name: str) -> Path:
        """Return the path of a file or folder in the work folder, which exists until the manifest is written."""
        return self.output / WORK_NAME / name

    def identity(self) -> dict[str, Any]:
        """Return all inputs and options that affect the output, as JSON values."""
        values = asdict(self) | {"version": WORK_VERSION, "tokenizer": self.tokenizer_is}
        del values["output"], values["tokenizer_is"]
        return json.loads(json.dumps(values))

    def encoder(self) -> TextEncoder:
        """Load the copy of the tokenizer in the work folder, which `begin` makes because the original may change."""
        return load_encoder(str(self.work(TOKENIZER_FOLDER)))

    def read(self, task: int, tally: Tally) -> Iterator[Document]:
        """Yield the input documents of one task. The `id` of a document is its file and line.

        With --eval_by position, each document is cut into a train and an eval document, whose metadata contain the
        split.
        """
        for item in read_share(self.sources, self.text_key, task, self.tasks, self.split_on):
            if isinstance(item, Dropped):
                tally.drop(item)
            elif isinstance(item, Damaged):
                tally.damage(item)
            elif self.eval_by is None:
                tally.read += 1
                yield Document(text=item.text, id=item.where)
            else:
                for split, text in zip(SPLITS, cut_for_eval(item.text, self.eval_fraction), strict=True):
                    if text:
                        tally.read += 1
                        yield Document(text=text, id=item.where, metadata={"split": split})

    def write(self, documents: Iterator[Document], task: int, tally: Tally) -> None:
        """Tokenize the documents of one task, and write them to shards.

        The counts of the task are written to TASK.json and TASK.npz in the results folder. If a task runs again, it
        overwrites its files with identical files.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tasks already use all cores
        encoder, results = self.encoder(), self.work("results")
        results.mkdir(parents=True, exist_ok=True)
        writer = SplitWriter(self.work("new"), encoder.vocab_size, self.eval_fraction, self.shard_tokens,
                             f"{task:05d}_")  # fmt: skip
        dtype = token_dtype(encoder.vocab_size)
        while batch := list(islice(documents, BATCH_DOCUMENTS)):
            texts = [document.text for document in batch]
            contents = list(map(str.encode, texts))
            tally.kept += len(batch)
            tally.text_bytes += sum(map(len, contents))
            encoded = [[encoder.bos_id, *ids, encoder.eos_id] for ids in encoder.encode_batch(texts)]
            splits = [document.metadata.get("split") for document in batch]
            writer.write([np.array(ids, dtype) for ids in encoded], contents, splits)
        shards = [asdict(shard) for shard in writer.close()]
        np.savez_compressed(results / f"{task:05d}.npz", **writer.counts)  # type: ignore[arg-type]
        values = {"tally": vars(tally), "shards": shards}
        write_durably(results / f"{task:05d}.json", json.dumps(values) + "\n")

    def filtered(self, task: int, tally: Tally) -> Iterator[Document]:
        """Yield the documents of one task that remain after all filters."""
        return filter_documents(self.read(task, tally), self.steps, self.work(INDEX_FOLDER), tally)

    def write_signatures(self, task: int) -> None:
        """Run a task of the first deduplication pipeline, which writes the duplicate signatures of the documents."""
        documents = self.filtered(task, Tally())  # counted in the last pipeline, which filters again
        write_signatures(documents, str(self.steps.dedup), self.steps.seed, self.work(DEDUP_FOLDER), task)

    def search_duplicates(self, task: int) -> None:
        """Run the only task of the second deduplication pipeline, which finds the duplicates of all tasks."""
        search_duplicates(self.work(DEDUP_FOLDER), self.tasks)

    def tokenize(self, task: int) -> None:
        """Run a task of the last pipeline, which writes the shards."""
        tally = Tally()
        documents = self.filtered(task, tally)
        if self.steps.dedup:
            documents = remove_duplicates(documents, self.steps.dedup, self.work(DEDUP_FOLDER), task, tally)
        self.write(documents, task, tally)

    def pipelines(self) -> list[Pipeline]:
        """Return the pipelines in the order in which they run."""
        tokenize = Pipeline("tokenize", self.tasks, self.tokenize)
        if not self.steps.dedup:
            return [tokenize]
        return [
            Pipeline("duplicate_signatures", self.tasks, self.write_signatures),
            Pipeline("duplicate_search", 1, self.search_duplicates),
            tokenize,
        ]

    def begin(self, output: OutputFolder, max_dropped: int) -> None:
        """Start the preparation, or resume unfinished work with the same inputs and options.

        A new preparation checks the tokenizer on a sample of the texts, and records its inputs and options in the work
        folder.

        Raises:
            DataError: if --text_key, the tokenizer or an evaluation file is not usable, or the folder contains
                unfinished work with other inputs or options and --overwrite is not set.
        """
        path, now = self.work(IDENTITY_NAME), self.identity()
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            changed = [key for key in now if before.get(key) != now[key]]
            if not changed:
                return
            if not output.overwrite:
                raise DataError(
                    f"{self.output} contains an unfinished preparation that used other inputs or options "
                    f"({', '.join(changed)}). To resume this preparation, pass the values in {path}. To discard "
                    "it, pass --overwrite",
                    code="other_preparation",
                    key=changed[0],
                )
            output.restart()
        texts = sample_sources(self.sources, self.text_key, self.split_on, max_dropped)
        check = check_tokenizer(output.encoder, texts)
        copy_tokenizer(output.encoder, self.work(TOKENIZER_FOLDER))
        if self.steps.decontaminate:
            build_index(self.steps, self.work(INDEX_FOLDER))
        # This file makes the work resumable. It is written after all checks have passed.
        write_durably(path, json.dumps(now | {"tokenizer_check": check}, indent=1) + "\n")

    def finish(self, output: OutputFolder, max_dropped: int, max_damaged_files: int) -> Manifest:
        """Check the results of all tasks, move the shards to the output folder, and write the manifest.

        Raises:
            DataError: if an input changed during the preparation, more documents were dropped or more files were
                damaged than allowed, no document is left, or a split is empty.
        """
        output.encoder = self.encoder()
        paths = [(source, Path(source.path)) for source in self.sources]
        if changed := [
            path
            for source, path in paths
            if not path.exists() or Source.from_path(path, source.kind) != source
        ]:
            raise DataError(
                f"{count(len(changed), 'input file')} changed or disappeared during the preparation, such as "
                f"{changed[0]}. Run the command again with --overwrite when all input files are complete",
                code="input_changed",
                key=str(changed[0]),
            )
        tally, shards, counts = read_results(self.work("results"), self.tasks, output.encoder.vocab_size)
        documents = tally.documents()
        tally.check(max_dropped, max_damaged_files, " with --overwrite")
        steps = asdict(self.steps)
        if self.steps.decontaminate:
            steps["evaluation_files"] = read_report(self.work(INDEX_FOLDER))
        for name in ("eval_by", "split_on"):
            if (value := getattr(self, name)) is not None:
                steps[name] = value
        steps["tokenizer_check"] = json.loads(self.work(IDENTITY_NAME).read_text("utf-8"))["tokenizer_check"]
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


def prepare(args: argparse.Namespace) -> Manifest:
    """Convert the input texts to token shards in the output folder, and return their manifest.

    Args:
        args: the parsed command line of prepare_data.py.

    Raises:
        DataError: if the inputs, the tokenizer or the output folder is invalid, or more documents were dropped or more
            files were damaged than allowed.
        PreparationError: if a worker process died, or srun failed.
    """
    preparation = Preparation.from_arguments(args)
    output = OutputFolder(preparation.output, load_encoder(str(preparation.tokenizer)), args.overwrite)
    with output.open(resumable=True):
        preparation.begin(output, args.max_dropped)
        run = run_slurm if args.executor == "slurm" else run_local
        run(preparation.pipelines(), preparation.work("stages"), args.workers)
        return preparation.finish(output, args.max_dropped, args.max_damaged_files)
