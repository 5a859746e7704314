"""Filter the documents of a data preparation, check that the filters can run offline, and count removed documents.

    --languages       the language that fastText detects         datatrove's LanguageFilter
    --quality         heuristics of Gopher, C4 and FineWeb       datatrove's filters of these names
    --decontaminate   n-grams shared with evaluation sets        EvaluationFilter
    --dedup           exact or near duplicates                   dedup.py

The filters run in this order, so deduplication sees only the documents that the other filters kept. The result depends
only on the documents and the options, not on the number of workers.
"""

import argparse
import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datatrove.data import Document
from datatrove.io import cached_asset_path_or_download
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    LanguageFilter,
)
from datatrove.pipeline.filters.base_filter import get_filter_result
from datatrove.utils.lid import FT176LID
from datatrove.utils.logging import logger as logger_of_datatrove
from datatrove.utils.text import TextNormConfig, simplify_text
from datatrove.utils.word_tokenizers import load_word_tokenizer

from model import install_command
from train.data.format import DataError
from train.files import sha256_file, write_durably
from train.prepare.corpus import list_sources, read_share
from train.prepare.readers import Text
from train.prepare.tally import Tally

logger = logging.getLogger(__name__)
ENGLISH = ("en", "eng")
LABEL = "__label__"
QUALITY_FILTERS = {
    "gopher_quality": GopherQualityFilter,
    "gopher_repetition": GopherRepetitionFilter,
    "c4": C4QualityFilter,
    "fineweb": FineWebQualityFilter,
}


@dataclass(frozen=True)
class StepOptions:
    """Options of the optional preparation steps, including the hashes of the files that affect the result.

    Attributes:
        languages: fastText codes of the languages to keep; empty to disable the language filter.
        language_threshold: minimum fastText score for one of these languages.
        language_model: path of a fastText model.
        quality: names of quality filters from QUALITY_FILTERS, in the order in which they run.
        quality_language: language whose rules split text into words and sentences.
        dedup: kind of duplicates to remove, "exact" or "minhash", or None to keep duplicates.
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


def find_step_options(args: argparse.Namespace) -> StepOptions:
    """Build the options of the optional preparation steps, and find or download the files that the steps need.

    Args:
        args: the parsed command line of prepare_data.py.

    Raises:
        DataError: if a file is missing, a package is not installed, or the language model cannot be downloaded.
    """
    model = language_model(args.languages, args.language_model) if args.languages else None
    if args.quality:
        check_splitter(args.quality_language)
    evaluation = [source.path for file in args.decontaminate for source in list_sources([file])]
    return StepOptions(
        languages=tuple(args.languages),
        language_model=model,
        quality=tuple(args.quality),
        quality_language=args.quality_language,
        dedup=args.dedup,
        decontaminate=tuple(args.decontaminate),
        decontaminate_key=args.decontaminate_key,
        decontaminate_ngram=args.decontaminate_ngram,
        sha256=tuple((file, sha256_file(file)) for file in filter(None, [model, *evaluation])),
    )


@lru_cache(1)  # in a process that runs several tasks
def make_filters(options: StepOptions, index: Path) -> dict[str, Any]:
    """Return the enabled filters as {step name: filter}, in the order in which they run.

    Args:
        index: the folder that contains the n-gram index of the evaluation texts.
    """
    logger_of_datatrove.remove()  # do not print its messages
    found: dict[str, Any] = {}
    if options.language_model:
        languages = list(options.languages)
        # LanguageFilter keeps a document if any of these languages scores above the threshold.
        found["language"] = LanguageFilter(languages, options.language_threshold)
        found["language"].model = FileLanguages(languages, options.language_model)
    for name in options.quality:
        changes: dict[str, Any] = {}
        if name == "gopher_quality" and options.quality_language not in ENGLISH:
            changes["min_stop_words"] = None
        found[f"quality {name}"] = QUALITY_FILTERS[name](language=options.quality_language, **changes)
    if options.decontaminate:
        found["evaluation text"] = EvaluationFilter(index, options.decontaminate_ngram)
    return found


def filter_documents(
    documents: Iterable[Document], options: StepOptions, index: Path, tally: Tally
) -> Iterator[Document]:
    """Yield the documents that all enabled filters keep, and count the removed documents by step and reason."""
    filters = make_filters(options, index)
    for document in documents:
        for step, each in filters.items():
            kept, reason = get_filter_result(each.filter(document))
            if not kept:
                tally.by_step[f"{step}: {reason}" if reason else step] += 1
                break
        else:
            yield document


# ---------------------------------------------------------------- language


class FileLanguages(FT176LID):
    """Language detector that uses a local fastText model file."""

    model: Any = None  # instead of datatrove's property, which downloads the model

    def __init__(self, languages: list[str], file: str) -> None:
        from fasttext.FastText import _FastText

        super().__init__(languages)
        self.model = _FastText(file)


def language_model(languages: list[str], given: str | None) -> str:
    """Return the absolute path of a fastText model that supports `languages`.

    Args:
        given: path of the model file, or None to download lid.176 to datatrove's cache.

    Raises:
        DataError: if a package is not installed, the download failed, the file is missing or invalid, or the model does
            not support a language.
    """
    url = FT176LID.MODEL_URL
    try:
        LanguageFilter(languages)
        file = given or cached_asset_path_or_download(url, namespace="lid", subfolder="ft176", progress=False)
        model = FileLanguages([], str(file)).model
    except ImportError as error:
        packages = ("fasttext-numpy2-wheel", "fasteners", *(() if given else ("aiohttp", "requests")))
        install = install_command(*packages, requirements="requirements-prep.txt")
        raise DataError(
            f"--languages needs packages that are not installed ({error}). Install them with {install}",
            code="package_missing",
            key="--languages",
        ) from error
    except Exception as error:  # fsspec raises many types
        raise DataError(
            f"the language model {given or url} cannot be loaded: {error}. Download {url} on a host with internet "
            "access, and pass the path of the downloaded file as --language_model",
            code="language_model_unusable",
            key="--language_model",
        ) from error
    known = {label.removeprefix(LABEL) for label in model.get_labels() if label.startswith(LABEL)}
    if unknown := [language for language in languages if language not in known]:
        some = ", ".join(sorted(known)[:200])
        raise DataError(
            f"--languages {' '.join(unknown)}: {file} does not support these languages. Choose from {some or 'none'}",
            code="unknown_language",
            key="--languages",
        )
    return str(Path(file).absolute())


# ---------------------------------------------------------------- quality


def check_splitter(language: str) -> None:
    """Check that datatrove can split texts in `language` into words and sentences.

    datatrove loads the package for a language on first use. Without this check, a missing package would make every task
    fail.

    Raises:
        DataError: if a package or its data are missing, or the language is unknown.
    """
    try:
        splitter = load_word_tokenizer(language)
        splitter.word_tokenize("One sentence.")
        splitter.span_tokenize("One sentence.")
    except (ImportError, ValueError, LookupError, OSError) as error:
        raise DataError(
            f"--quality_language {language} cannot be used: {str(error).rstrip('.')}. For en, de, fr and most other "
            f"European languages, install spacy with {install_command('spacy', requirements='requirements-prep.txt')}. "
            "For other languages, datatrove's tokenizer_assignment.csv lists the required word tokenizer",
            code="no_word_splitter",
            key="--quality_language",
        ) from error


# ---------------------------------------------------------------- n-grams

# The text is first normalised by datatrove (lower case, no punctuation, no diacritics) and then split into words at
# white space. In scripts without spaces between words, each character is a word. This is ten times faster than
# datatrove's word splitters, such as spaCy. The detection of near duplicates uses the same words.
#
# The default n-gram length of 13 words is from GPT-3 (Brown et al. 2020, arXiv:2005.14165, appendix C). GPT-3 removed
# the overlap and 200 characters around it; this module removes the whole document. datatrove's own decontamination is
# not used: it reads evaluation sets only through lighteval, replaces every number with 0, and keeps the index as a
# Python dict in each worker. Here, the index is a sorted, memory-mapped file that all workers on a host share.

# Scripts without spaces between words: Thai, Lao, Myanmar, Khmer, kana, Chinese characters.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
# Numbers are kept. datatrove's default replaces each number with 0, which makes all tables of numbers match.
NORMALISED = TextNormConfig(norm_numbers=False)
# Gives the same result for ASCII text, and is twice as fast.
NORMALISED_ASCII = TextNormConfig(norm_numbers=False, norm_unicode_diacritics=False)
# Base of the polynomial that combines the word hashes of an n-gram. Any odd number with distinct powers works. This is
# the multiplier of Knuth's MMIX generator.
PLACE = np.uint64(6364136223846793005)


def hash_text(text: str) -> int:
    """Return the xxh64 hash of the UTF-8 bytes of a text.

    The corresponding function of datatrove fails with xxhash 4, because it passes a str instead of bytes.
    """
    return xxhash.xxh64_intdigest(text.encode())


def split_words(normalised: str) -> list[str]:
    """Split a normalized text into words. In scripts without spaces, each character is a word."""
    if not normalised.isascii():
        normalised = UNSPACED.sub(r" \g<0> ", normalised)
    return normalised.split()


def ngram_hashes(text: str, n: int) -> np.ndarray:
    """Return the hashes of all n-grams of words in a text, in order: uint64 [max(words - n + 1, 0)].

    A word is hashed with xxh64. The hash of an n-gram is a polynomial in the hashes of its words, modulo 2^64. Two
    different n-grams collide with a probability of about 2^-64 (at most 2^-58, for the same words in another order).
    """
    words = split_words(simplify_text(text, NORMALISED_ASCII if text.isascii() else NORMALISED))
    hashes = np.fromiter(map(hash_text, words), dtype=np.uint64, count=len(words))
    count = max(len(words) - n + 1, 0)
    ngrams = np.zeros(count, dtype=np.uint64)
    for place in range(n if count else 0):
        ngrams *= PLACE
        ngrams += hashes[place : place + count]
    return ngrams


# ---------------------------------------------------------------- evaluation texts

HASHES, OWNERS, REPORT = "ngrams.npy", "owners.npy", "evaluation_files.json"


def evaluation_texts(file: str, key: str) -> list[str]:
    """Return the texts in an evaluation file: the value of `key` in each record, or the non-blank lines of plain text.

    Raises:
        DataError: if a part of the file cannot be read.
    """
    texts = []
    for source in list_sources([file]):
        for item in read_share([source], key, 0, 1):
            if not isinstance(item, Text):
                raise DataError(
                    f"--decontaminate: a text cannot be read: {item}. Repair the file, or pass the key that contains "
                    "the text as --decontaminate_key",
                    code="evaluation_text_unreadable",
                    key=file,
                )
            texts += (
                [line for line in item.text.splitlines() if line.strip()] if source.is_text else [item.text]
            )
    return texts


def build_index(options: StepOptions, folder: Path) -> None:
    """Write the n-gram index of all evaluation texts to `folder`.

    The index contains the sorted n-gram hashes and, for each hash, the position in options.decontaminate of the first
    file that contains the n-gram. A report lists for each file the numbers of texts, of texts that are ignored because
    they are too short for an n-gram, and of distinct n-grams. The output is reproducible byte for byte.

    Raises:
        DataError: if a file cannot be read, or all of its texts are too short.
    """
    hashes, owners, report, n = [], [], [], options.decontaminate_ngram
    for owner, file in enumerate(options.decontaminate):
        texts = evaluation_texts(file, options.decontaminate_key)
        found = [ngram_hashes(text, n) for text in texts]
        ngrams = np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *found]))
        too_short = sum(not len(text_hashes) for text_hashes in found)
        if not len(ngrams):
            raise DataError(
                f"--decontaminate: none of the {len(texts)} texts in {file} has at least {n} words, so no document "
                "could match. Pass longer texts, such as questions with their answers, or a smaller "
                "--decontaminate_ngram",
                code="evaluation_texts_too_short",
                key=file,
            )
        hashes.append(ngrams)
        owners.append(np.full(len(ngrams), owner, dtype=np.uint32))
        report.append({"file": file, "texts": len(texts), "too_short": too_short, "ngrams": len(ngrams)})
        ignored = f" ({too_short:,} texts with fewer than {n} words are ignored)" * bool(too_short)
        logger.info(f"decontamination: {file} has {len(ngrams):,} n-grams in {len(texts):,} texts{ignored}")
    # each n-gram is assigned to the first file that contains it
    table, first = np.unique(np.concatenate(hashes), return_index=True)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / HASHES, table)
    np.save(folder / OWNERS, np.concatenate(owners)[first])
    write_durably(folder / REPORT, json.dumps(report, indent=1) + "\n")


def read_report(folder: Path) -> list[dict[str, Any]]:
    """Read the report on the evaluation files that `build_index` wrote, as JSON values."""
    return json.loads((folder / REPORT).read_text(encoding="utf-8"))


class EvaluationFilter:
    """Filter that removes documents sharing an n-gram with an evaluation text.

    The reason reported for a removed document is the path of the evaluation file. With 10^7 indexed n-grams and 10^12
    words of documents, about 0.5 accidental matches are expected (10^19 / 2^64).
    """

    def __init__(self, folder: Path, n: int) -> None:
        self.n = n
        self.table = np.load(folder / HASHES, mmap_mode="r")
        self.owners = np.load(folder / OWNERS, mmap_mode="r")
        self.files = [item["file"] for item in read_report(folder)]

    def filter(self, doc: Document) -> tuple[bool, str]:
        hashes = ngram_hashes(doc.text, self.n)
        places = np.searchsorted(self.table, hashes)
        places[places == len(self.table)] = 0
        found = places[self.table[places] == hashes]
        return (False, self.files[self.owners[found[0]]]) if len(found) else (True, "")
