"""train/record/log.py: what is on the console and in the log file of a rank; a disk that is full."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from train.record.log import configure_logging, link_log_file, open_log_file

logger = logging.getLogger("train.of_a_test")


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    """Leave logging as it was."""
    yield
    configure_logging(level="warning")


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
def test_the_console_shows_lines_by_level_and_rank(
    capsys: pytest.CaptureFixture, options: dict, out: list[str], err: list[str]
) -> None:
    configure_logging(has_file=True)  # replaced
    configure_logging(**options)
    log_at_each_level()
    logging.getLogger("another_package").info("a request")
    found = capsys.readouterr()
    assert (found.out.splitlines(), found.err.splitlines()) == (out, err)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_file_has_all_lines_of_all_starts(tmp_path: Path, rank: int) -> None:
    path = tmp_path / "logs/rank-001.log"
    for start in ("first", "second"):
        configure_logging("error", rank, has_file=True)
        log_at_each_level(f"{start} before ")
        assert start == "second" or not path.parent.exists(), "a start that is refused leaves no trace"
        open_log_file(path)
        log_at_each_level(f"{start} after ")
        logging.getLogger("another_package").warning("a warning of another package")
        try:
            raise ValueError("its cause")
        except ValueError:
            logger.debug("ended", exc_info=True)
    configure_logging()
    logger.info("of another run")
    lines = path.read_text().splitlines()
    heads = [index for index, line in enumerate(lines) if line.startswith("======== ")]
    assert len(heads) == 2 and heads[0] == 0 and sys.argv[0] in lines[0]
    assert [line.partition(" ")[2] for line in lines[1:9]] == [
        f"{prefix}first {when} {level}"
        for when in ("before", "after")
        for prefix, level in (("", "debug"), ("", "info"), ("warning: ", "warning"), ("error: ", "error"))
    ]
    text = "\n".join(lines[heads[1] :])
    assert "of another package" in text and "ValueError: its cause" in text and "Traceback" in text
    assert "second before debug" in text and "first" not in text and "of another run" not in text


@pytest.mark.parametrize("problem", ["full", "a_folder", "no_folder"])
def test_a_file_that_cannot_be_written_is_reported_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, problem: str
) -> None:
    path = tmp_path / "logs/rank-001.log"
    if problem == "no_folder":
        path.parent.touch()
    else:
        path.parent.mkdir()
        path.symlink_to("/dev/full") if problem == "full" else path.mkdir()
    configure_logging(has_file=True)
    open_log_file(path)
    log_at_each_level()
    log_at_each_level()
    found = capsys.readouterr()
    assert (
        found.out.count("warning: /") == 1
        and found.out.count("info\n") == 2
        and found.err.count("error\n") == 2
    )


def test_a_console_that_is_gone_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def write(text: str) -> None:
        raise BrokenPipeError

    configure_logging()
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=write))
    logger.info("lost")
    monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_rank_0_has_its_place_among_the_logs(tmp_path: Path) -> None:
    target, link = tmp_path / "train.log", tmp_path / "logs/rank-000.log"
    target.write_text("of rank 0\n")
    for _ in range(2):
        link_log_file(link, target)
        assert link.read_text() == "of rank 0\n"
    assert not os.path.isabs(os.readlink(link)), "the folder of the run may be moved"
    link.unlink()
    link.write_text("of a copied run\n")
    link_log_file(link, target)
    assert link.read_text() == "of a copied run\n"
