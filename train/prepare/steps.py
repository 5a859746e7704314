"""The optional filters of a preparation. Each one has a flag and decides which documents to keep.

    --languages       the language that fastText detects         datatrove's LanguageFilter (filters.py)
    --quality         heuristics of Gopher, C4 and FineWeb       datatrove's filters of these names (filters.py)
    --decontaminate   n-grams shared with evaluation sets        our own datatrove filter (ngrams.py)
    --dedup           exact or near duplicates                   subclasses of datatrove's blocks (dedup.py)

They run in this order, so deduplication sees only the documents that the filters kept. The result depends on the
documents and the options alone, not on the number of workers.

This module also defines the flags, so it imports datatrove only inside functions.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.keys import unicode
from train.data.format import DataError
from train.files import sha256_file
from train.prepare.corpus import check_name, list_sources
from train.prepare.tally import Stage, Tally

if TYPE_CHECKING:
    from datatrove.pipeline.base import PipelineStep

QUALITY = ("gopher_quality", "gopher_repetition", "c4", "fineweb")
DEDUP = ("exact", "minhash")
INDEX_FOLDER, DEDUP_FOLDER = "decontaminate", "dedup"  # in the scratch folder that all tasks share


@dataclass(frozen=True)
class StepOptions:
    """The enabled steps and everything that their result depends on.

    Attributes:
        languages: fastText language codes to keep; empty for no language filter.
        language_threshold: the score that one of these languages must exceed.
        language_model: path of a fastText model.
        quality: names from QUALITY, in the order in which they run.
        quality_language: the language whose rules split text into words and sentences.
        dedup: one of DEDUP, or None.
        seed: the seed of MinHash's hash functions.
        decontaminate: files with evaluation texts.
        decontaminate_key: the key of the text in their records.
        decontaminate_ngram: the length of the n-grams, in words.
        sha256: (file, hash) of the language model and of each evaluation file.
    """

    languages: tuple[str, ...] = ()
    language_threshold: float = 0.65
    language_model: str | None = None
    quality: tuple[str, ...] = ()
    quality_language: str = "en"
    dedup: str | None = None
    seed: int = 1
    decontaminate: tuple[str, ...] = ()
    decontaminate_key: str = "text"
    decontaminate_ngram: int = 13
    sha256: tuple[tuple[str, str], ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the optional steps to the command line."""
    add = parser.add_argument_group("optional steps").add_argument

    def add_list(name: str, text: str, **kind: Any) -> None:
        add(name, type=unicode, nargs="+", default=[], help=text, **kind)

    add_list("--languages", "keep only documents in these languages, such as en de", metavar="CODE")
    add(
        "--language_threshold",
        type=float,
        default=0.65,
        help="score that one of them must exceed (default: 0.65)",
    )
    text = "path of a fastText model such as lid.176.bin (default: download it once)"
    add("--language_model", type=unicode, metavar="FILE", help=text)
    text = "remove documents by these heuristics, in this order, with datatrove's defaults. c4 also removes lines, and "
    add_list("--quality", text + "documents with a curly bracket in a whole sentence", choices=QUALITY)
    text = (
        "language whose rules split text into words and sentences (default: en). gopher_quality requires its "
    )
    text += "English stop words only for en"
    add("--quality_language", default="en", metavar="CODE", help=text)
    text = "remove documents that share an n-gram of words with a text in these files. Each line of a .txt and each "
    text += "record of another format is one text; all formats of --input are accepted"
    add_list("--decontaminate", text, metavar="FILE")
    add(
        "--decontaminate_key",
        type=unicode,
        default="text",
        metavar="KEY",
        help="key of the text in the records of these files (default: text)",
    )
    text = "length of the n-grams in words (default: 13). Shorter evaluation texts are counted and ignored"
    add("--decontaminate_ngram", type=int, default=13, help=text)
    text = "remove duplicates and keep the first one. exact: identical documents; minhash: documents that share about "
    add(
        "--dedup",
        choices=DEDUP,
        help=text + "0.7 or more of their 5-grams of words, where all numbers count as equal",
    )
    add("--minhash_seed", type=int, default=1, help="random seed of MinHash's hash functions (default: 1)")


def options_of(args: argparse.Namespace) -> StepOptions:
    """Build the step options from the command line, and find or download the files that the steps need.

    Raises:
        DataError: a value is invalid, a file is missing, a package is not installed, the language model is not
            available, or a file name is not UTF-8.
    """
    _check_values(args)
    from train.prepare.filters import check_splitter, language_model

    model = language_model(args.languages, args.language_model) if args.languages else None
    if args.quality:
        check_splitter(args.quality_language)
    evaluation = [source.path for file in args.decontaminate for source in list_sources([file])]
    files = [*([model] if model else []), *evaluation]
    for file in files:  # folders can contain names that were not on the command line
        check_name("--language_model or --decontaminate", file)
    values: dict[str, Any] = {key.name: getattr(args, key.name, None) for key in fields(StepOptions)}
    values |= {name: tuple(values[name]) for name in ("languages", "quality", "decontaminate")}
    values["sha256"] = tuple((file, sha256_file(file)) for file in files)
    return StepOptions(**values | {"language_model": model, "seed": args.minhash_seed})


def _check_values(args: argparse.Namespace) -> None:
    """Check the values and raise one error that lists all problems."""
    problems: dict[str, str] = {}
    for name in ("languages", "quality", "decontaminate"):
        values = getattr(args, name)
        if twice := sorted({value for value in values if values.count(value) > 1}):
            problems[f"--{name}"] = f"--{name} lists {', '.join(twice)} more than once; list each one once"
    for name, low, high in (("language_threshold", 0, 1), ("decontaminate_ngram", 1, 100),
                            ("minhash_seed", 0, 2**32 - 1)):  # fmt: skip
        if not low <= getattr(args, name) <= high:
            problems[f"--{name}"] = (
                f"--{name} {getattr(args, name)} is out of range; it must be {low} to {high}"
            )
    if args.language_model and not args.languages:
        problems["--language_model"] = (
            "--language_model has no effect without --languages; pass the languages to keep"
        )
    if problems:
        raise DataError("; ".join(problems.values()), code="bad_values", key=next(iter(problems)))


# ---------------------------------------------------------------- datatrove pipelines


def filters(options: StepOptions, folder: Path, tally: Tally) -> list[PipelineStep]:
    """Return the blocks that judge each document on its own. `folder` must be the folder passed to `passes`."""
    from train.prepare.filters import Counted, language_filter, quality_filter
    from train.prepare.ngrams import EvaluationFilter

    blocks: list[PipelineStep] = []
    if options.languages:
        found = language_filter(
            list(options.languages), options.language_threshold, options.language_model or ""
        )
        blocks.append(Counted(found, "language", tally))
    for name in options.quality:
        blocks.append(Counted(quality_filter(name, options.quality_language), f"quality {name}", tally))
    if options.decontaminate:
        index = EvaluationFilter(folder / INDEX_FOLDER, options.decontaminate_ngram)
        blocks.append(Counted(index, "evaluation text", tally))
    return blocks


def passes(options: StepOptions, folder: Path, tasks: int, reader: PipelineStep) -> list[Stage]:
    """Return the stages before the last one. Also builds the index of the evaluation texts in `folder`, immediately.

    Args:
        folder: the preparation's scratch folder, which all tasks share.
        tasks: the number of tasks of each stage that reads the input.
        reader: the block that reads the input, for the first stage.

    Raises:
        DataError: the evaluation texts cannot be read or are all too short, or there are too many tasks.
    """
    from train.prepare.dedup import MOST_TASKS, exact_stages, minhash_stages
    from train.prepare.ngrams import build_index

    if options.decontaminate:
        key, n = options.decontaminate_key, options.decontaminate_ngram
        build_index(options.decontaminate, key, n, folder / INDEX_FOLDER)
    if options.dedup is None:
        return []
    if tasks > MOST_TASKS:
        raise DataError(
            f"--tasks is {tasks}, but --dedup supports at most {MOST_TASKS}; pass a smaller number",
            code="too_many_tasks",
            key="--tasks",
        )
    documents = [reader, *filters(options, folder, Tally())]  # not counted here: the last stage filters again
    if options.dedup == "exact":
        return exact_stages(documents, folder / DEDUP_FOLDER, tasks)
    return minhash_stages(documents, folder / DEDUP_FOLDER, tasks, options.seed)


def removal(options: StepOptions, folder: Path, tally: Tally) -> list[PipelineStep]:
    """Return the blocks that remove the duplicates found by earlier stages; they follow `filters` in the last stage."""
    if options.dedup is None:
        return []
    from train.prepare.dedup import ExactRemoval, MinhashRemoval

    block = ExactRemoval if options.dedup == "exact" else MinhashRemoval
    return [block(folder / DEDUP_FOLDER, tally)]


def report(options: StepOptions, folder: Path) -> dict[str, Any]:
    """Return the manifest's information about the evaluation files, with the number of texts too short to search for.

    Returns:
        An empty dictionary without --decontaminate.
    """
    if not options.decontaminate:
        return {}
    from train.prepare.ngrams import read_report

    return {"evaluation_files": read_report(folder / INDEX_FOLDER)}
