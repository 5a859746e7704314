"""What tasks count, and how it adds up."""

import json
from collections import Counter

import pytest

from train.prepare.readers import Damaged, Dropped
from train.prepare.tally import Tally


def test_tallies_add_up():
    first = Tally(read=4, kept=3, text_bytes=7, by_step=Counter({"language": 1}))
    second = Tally(read=2, kept=2, text_bytes=7)
    for number in range(2):
        first.drop(Dropped("bad UTF-8", f"a:{number}"))
        second.drop(Dropped("bad UTF-8", f"b:{number}", "byte 5"))
    second.drop(Dropped("missing key", "c", count=50))
    second.damage(Damaged("d", "corrupt", "", 0))
    total = Tally()
    for tally in (first, second):
        total.add(Tally.from_json(json.loads(json.dumps(tally.to_json()))))
    counts = {
        "dropped": {"bad UTF-8": 4, "missing key": 50},
        "removed": {"language": 1},
        "damaged_files": {"d": 0},
    }
    assert total.documents() == {"in": 60, "out": 5, **counts} and total.text_bytes == 14
    _, *lines = total.table().splitlines()
    first_words = ["1", "50", "c", "4", "a:0", "a:1", "b:0:", "unknown", "corrupt:"]
    assert [line.split()[0] for line in lines] == first_words


def test_uncounted_document_raises():
    with pytest.raises(AssertionError):
        Tally(read=5, kept=3, by_step=Counter({"language": 1})).documents()
