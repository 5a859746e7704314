"""Texts as words, words as 64-bit hashes; and the removal of documents that share an n-gram with an evaluation text.

The words are those of datatrove's normalised text (lower case, no punctuation, no diacritics), split at white space;
where a script has no spaces between words, each character is a word. Needs no language model, unlike datatrove's own
splitters (spaCy and others), which cut ten times slower. Near duplicates are recognised by the same words.

The overlap of 13 words is GPT-3's (Brown et al. 2020, arXiv:2005.14165, appendix C), which cut the overlap and 200
characters around it out of a document; here the whole document goes. datatrove's own blocks for this read evaluation
sets through lighteval alone, write every number as 0, and keep the index as a Python dict in each worker; here the
index is a sorted file that all workers of a machine share in its page cache.
"""

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.utils.text import TextNormConfig, simplify_text
from datatrove.utils.word_tokenizers import WhitespaceTokenizer

from train.data.format import DataError
from train.files import write_durably
from train.prepare.corpus import list_sources, read_share
from train.prepare.readers import Text

logger = logging.getLogger(__name__)
# Thai, Lao, Myanmar, Khmer, kana, Chinese characters.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
# Numbers stay: datatrove's default writes each as 0, and any table of numbers would match any other.
NORMALISED = TextNormConfig(norm_numbers=False)
# the same, twice as fast
NORMALISED_ASCII = TextNormConfig(norm_numbers=False, norm_unicode_diacritics=False)
# Any odd number whose powers differ: weighs a word's hash by its place in the n-gram (MMIX's generator, Knuth).
PLACE = np.uint64(6364136223846793005)


def hash_text(text: str) -> int:
    """xxh64 of the UTF-8 text. (datatrove passes str, which xxhash 4 refuses.)"""
    return xxhash.xxh64_intdigest(text.encode())


def split_words(normalised: str) -> list[str]:
    """The words of a normalised text."""
    if not normalised.isascii():
        normalised = UNSPACED.sub(r" \g<0> ", normalised)
    return normalised.split()


class PlainWords(WhitespaceTokenizer):
    """`split_words` where datatrove takes a word tokenizer; the text comes normalised."""

    def word_tokenize(self, text: str) -> list[str]:
        return split_words(text)


def ngram_hashes(text: str, n: int) -> np.ndarray:
    """Hashes of a text's n-grams of words in their order, uint64 [max(words - n + 1, 0)].

    A word's hash is xxh64, an n-gram's the polynomial of its words' hashes modulo 2^64: two different n-grams have the
    same one with a probability of about 2^-64 (2^-58 at worst, for the same words in another order).
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
    """The texts of an evaluation file: each record's `key`, or each line of plain text that is not blank.

    Raises:
        DataError: something in it cannot be read.
    """
    texts = []
    for source in list_sources([file]):
        for item in read_share([source], key, 0, 1):
            if not isinstance(item, Text):
                raise DataError(
                    f"--decontaminate: {item}; mend it, or name the key of the texts with --decontaminate_key",
                    code="evaluation_text_unreadable",
                    key=file,
                )
            texts += (
                [line for line in item.text.splitlines() if line.strip()] if source.is_text else [item.text]
            )
    return texts


def build_index(files: tuple[str, ...], key: str, n: int, folder: Path) -> None:
    """Write the n-grams of all evaluation texts to `folder`: sorted hashes, and the file (0, 1, ...) each is from; and
    a report on each file: its texts, those too short to be looked for (under n words), the different n-grams of the
    rest. The same files give the same bytes.

    Raises:
        DataError: a file cannot be read, or none of its texts has n words.
    """
    hashes, owners, report = [], [], []
    for owner, file in enumerate(files):
        texts = evaluation_texts(file, key)
        found = [ngram_hashes(text, n) for text in texts]
        ngrams = np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *found]))
        too_short = sum(not len(text_hashes) for text_hashes in found)
        if not len(ngrams):
            raise DataError(
                f"--decontaminate: none of the {len(texts)} texts of {file} has {n} words, so nothing of "
                "it would be found; give longer texts (questions with their answers) or a smaller "
                "--decontaminate_ngram",
                code="evaluation_texts_too_short",
                key=file,
            )
        hashes.append(ngrams)
        owners.append(np.full(len(ngrams), owner, dtype=np.uint32))
        report.append({"file": file, "texts": len(texts), "too_short": too_short, "ngrams": len(ngrams)})
        ignored = f", of which {too_short:,} are ignored: under {n} words" * bool(too_short)
        logger.info(f"decontamination: {file}: {len(ngrams):,} n-grams of {len(texts):,} texts{ignored}")
    # the first file that has an n-gram owns it
    table, first = np.unique(np.concatenate(hashes), return_index=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in ((HASHES, table), (OWNERS, np.concatenate(owners)[first])):
        _save(folder / name, array)
    write_durably(folder / REPORT, json.dumps(report, indent=1) + "\n")


def read_report(folder: Path) -> list[dict[str, Any]]:
    """What `build_index` reported there, as JSON values."""
    return json.loads((folder / REPORT).read_text(encoding="utf-8"))


def _save(path: Path, array: np.ndarray) -> None:
    """Replace the file at once: tasks of an earlier launch may still read it."""
    temporary = path.with_name("new." + path.name)
    np.save(temporary, array)
    os.replace(temporary, path)


class EvaluationFilter(BaseFilter):
    """Removes documents that share an n-gram with an evaluation text; the reason is the file of that text.

    Of 10^7 indexed n-grams and 10^12 words of documents, 0.5 are expected to agree by chance (10^19 / 2^64).
    """

    name = "evaluation texts"

    def __init__(self, folder: Path, n: int) -> None:
        super().__init__()
        self.folder, self.n = folder, n
        self._table: np.ndarray | None = None

    def filter(self, doc: Document) -> tuple[bool, str]:
        if self._table is None:  # in the task: the block travels without it
            self._table = np.load(self.folder / HASHES, mmap_mode="r")
            self._owners = np.load(self.folder / OWNERS, mmap_mode="r")
            self._files = [item["file"] for item in read_report(self.folder)]
        hashes = ngram_hashes(doc.text, self.n)
        places = np.searchsorted(self._table, hashes)
        places[places == len(self._table)] = 0
        found = places[self._table[places] == hashes]
        return (False, self._files[self._owners[found[0]]]) if len(found) else (True, "")
