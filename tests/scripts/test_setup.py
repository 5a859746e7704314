"""scripts/: set-up that says what is missing, what pip has to install, skipped tests that count as failed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.machine import ROOT, executable

sys.path.insert(0, str(ROOT / "scripts"))
import check_requirements

pytestmark = pytest.mark.process


def set_up(machine: dict[str, str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """setup_env in a copy of the repository's root."""
    root = tmp_path / "root"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for file in ROOT.glob("requirements*.txt"):
        shutil.copy(file, root)
    script = 'set -euo pipefail; ROOT=$PWD; source scripts/setup_env.sh; setup_env; echo "PY=$PY"'
    return subprocess.run(
        ["bash", "-c", script], env=machine, cwd=root, capture_output=True, text=True, timeout=120
    )


def test_set_up_where_everything_is_there(machine: dict[str, str], tmp_path: Path) -> None:
    run = set_up(machine, tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"PY={tmp_path}/venv/bin/python\n", "nothing to install, nothing to say"
    assert not (tmp_path / "root" / ".venv").exists()


def break_compiler(machine: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "tools" / "c++").unlink()


def break_python(machine: dict[str, str], tmp_path: Path) -> None:
    del machine["VIRTUAL_ENV"]
    executable(tmp_path / "tools/python3", '[[ "$1" == --version ]] && echo "Python 3.9.2"; exit 1')


def break_active_python(machine: dict[str, str], tmp_path: Path) -> None:
    executable(tmp_path / "venv/bin/python", '[[ "$1" == --version ]] && echo "Python 3.8.1" || exit 1')


def break_disk(machine: dict[str, str], tmp_path: Path) -> None:
    del machine["VIRTUAL_ENV"]
    # a Python that is new enough and has no packages
    executable(tmp_path / "tools/python3", f'exec {sys._base_executable} -S "$@"')  # type: ignore[attr-defined]
    (tmp_path / "tools" / "df").unlink()
    executable(tmp_path / "tools/df", 'echo head; echo "/dev/x 100 98 2097152 99% /"')


def break_ninja(machine: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "venv/bin/ninja").unlink()


def break_pip(machine: dict[str, str], tmp_path: Path) -> None:
    no_torch = '[[ "$*" == *find_spec* ]] && exit 1'
    failing_pip = '[[ "$*" == *"pip install"* ]] && { echo "no network" >&2; exit 1; }'
    executable(tmp_path / "venv/bin/python", f'{no_torch}\n{failing_pip}\nexec {sys.executable} "$@"')


@pytest.mark.parametrize(
    ("breaking", "message"),
    [
        (break_compiler, "a C++ compiler is needed"),
        (break_python, "Python >= 3.11 is needed (found: Python 3.9.2)"),
        (break_active_python, "the active environment has Python 3.8.1; Python >= 3.11"),
        (break_disk, "8 GiB of free disk are needed"),
        (break_ninja, "ninja is missing"),
        (break_pip, "pip could not install: torch=="),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_set_up_says_what_is_missing(
    machine: dict[str, str], tmp_path: Path, breaking: object, message: str
) -> None:
    breaking(machine, tmp_path)  # type: ignore[operator]
    run = set_up(machine, tmp_path)
    assert run.returncode == 1
    assert message in run.stderr and "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1].startswith("set-up: ")


REQUIREMENTS = """
# a comment
exact==1.2.3
lenient[extra]==2.0  # from 1.5, optional: for this
plain==3.0  # from 2.9
"""


@pytest.mark.parametrize(
    ("installed", "exact", "wanted"),
    [
        ({}, True, ["exact==1.2.3", "lenient[extra]==2.0", "plain==3.0"]),
        ({}, False, ["exact==1.2.3", "plain==3.0"]),
        ({"exact": "1.2.3", "lenient": "1.10", "plain": "2.10.1"}, False, []),
        ({"exact": "1.2.3", "lenient": "1.10", "plain": "2.10.1"}, True, ["lenient[extra]==2.0", "plain==3.0"]),
        ({"exact": "1.2.4", "lenient": "1.10", "plain": "2.8"}, False, ["exact==1.2.3", "plain==3.0"]),
        ({"exact": "1.2.3", "lenient": "1.4.9", "plain": "3.0"}, False, ["lenient[extra]==2.0"]),
    ],
)  # fmt: skip
def test_what_pip_has_to_install(
    installed: dict[str, str], exact: bool, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_requirements, "installed_version", installed.get)
    specs, remarks = check_requirements.to_install(check_requirements.parse(REQUIREMENTS), exact)
    assert specs == wanted
    assert any("lenient" in remark for remark in remarks) == (
        not exact and "lenient[extra]==2.0" not in wanted
    )


def test_the_repositorys_requirements_are_pinned() -> None:
    files = sorted(ROOT.glob("requirements*.txt"))
    assert [f.name for f in files] == [f"requirements{part}.txt" for part in ("-dev", "-gpu", "-prep", "")]
    names = [r["name"] for file in files for r in check_requirements.parse(file.read_text())]
    assert len(names) == len(set(names)) > 10
    assert "torch" not in names, "torch is chosen by the machine"
    with pytest.raises(ValueError, match="line 2"):
        check_requirements.parse("a==1\nb>=2\n")


def test_local_versions_are_the_same_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_requirements.metadata, "version", lambda name: "2.13.0+cpu")
    assert check_requirements.installed_version("torch") == "2.13.0"


@pytest.mark.interpreter
def test_skipped_gpu_tests_fail_the_run(tmp_path: Path) -> None:
    test = tmp_path / "test_x.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "pytest_fail_on_skip",
        "-p",
        "no:cacheprovider",
        str(test),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    for body, status in (("pass", 0), ('import pytest; pytest.skip("no device")', 1)):
        test.write_text(f"def test_a():\n    {body}\n")
        run = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert run.returncode == status, run.stdout
    assert "counts as failed" in run.stdout
