"""The flags of the optional filters of a preparation. Each filter decides which documents to keep.

    --languages       the language that fastText detects         datatrove's LanguageFilter (filters.py)
    --quality         heuristics of Gopher, C4 and FineWeb       datatrove's filters of these names (filters.py)
    --decontaminate   n-grams shared with evaluation sets        our own datatrove filter (ngrams.py)
    --dedup           exact or near duplicates                   our own datatrove blocks (dedup.py)

They run in this order, so deduplication sees only the documents that the filters kept. The result depends on the
documents and the options alone, not on the number of workers.

The command line imports this module, so it does not import datatrove.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from model.keys import between, unicode

QUALITY = ("gopher_quality", "gopher_repetition", "c4", "fineweb")
DEDUP = ("exact", "minhash")


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
    texts: dict[str, Any] = {"type": unicode, "nargs": "+", "default": []}
    add(
        "--languages",
        metavar="CODE",
        help="keep only documents in these languages, such as en de (fastText's score above 0.65)",
        **texts,
    )
    add(
        "--language_model",
        type=unicode,
        metavar="FILE",
        help="path of a fastText model such as lid.176.bin (default: download it once)",
    )
    add(
        "--quality",
        choices=QUALITY,
        help="remove documents by these heuristics, in this order, with datatrove's defaults. c4 also removes lines, "
        "and documents with a curly bracket in a whole sentence",
        **texts,
    )
    add(
        "--quality_language",
        default="en",
        metavar="CODE",
        help="language whose rules split text into words and sentences (default: en). gopher_quality requires its "
        "English stop words only for en",
    )
    add(
        "--decontaminate",
        metavar="FILE",
        help="remove documents that share an n-gram of words with a text in these files. Each line of a .txt and each "
        "record of another format is one text; all formats of --input are accepted",
        **texts,
    )
    add(
        "--decontaminate_key",
        type=unicode,
        default="text",
        metavar="KEY",
        help="key of the text in the records of these files (default: text)",
    )
    add(
        "--decontaminate_ngram",
        type=between(1, 100),
        default=13,
        help="length of the n-grams in words (default: 13). Shorter evaluation texts are counted and ignored",
    )
    add(
        "--dedup",
        choices=DEDUP,
        help="remove duplicates and keep the first one. exact: identical documents; minhash: documents that share "
        "about 0.7 or more of their 5-grams of words, where all numbers count as equal",
    )
