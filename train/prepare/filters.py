"""Build the document filters of a data preparation, check that they can run offline, and count removed documents.

The filters remove documents in other languages, of low quality, or that share an n-gram with an evaluation text.
"""

import argparse
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datatrove.data import Document
from datatrove.io import cached_asset_path_or_download
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    LanguageFilter,
)
from datatrove.pipeline.filters.base_filter import BaseFilter, get_filter_result
from datatrove.utils.lid import FT176LID
from datatrove.utils.text import TextNormConfig, simplify_text
from datatrove.utils.word_tokenizers import load_word_tokenizer

from model import install_command
from train.data.format import DataError
from train.files import sha256_file, write_durably
from train.prepare.corpus import list_sources, read_share
from train.prepare.readers import Text
from train.prepare.steps import StepOptions
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


def make_filters(options: StepOptions, index: Path, tally: Tally) -> list[PipelineStep]:
    """Return the enabled filters, in the order in which they run.

    Args:
        index: the folder that contains the n-gram index of the evaluation texts.
        tally: the counts to which the filters add their removed documents.
    """
    found: dict[str, Any] = {}
    if options.language_model:
        languages = list(options.languages)
        # LanguageFilter keeps a document if any of these languages scores above the threshold.
        found["language"] = LanguageFilter(languages, options.language_threshold)
        found["language"].model = FileLanguages(languages, options.language_model)
    for name in options.quality:
        found[f"quality {name}"] = quality_filter(name, options.quality_language)
    if options.decontaminate:
        found["evaluation text"] = EvaluationFilter(index, options.decontaminate_ngram)
    return [Counted(block, step, tally) for step, block in found.items()]


class Counted(BaseFilter):
    """Wrapper around a datatrove filter that counts the removed documents by step and reason."""

    def __init__(self, block: BaseFilter, step: str, tally: Tally) -> None:
        self.name = block.name
        super().__init__()
        self.block, self.step, self.tally = block, step, tally

    def filter(self, doc: Document) -> tuple[bool, str | None]:
        kept, reason = get_filter_result(self.block.filter(doc))
        if not kept:
            self.tally.by_step[f"{self.step}: {reason}" if reason else self.step] += 1
        return kept, reason


# ---------------------------------------------------------------- language


class FileLanguages(FT176LID):
    """Language detector that uses a local fastText model file. Each task loads the model on first use."""

    def __init__(self, languages: list[str], file: str) -> None:
        super().__init__(languages)
        self.file = file
        self._model: Any = None

    @property
    def model(self) -> Any:
        if self._model is None:
            from fasttext.FastText import _FastText

            self._model = _FastText(self.file)
        return self._model


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
    except ImportError as error:
        packages = ("fasttext-numpy2-wheel", "fasteners", *(() if given else ("aiohttp", "requests")))
        install = install_command(*packages, requirements="requirements-prep.txt")
        message = f"--languages needs packages that are not installed ({error}). Install them with {install}"
        raise DataError(message, code="package_missing", key="--languages") from error
    except Exception as error:  # fsspec raises many types
        raise DataError(
            f"--languages: cannot download {url} ({error}). Download this file on a host with internet access, and "
            "pass its path as --language_model",
            code="download_failed",
            key="--language_model",
        ) from error
    try:
        model = FileLanguages([], str(file)).model
    except ValueError as error:
        raise DataError(
            f"--language_model {file} does not exist or is not a fastText model: {error}. Pass another file, such as "
            f"the one at {url}",
            code="not_a_language_model",
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


def quality_filter(name: str, language: str) -> BaseFilter:
    if name == "gopher_quality" and language not in ENGLISH:
        return GopherQualityFilter(language=language, min_stop_words=None)
    return QUALITY_FILTERS[name](language=language)


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

    datatrove passes a str, which xxhash 4 does not accept without encoding.
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
    """Return the texts in an evaluation file: the value of `key` in each record, or each non-blank line of plain text.

    Raises:
        DataError: if a part of the file cannot be read.
    """
    texts = []
    for source in list_sources([file]):
        for item in read_share([source], key, 0, 1):
            if not isinstance(item, Text):
                raise DataError(
                    f"--decontaminate cannot read a text: {item}. Repair the file, or pass the key that contains "
                    "the text as --decontaminate_key",
                    code="evaluation_text_unreadable",
                    key=file,
                )
            texts += (
                [line for line in item.text.splitlines() if line.strip()] if source.is_text else [item.text]
            )
    return texts


def build_index(files: tuple[str, ...], key: str, n: int, folder: Path) -> None:
    """Write the n-gram index of all evaluation texts to `folder`.

    The index contains the sorted n-gram hashes and, for each hash, the number of the file that contains the n-gram. A
    report lists for each file the number of texts, of texts with fewer than n words (which are ignored), and of
    distinct n-grams. The same files give the same bytes.

    Raises:
        DataError: if a file cannot be read, or none of its texts has n words.
    """
    hashes, owners, report = [], [], []
    for owner, file in enumerate(files):
        texts = evaluation_texts(file, key)
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


class EvaluationFilter(BaseFilter):
    """datatrove filter that removes documents sharing an n-gram with an evaluation text.

    The reason reported for a removed document is the file of the evaluation text. With 10^7 indexed n-grams and 10^12
    words of documents, about 0.5 accidental matches are expected (10^19 / 2^64).
    """

    name = "evaluation texts"

    def __init__(self, folder: Path, n: int) -> None:
        super().__init__()
        self.folder, self.n = folder, n
        self._table: np.ndarray | None = None

    def filter(self, doc: Document) -> tuple[bool, str]:
        if self._table is None:  # load the index in the task, because the filter is pickled
            self._table = np.load(self.folder / HASHES, mmap_mode="r")
            self._owners = np.load(self.folder / OWNERS, mmap_mode="r")
            self._files = [item["file"] for item in read_report(self.folder)]
        hashes = ngram_hashes(doc.text, self.n)
        places = np.searchsorted(self._table, hashes)
        places[places == len(self._table)] = 0
        found = places[self._table[places] == hashes]
        return (False, self._files[self._owners[found[0]]]) if len(found) else (True, "")
