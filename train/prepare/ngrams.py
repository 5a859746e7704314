"""Hash n-grams of words, and remove documents that share an n-gram with an evaluation text.

The text is first normalised by datatrove (lower case, no punctuation, no diacritics) and then split into words at white
space. In scripts without spaces between words, each character is a word. This is ten times faster than datatrove's word
splitters, such as spaCy. The detection of near duplicates uses the same words.

The default n-gram length of 13 words is from GPT-3 (Brown et al. 2020, arXiv:2005.14165, appendix C). GPT-3 removed the
overlap and 200 characters around it; this module removes the whole document. datatrove's own decontamination is not
used: it reads evaluation sets only through lighteval, replaces every number with 0, and keeps the index as a Python
dict in each worker. Here, the index is a sorted, memory-mapped file that all workers on a host share.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.utils.text import TextNormConfig, simplify_text

from train.data.format import DataError
from train.files import write_durably
from train.prepare.corpus import list_sources, read_share
from train.prepare.readers import Text

logger = logging.getLogger(__name__)
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
