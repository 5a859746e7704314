"""What tasks count, and how it adds up."""

import json
from collections import Counter

import pytest

from train.prepare.readers import Dropped
from train.prepare.tally import Tally


def test_what_tasks_counted_adds_up_and_is_told_with_the_first_places():
    first, second = Tally(read=4, kept=3, by_step=Counter({"language": 1})), Tally(read=2, kept=2)
    for number in range(2):
        first.drop(Dropped("bad UTF-8", f"a:{number}"))
        second.drop(Dropped("bad UTF-8", f"b:{number}", "byte 5"))
    second.drop(Dropped("missing key", "c", count=50))
    total = Tally()
    for tally in (first, second):
        tally.text_bytes = 7
        again = Tally.from_json(json.loads(json.dumps(tally.to_json())))
        assert again == tally
        total.add(again)
    assert total.text_bytes == 14
    dropped = {"bad UTF-8": 4, "missing key": 50}
    assert total.documents() == {"in": 60, "out": 5, "dropped": dropped, "removed": {"language": 1}}
    _, *lines = total.table().splitlines()
    assert [line.split()[0] for line in lines] == ["1", "50", "c", "4", "a:0", "a:1", "b:0:"]


def test_a_document_that_is_neither_kept_nor_counted_is_a_defect():
    tally = Tally(read=5, kept=3, by_step=Counter({"language": 1}))
    with pytest.raises(AssertionError):
        tally.documents()
    tally.by_step["language"] += 1
    assert tally.documents() == {"in": 5, "out": 3, "dropped": {}, "removed": {"language": 2}}
