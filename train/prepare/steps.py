"""The optional steps of a preparation, each behind one flag, each datatrove's: which documents stay.

    --languages       fastText's language of a document          datatrove's LanguageFilter (filters.py)
    --quality         heuristics of Gopher, C4, FineWeb          its filters of these names (filters.py)
    --decontaminate   n-grams shared with evaluation sets        a filter in its way (ngrams.py)
    --dedup           exact or near duplicates                   its blocks, subclassed (dedup.py)

Documents pass them in this order, so that duplicates are searched among what the filters left. Everything is a
function of the document and the options alone, and so the same for any number of workers.

The command line has its flags from here: what needs datatrove is imported where it is used.
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
INDEX_FOLDER, DEDUP_FOLDER = "decontaminate", "dedup"  # in what all tasks share


@dataclass(frozen=True)
class StepOptions:
    """Which steps run, and everything that their result depends on.

    languages: fastText's codes, empty for no filter; language_threshold: the score above which one of them is taken;
        language_model: a fastText file.
    quality: of QUALITY, in the order in which they run; quality_language: whose rules split words and sentences.
    dedup: of DEDUP, or None; seed: of MinHash's hash functions.
    decontaminate: files of evaluation texts, with the key of the texts in records and the n-gram's length in words.
    sha256: (file, hash) of the model and the evaluation files.
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
    """The flags of the steps."""
    add = parser.add_argument_group("optional steps").add_argument

    def add_list(name: str, text: str, **kind: Any) -> None:
        add(name, type=unicode, nargs="+", default=[], help=text, **kind)

    add_list("--languages", "keep the documents in these languages, such as en de", metavar="CODE")
    add("--language_threshold", type=float, default=0.65, help="score that one of them must exceed (0.65)")
    text = "a fastText model such as lid.176.bin; needed without a network, else downloaded once"
    add("--language_model", type=unicode, metavar="FILE", help=text)
    text = "remove documents by these heuristics, in this order, at datatrove's defaults (c4 also removes lines, and "
    add_list("--quality", text + "documents with a curly bracket in a whole sentence)", choices=QUALITY)
    text = "splits words and sentences (en); gopher_quality's stop words are English and not asked of another"
    add("--quality_language", default="en", metavar="CODE", help=text)
    text = "remove documents that share an n-gram of words with a text of these: a line of .txt, a record of .jsonl "
    add_list("--decontaminate", text + "or of whatever else --input takes", metavar="FILE")
    add(
        "--decontaminate_key",
        type=unicode,
        default="text",
        metavar="KEY",
        help="key of the texts in the records (text)",
    )
    text = "words of the n-gram (13); shorter texts are counted, not found"
    add("--decontaminate_ngram", type=int, default=13, help=text)
    text = "keep the first of equal documents (exact), or of those that share about 0.7 or more of their 5-grams of "
    add("--dedup", choices=DEDUP, help=text + "words, any number equal to any other (minhash)")
    add("--minhash_seed", type=int, default=1, help="chooses MinHash's hash functions (1)")


def options_of(args: argparse.Namespace) -> StepOptions:
    """The steps that the command line asks for, with everything found that they need.

    Raises:
        DataError: a bad value, a missing file, a package that is not installed, a model that cannot be had, a
            file's name that is not UTF-8.
    """
    _check_values(args)
    from train.prepare.filters import check_splitter, language_model

    model = language_model(args.languages, args.language_model) if args.languages else None
    if args.quality:
        check_splitter(args.quality_language)
    evaluation = [source.path for file in args.decontaminate for source in list_sources([file])]
    files = [*([model] if model else []), *evaluation]
    for file in files:  # of a folder not all names were given
        check_name("--language_model or --decontaminate", file)
    values: dict[str, Any] = {key.name: getattr(args, key.name, None) for key in fields(StepOptions)}
    values |= {name: tuple(values[name]) for name in ("languages", "quality", "decontaminate")}
    values["sha256"] = tuple((file, sha256_file(file)) for file in files)
    return StepOptions(**values | {"language_model": model, "seed": args.minhash_seed})


def _check_values(args: argparse.Namespace) -> None:
    """All that is wrong with the values, raised at once."""
    problems: dict[str, str] = {}
    for name in ("languages", "quality", "decontaminate"):
        values = getattr(args, name)
        if twice := sorted({value for value in values if values.count(value) > 1}):
            problems[f"--{name}"] = f"--{name} has {', '.join(twice)} more than once; name each once"
    for name, low, high in (("language_threshold", 0, 1), ("decontaminate_ngram", 1, 100),
                            ("minhash_seed", 0, 2**32 - 1)):  # fmt: skip
        if not low <= getattr(args, name) <= high:
            problems[f"--{name}"] = f"--{name} {getattr(args, name)}: allowed is {low} to {high}"
    if args.language_model and not args.languages:
        problems["--language_model"] = (
            "--language_model without --languages has no effect; name the languages to keep"
        )
    if problems:
        raise DataError("; ".join(problems.values()), code="bad_values", key=next(iter(problems)))


# ---------------------------------------------------------------- what the launcher and the tasks call


def filters(options: StepOptions, folder: Path, tally: Tally) -> list[PipelineStep]:
    """Blocks that look at one document each; `folder` is the one that `passes` was given."""
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
    """The stages before the last one. Builds the index of the evaluation texts in `folder` now, at the launcher.

    Args:
        folder: scratch space that all tasks share, the preparation's own.
        tasks: of the stages that read the input, this one's and the last.
        reader: of the input, for the first of these stages.

    Raises:
        DataError: evaluation texts that cannot be read or are all too short; too many tasks.
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
            f"--tasks {tasks} with --dedup: at most {MOST_TASKS} are possible; give fewer",
            code="too_many_tasks",
            key="--tasks",
        )
    documents = [reader, *filters(options, folder, Tally())]  # the last stage counts what is removed here
    if options.dedup == "exact":
        return exact_stages(documents, folder / DEDUP_FOLDER, tasks)
    return minhash_stages(documents, folder / DEDUP_FOLDER, tasks, options.seed)


def removal(options: StepOptions, folder: Path, tally: Tally) -> list[PipelineStep]:
    """Blocks of the last stage, after `filters`, that remove the duplicates which the stages before it found."""
    if options.dedup is None:
        return []
    from train.prepare.dedup import ExactRemoval, MinhashRemoval

    block = ExactRemoval if options.dedup == "exact" else MinhashRemoval
    return [block(folder / DEDUP_FOLDER, tally)]


def report(options: StepOptions, folder: Path) -> dict[str, Any]:
    """What the manifest should say of the steps beside the counts of documents: the evaluation files, with the texts
    that were too short to be looked for. Empty without any."""
    if not options.decontaminate:
        return {}
    from train.prepare.ngrams import read_report

    return {"evaluation_files": read_report(folder / INDEX_FOLDER)}
