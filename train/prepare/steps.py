"""Command-line options for the optional filters of a data preparation.

    --languages       the language that fastText detects         datatrove's LanguageFilter (filters.py)
    --quality         heuristics of Gopher, C4 and FineWeb       datatrove's filters of these names (filters.py)
    --decontaminate   n-grams shared with evaluation sets        our own datatrove filter (filters.py)
    --dedup           exact or near duplicates                   our own datatrove blocks (dedup.py)

The filters run in this order, so deduplication sees only the documents that the other filters kept. The result depends
only on the documents and the options, not on the number of workers.

prepare_data.py imports this module to parse its command line, so this module does not import datatrove.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from model.keys import between, unicode

QUALITY = ("gopher_quality", "gopher_repetition", "c4", "fineweb")
DEDUP = ("exact", "minhash")


@dataclass(frozen=True)
class StepOptions:
    """Options of the optional preparation steps, with everything that affects their result.

    Attributes:
        languages: fastText codes of the languages to keep; empty to disable the language filter.
        language_threshold: minimum fastText score for one of these languages.
        language_model: path of a fastText model.
        quality: names of quality filters from QUALITY, in the order in which they run.
        quality_language: language whose rules split text into words and sentences.
        dedup: kind of duplicates to remove, one of DEDUP, or None to keep duplicates.
        seed: seed of the MinHash functions.
        decontaminate: files with evaluation texts.
        decontaminate_key: key of the text in the records of the evaluation files.
        decontaminate_ngram: length of the n-grams, in words.
        sha256: pairs (file, hash) for the language model and each evaluation file.
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
    """Add the options for the optional filters to the command line of prepare_data.py."""
    add = parser.add_argument_group("optional steps").add_argument
    texts: dict[str, Any] = {"type": unicode, "nargs": "+", "default": []}
    add(
        "--languages",
        metavar="CODE",
        help="keep only documents in these languages, such as en de. A document is kept if its fastText score for "
        "one of these languages is above 0.65 (default: keep all languages)",
        **texts,
    )
    add(
        "--language_model",
        type=unicode,
        metavar="FILE",
        help="path of a fastText model such as lid.176.bin (default: download lid.176.bin once)",
    )
    add(
        "--quality",
        choices=QUALITY,
        help="quality filters to run, in the given order, with datatrove's default settings. 'c4' also removes "
        "individual lines, and documents that contain a curly bracket in a sentence (default: none)",
        **texts,
    )
    add(
        "--quality_language",
        default="en",
        metavar="CODE",
        help="language whose rules --quality uses to split text into words and sentences (default: en). With en, "
        "gopher_quality also requires English stop words",
    )
    add(
        "--decontaminate",
        metavar="FILE",
        help="remove documents that share an n-gram of words with a text in these files, in any format accepted by "
        "--input. Each line of a .txt file and each record in other formats is one text (default: none)",
        **texts,
    )
    add(
        "--decontaminate_key",
        type=unicode,
        default="text",
        metavar="KEY",
        help="key that contains the text in the records of the --decontaminate files (default: text)",
    )
    add(
        "--decontaminate_ngram",
        type=between(1, 100),
        default=13,
        help="length of the n-grams for --decontaminate, in words (default: 13). Shorter evaluation texts are ignored",
    )
    add(
        "--dedup",
        choices=DEDUP,
        help="remove duplicate documents, and keep the first of each set of duplicates. 'exact' removes identical "
        "documents. 'minhash' removes documents that share about 70%% or more of their word 5-grams, and treats all "
        "numbers as equal (default: keep duplicates)",
    )
