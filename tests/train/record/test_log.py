"""train/record/log.py: the messages on the console and in the log file of a rank."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from tqdm import tqdm

from train.record.log import configure_logging, open_log_file

logger = logging.getLogger("train.of_a_test")


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    """Leave logging as it was."""
    raises = logging.raiseExceptions
    yield
    configure_logging(level="warning")
    logging.raiseExceptions = raises


def log_at_each_level(prefix: str = "") -> None:
    for level in ("debug", "info", "warning", "error"):
        getattr(logger, level)(f"{prefix}{level}")


@pytest.mark.parametrize(
    ("options", "out", "err"),
    [
        ({}, ["info", "warning: warning"], ["error: error"]),
        ({"level": "debug"}, ["debug", "info", "warning: warning"], ["error: error"]),
        ({"level": "error"}, [], ["error: error"]),
        ({"console": "stderr"}, [], ["info", "warning: warning", "error: error"]),
        ({"rank": 1}, [], ["error: error"]),
    ],
)
def test_console_shows_messages_by_level_and_rank(
    capsys: pytest.CaptureFixture, options: dict, out: list[str], err: list[str]
) -> None:
    configure_logging(has_file=True)  # replaced
    configure_logging(**options)
    log_at_each_level()
    logging.getLogger("another_package").info("a request")
    found = capsys.readouterr()
    assert (found.out.splitlines(), found.err.splitlines()) == (out, err)


@pytest.mark.parametrize("rank", [0, 1])
def test_log_file_has_all_messages(tmp_path: Path, rank: int) -> None:
    path = tmp_path / "logs/rank-001.log"
    for start in ("first", "second"):
        configure_logging("error", rank, has_file=True)
        log_at_each_level(f"{start} before ")
        assert start == "second" or not path.parent.exists(), "a refused start writes nothing"
        open_log_file(path)
        log_at_each_level(f"{start} after ")
        logging.getLogger("another_package").warning("a warning of another package")
    configure_logging()
    lines = path.read_text().splitlines()
    heads = [index for index, line in enumerate(lines) if line.startswith("======== ")]
    assert heads == [0, 10] and sys.argv[0] in lines[0] and len(lines) == 20
    assert [line.partition(" ")[2] for line in lines[1:9]] == [
        f"{prefix}first {when} {level}"
        for when in ("before", "after")
        for prefix, level in (("", "debug"), ("", "info"), ("warning: ", "warning"), ("error: ", "error"))
    ]
    assert "another package" in lines[9] and "second before debug" in lines[11]


def test_closed_console_is_ignored(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "stdout", Mock(write=Mock(side_effect=BrokenPipeError)))
    configure_logging()
    monkeypatch.undo()
    logger.info("lost")
    assert capsys.readouterr().err == ""


def test_messages_are_printed_above_a_progress_bar(capsys: pytest.CaptureFixture) -> None:
    configure_logging()
    with tqdm(total=2, file=sys.stdout, mininterval=0):
        logger.info("a message")
    bar, _, message, redrawn = capsys.readouterr().out.split("\r")[1:5]
    assert "0/2" in bar and message == "a message\n" and "0/2" in redrawn
