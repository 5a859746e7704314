"""train/record/rank_log.py: what ranks other than 0 say lies in files, what ends them on the console; full disks."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from train.guard.signals import Stopped
from train.guard.watchdog import Watchdog
from train.launch import Launcher
from train.record.rank_log import RankLog, console, last_lines, name_rank_0
from train.record.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def say(where: str) -> None:
    """As Python does, as a library below it does, and as the watchdog has its say."""
    print(f"{where} out")
    print(f"{where} err", file=sys.stderr)
    os.write(1, f"{where} native out\n".encode())
    os.write(2, f"{where} native err\n".encode())


def test_what_a_rank_says_is_in_its_file_from_the_first_step_on(
    folder: RunFolder, capfd: pytest.CaptureFixture
) -> None:
    streams = sys.stdout, sys.stderr
    for start in ("first", "second"):
        with RankLog(folder, 12) as log:
            say("before")
            log.open()
            say(start)
            Watchdog(0)._stderr.write(f"{start} hangs\n")
        say("after")
    assert (sys.stdout, sys.stderr) == streams and console() is sys.__stderr__
    lines = (folder.path / "logs/rank-012.log").read_text().splitlines()
    heads = [line for line in lines if line.startswith("======== ")]
    assert len(heads) == 2 and lines[0] == heads[0] and sys.argv[0] in heads[0]
    said = ["out", "err", "native out", "native err"]
    assert lines == [heads[0], *(f"first {s}" for s in said), heads[1], *(f"second {s}" for s in said)]
    out, err = capfd.readouterr()
    assert out.splitlines() == ["before out", "before native out", "after out", "after native out"] * 2
    assert sorted(line for line in err.splitlines() if "hangs" in line) == ["first hangs", "second hangs"]
    assert "first err" not in err and err.count("before native err") == err.count("after err") == 2


def test_what_ends_a_rank_is_in_its_file_too(folder: RunFolder) -> None:
    for error in (RuntimeError("its cause"), Stopped(3, None)):
        with pytest.raises(type(error)), RankLog(folder, 1, (Stopped,)) as log:
            log.open()
            raise error
    text = folder.rank_log(1).read_text()
    assert "Traceback" in text and "RuntimeError: its cause" in text and "Stopped" not in text
    with pytest.raises(RuntimeError), RankLog(folder, 2):
        raise RuntimeError("a start that is refused leaves no trace")
    assert not folder.rank_log(2).exists()


def test_a_full_disk_ends_nothing_and_is_told_once(folder: RunFolder, capfd: pytest.CaptureFixture) -> None:
    folder.logs.mkdir()
    folder.rank_log(3).symlink_to("/dev/full")
    with RankLog(folder, 3) as log:
        log.open()
        print("lost")
        print("lost, too", file=sys.stderr)
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "rank-003.log" in err and "[Errno 28]" in err


def test_where_no_file_can_be_made_the_console_goes_on(
    folder: RunFolder, capfd: pytest.CaptureFixture
) -> None:
    folder.rank_log(1).mkdir(parents=True)
    with RankLog(folder, 1) as log:
        log.open()
        say("still")
    out, err = capfd.readouterr()
    assert "rank-001.log" in out
    assert "still native out" in out and "still native err" in err


def test_a_folder_that_cannot_be_made_is_told_by_rank_0_alone(
    folder: RunFolder, capfd: pytest.CaptureFixture
) -> None:
    folder.logs.touch()
    with RankLog(folder, 1) as log:
        log.open()
        name_rank_0(folder)
    said = capfd.readouterr().out
    assert said.count("warning") == 1 and str(folder.logs) in said


def test_rank_0_has_its_place_among_the_logs(folder: RunFolder) -> None:
    folder.log.write_text("told\n")
    name_rank_0(folder)
    name_rank_0(folder)
    assert folder.rank_log(0).read_text() == "told\n" and folder.rank_log(0).name == "rank-000.log"
    assert not os.path.isabs(os.readlink(folder.rank_log(0))), "the run's folder may be moved"


def test_a_file_in_the_place_of_the_link_stays(folder: RunFolder) -> None:
    """Of a run that was copied with its links followed; the logs of the other ranks are written all the same."""
    folder.logs.mkdir()
    folder.rank_log(0).write_text("of the copy\n")
    name_rank_0(folder)
    assert folder.rank_log(0).read_text() == "of the copy\n"


def test_the_launcher_shows_the_last_lines_of_ranks_that_a_signal_ended(
    folder: RunFolder, capfd: pytest.CaptureFixture
) -> None:
    folder.logs.mkdir()
    launcher = Launcher.__new__(Launcher)
    launcher.first_rank = 2
    for rank in (2, 3, 4):
        folder.rank_log(rank).write_text("of an earlier start\n")
    launcher.logs = [(folder.rank_log(r), folder.rank_log(r).stat().st_size) for r in (2, 3, 4)]
    for rank in (2, 3):
        with folder.rank_log(rank).open("a") as file:
            file.writelines(f"line {n} of {rank}\n" for n in range(30))
    launcher._show_last_lines({3: -signal.SIGSEGV, 2: 1, 4: -signal.SIGKILL})
    lines = capfd.readouterr().err.splitlines()
    assert str(folder.rank_log(3)) in lines[0]
    assert lines[1:] == [f"line {n} of 3" for n in range(10, 30)], "rank 2 said it itself, rank 4 nothing"
    launcher.logs = []
    launcher._show_last_lines({3: -signal.SIGSEGV})
    assert last_lines(folder.path / "none", 0) == []
