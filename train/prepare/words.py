"""Texts as words and words as 64-bit hashes: what near-duplicates and evaluation texts are recognised by.

The words are those of datatrove's normalised text (lower case, no punctuation, no diacritics), split at white space;
where a script has no spaces between words, each character is a word. Needs no language model, unlike datatrove's own
splitters (spaCy and others), which cut ten times slower.
"""

import re
from typing import Any

import numpy as np
import xxhash
from datatrove.utils.text import TextNormConfig, simplify_text
from datatrove.utils.word_tokenizers import WhitespaceTokenizer

# Thai, Lao, Myanmar, Khmer, kana, Chinese characters.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
# Numbers stay: datatrove's default writes each as 0, and any table of numbers would match any other.
NORMALISED = TextNormConfig(norm_numbers=False)
NORMALISED_ASCII = TextNormConfig(
    norm_numbers=False, norm_unicode_diacritics=False
)  # the same, twice as fast
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


def is_in(values: np.ndarray, table: np.ndarray) -> Any:
    """The place in the sorted, non-empty `table` of the first of `values` that is there; None when none is."""
    places = np.searchsorted(table, values)
    places[places == len(table)] = 0
    found = np.flatnonzero(table[places] == values)
    return int(places[found[0]]) if len(found) else None
