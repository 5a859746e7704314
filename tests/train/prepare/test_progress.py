"""What a preparation says of how far it is: share of the input, and the time left."""

import gzip
import json
import os
from collections import Counter
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from tests.conftest import numbers
from train.prepare import preparation
from train.prepare.corpus import list_sources, read_share
from train.prepare.readers import Dropped, Place
from train.prepare.tally import Stage, Tally

LINES = b"".join(json.dumps({"text": os.urandom(500).hex()}).encode() + b"\n" for _ in range(1000))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_the_place_in_a_file_is_that_on_the_disk(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    pack = {".gz": gzip.compress, ".zst": lambda data: pyarrow.compress(data, "zstd", asbytes=True)}
    path.write_bytes(pack.get(path.suffix, bytes)(LINES))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"] * 1000}), tmp_path / "b.parquet")
    sources = list_sources([str(path), str(tmp_path / "b.parquet")])
    place, places = Place(), []
    for number, _ in enumerate(read_share(sources, "text", 0, 1, None, place)):
        if number < 1000:
            places.append(place.bytes / path.stat().st_size)
    assert places == sorted(places) and 0.4 < places[500] < 0.8 and places[-1] <= 1
    assert place.bytes == place.total == sum(source.bytes for source in sources)
    totals = []
    for task in range(3):
        place = Place()
        list(read_share(sources, "text", task, 3, None, place))
        assert place.bytes == place.total
        totals.append(place.total)
    assert sum(totals) == sum(source.bytes for source in sources)


def test_the_last_stage_is_told_with_rate_and_size_every_five_seconds(tmp_path, capsys, monkeypatch):
    """Of what this start did: an earlier one had done a quarter of it."""
    now, found = [100.0], [(1, Tally(source_bytes=250, kept=2), 1_000_000)]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(preparation, "read_progress", lambda *_: found[-1])
    what = SimpleNamespace(work=tmp_path.joinpath, tasks=3, sources=[SimpleNamespace(bytes=1000)])
    progress = preparation.Progress(what, [Stage("tokenize", [], 3)])
    counts = {"dropped": Counter({"bad UTF-8": 3}), "by_step": Counter({"language": 1200})}
    found.append((2, Tally(source_bytes=500, kept=7000, text_bytes=2_500_000, **counts), 3_000_000))
    for seconds in (0.0, 4.9, 10.0, 14.9):
        now[0] = 100 + seconds
        progress.show(0, 1)
    (line,) = capsys.readouterr().err.replace(",", "").splitlines()
    assert "0:00:20" in line and numbers(line)[-9:] == [2, 3, 7000, 2.5, 3_000_000, 10, 0.2, 3, 1200]


def test_what_tasks_counted_adds_up_and_is_told_with_the_first_places():
    first, second = Tally(read=4, kept=3, by_step=Counter({"language": 1})), Tally(read=2, kept=2)
    for number in range(2):
        first.drop(Dropped("bad UTF-8", f"a:{number}"))
        second.drop(Dropped("bad UTF-8", f"b:{number}", "byte 5"))
    second.drop(Dropped("missing key", "c", count=50, text_keys=("content",)))
    total = Tally()
    for tally in (first, second):
        tally.source_bytes, tally.text_bytes = 10, 7
        again = Tally.from_json(json.loads(json.dumps(tally.to_json())))
        assert again == tally
        total.add(again)
    total.add(Tally(text_keys=["title"]))
    assert (total.source_bytes, total.text_bytes, total.text_keys) == (20, 14, ["content"])
    dropped = {"bad UTF-8": 4, "missing key": 50}
    assert total.documents() == {"in": 60, "out": 5, "dropped": dropped, "removed": {"language": 1}}
    _, *lines = total.table().splitlines()
    assert [line.split()[0] for line in lines] == ["1", "50", "c", "4", "a:0", "a:1", "b:0:"]


def test_a_document_that_is_neither_kept_nor_counted_is_a_defect():
    tally = Tally(read=5, kept=3, by_step=Counter({"language": 1}))
    with pytest.raises(RuntimeError):
        tally.documents()
    tally.by_step["language"] += 1
    assert tally.documents() == {"in": 5, "out": 3, "dropped": {}, "removed": {"language": 2}}
