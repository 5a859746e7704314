"""scripts/: set-up that says what is missing, what pip has to install, and what the GPU tests write down."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests import programs
from tests.scripts.machine import ROOT, executable

sys.path.insert(0, str(ROOT / "scripts"))
import check_requirements

pytestmark = pytest.mark.process


def set_up(
    machine: dict[str, str], tmp_path: Path, before: str = ":", argument: str = ""
) -> subprocess.CompletedProcess[str]:
    """setup_env in a copy of the repository's root; `before` comes first."""
    root = tmp_path / "root"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for file in ROOT.glob("*.txt"):
        shutil.copy(file, root)
    script = f'set -euo pipefail; ROOT=$PWD; source scripts/setup_env.sh; {before}; setup_env {argument}; echo "PY=$PY"'
    return subprocess.run(
        ["bash", "-c", script], env=machine, cwd=root, capture_output=True, text=True, timeout=120
    )


NO_TORCH = '[[ "$*" == *find_spec* ]] && exit 1'
VERSION_ONLY = '[[ "$1" == --version ]]'


def pip_does(action: str) -> str:
    """Return a script that runs Python, but runs the shell command `action` instead of `pip install`."""
    return f'[[ "$*" == *"pip install"* ]] && {{ {action}; exit 0; }}\nexec {sys.executable} "$@"'


@pytest.mark.parametrize(("argument", "installed"), [("", False), ("dev", True)])
def test_optional_packages(machine: dict[str, str], tmp_path: Path, argument: str, installed: bool) -> None:
    asked = tmp_path / "asked.txt"
    executable(tmp_path / "venv/bin/python", pip_does(f'echo "$*" >> {asked}; cat >/dev/null'))
    before = "echo 'absent==1.0  # optional: x' >> requirements.txt"
    run = set_up(machine, tmp_path, before, argument)
    assert run.returncode == 0, run.stderr
    assert (asked.exists() and "absent==1.0" in asked.read_text()) == installed


def test_gpu_package_constraints(tmp_path: Path) -> None:
    asked = tmp_path / "asked.txt"
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "requirements-gpu.txt").write_text("-c constraints-gpu.txt\nabsent==1.0\n")
    python = executable(tmp_path / "python", pip_does(f'echo "$*" >> {asked}; cat >/dev/null'))
    script = f"ROOT={tmp_path} PY={python}; source scripts/setup_env.sh; nvcc() {{ :; }}"
    command = ["bash", "-euo", "pipefail", "-c", f"{script}; install_requirements $ROOT/requirements-gpu.txt"]
    subprocess.run(command, cwd=ROOT, check=True)
    arguments = asked.read_text().splitlines()[-1].split()
    assert arguments[-3:] == ["-c", f"{tmp_path}/constraints-gpu.txt", "absent==1.0"]
    constraints = check_requirements.parse((ROOT / "constraints-gpu.txt").read_text())
    assert {"nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi"} <= {c["name"] for c in constraints}


# A requirement that pip must install into the active environment, SETUP_REPLACE -> exit status; whether pip is asked
# for it; whether pip gets what is installed as constraints.
@pytest.mark.parametrize(
    ("requirement", "replace", "expected"),
    [
        ("pytest==0.1", "", (1, False, False)),
        ("pytest==0.1", "1", (0, True, False)),
        ("absent==1.0", "", (0, True, True)),
        pytest.param("absent==1.0\npytest==0.1", "", (1, False, False), marks=pytest.mark.slow),
    ],
)
def test_active_environment_is_kept(
    machine: dict[str, str], tmp_path: Path, requirement: str, replace: str, expected: tuple[int, bool, bool]
) -> None:
    asked, given = tmp_path / "asked.txt", tmp_path / "constraints.txt"
    executable(tmp_path / "venv/bin/python", pip_does(f'echo "$*" > {asked}; cat > {given}'))
    before = f"echo '{requirement}' >> requirements.txt"
    run = set_up(machine | {"SETUP_REPLACE": replace}, tmp_path, before)
    assert run.returncode == expected[0], run.stderr
    assert asked.exists() == expected[1]
    if expected[1]:
        assert requirement in asked.read_text()
        assert (f"pytest=={metadata.version('pytest')}\n" in given.read_text()) == expected[2]
    else:
        assert "SETUP_REPLACE=1" in run.stderr and metadata.version("pytest") in run.stderr


def test_later_installations_keep_the_active_environment(machine: dict[str, str], tmp_path: Path) -> None:
    """train/launch.py installs the packages that prepare the built-in corpus in another shell."""
    given = tmp_path / "constraints.txt"
    executable(tmp_path / "venv/bin/python", pip_does(f"cat > {given}"))
    later = '; bash -c "source scripts/setup_env.sh; pip_install absent==1.0"'
    run = set_up(machine, tmp_path, argument=later)
    assert run.returncode == 0, run.stderr
    assert f"pytest=={metadata.version('pytest')}\n" in given.read_text()


def test_cpu_op_is_built_once(machine: dict[str, str], tmp_path: Path) -> None:
    folder, built = tmp_path / "venv/torch_extensions", tmp_path / "built.txt"
    (tmp_path / "venv/pyvenv.cfg").touch()
    (folder / "deepspeed_shm_comm.done").unlink()
    for number, (build, status) in enumerate([("echo no space; exit 1", 1), ("exit 0", 0), ("exit 0", 0)]):
        stand_in = (
            f'[[ "$*" == *init_distributed* ]] && {{ echo "$TORCH_EXTENSIONS_DIR" >> {built}; {build}; }}'
        )
        executable(tmp_path / "venv/bin/python", f'{stand_in}\nexec {sys.executable} "$@"')
        run = set_up(machine, tmp_path / str(number))
        assert run.returncode == status, run.stderr
        assert ("could not be built: no space" in run.stderr) == bool(status)
        assert ("set-up: building DeepSpeed's CPU communication" in run.stdout) == (number < 2)
    assert built.read_text().split() == [str(folder)] * 2


CPU_BUILDS = "--extra-index-url https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("configured", "answers", "torch_index", "index"),
    [
        ("", 0, "", CPU_BUILDS),
        ("", 1, "", None),
        ("global.extra-index-url='file:///mirror'", 0, "", ""),
        ("", 1, "file:///cpu", "--extra-index-url file:///cpu"),
    ],
)
def test_cpu_build_of_torch(
    tmp_path: Path, configured: str, answers: int, torch_index: str, index: str | None
) -> None:
    """install_torch without a GPU. configured: pip's configuration. answers: status of the index of CPU builds."""
    asked = tmp_path / "asked.txt"
    lines = [
        NO_TORCH,
        f'[[ "$*" == *"pip config list"* ]] && {{ echo "{configured}"; sleep 0.1; echo; exit 0; }}',
        f'[[ "$*" == *urlopen* ]] && exit {answers}',
        pip_does(f'echo "$*" >> {asked}'),
    ]
    python = executable(tmp_path / "python", "\n".join(lines))
    script = f"set -euo pipefail; source scripts/setup_env.sh; PY={python} HAS_GPU=0; install_torch"
    environment = {**os.environ, "TORCH_INDEX_URL": torch_index, "VIRTUAL_ENV": ""}  # no active environment
    run = subprocess.run(["bash", "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and ("is not reachable" in run.stdout) == (index is None)
    assert asked.read_text().partition("torch==2.13.0")[2].strip() == (index or "")


# Files of the machine to replace, or to remove (None); whether an environment is active; part of the error.
@pytest.mark.parametrize(
    ("files", "is_active", "message"),
    [
        ({"tools/c++": None}, True, "C++ compiler"),
        ({"tools/python3": f"{VERSION_ONLY} && echo Python 3.9.2; exit 1"}, False, "(found: Python 3.9.2)"),
        (
            {"venv/bin/python": f"{VERSION_ONLY} && echo Python 3.8.1 || exit 1"},
            True,
            "the active environment has Python 3.8.1",
        ),
        ({"venv/bin/ninja": None}, True, "ninja"),
        ({"venv/bin/python": f"{NO_TORCH}\n{pip_does('exit 1')}"}, True, "pip could not install torch=="),
    ],
    ids=["compiler", "python", "active python", "ninja", "pip"],
)
def test_missing_prerequisites_error(
    machine: dict[str, str], tmp_path: Path, files: dict[str, str | None], is_active: bool, message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).unlink(missing_ok=True)
        if text is not None:
            executable(tmp_path / name, text)
    if not is_active:
        del machine["VIRTUAL_ENV"]
    run = set_up(machine, tmp_path)
    assert run.returncode == 1
    assert message in run.stderr and "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1].startswith("set-up: ")


def test_path_with_space_raises(machine: dict[str, str], tmp_path: Path) -> None:
    """torch passes it to the compiler unquoted. A clone there is fine with an environment elsewhere."""
    assert set_up(machine, tmp_path / "user one").returncode == 0
    machine["VIRTUAL_ENV"] = str((tmp_path / "venv").rename(tmp_path / "my venv"))
    run = set_up(machine, tmp_path / "user")
    assert run.returncode == 1 and run.stdout == "" and str(tmp_path / "my venv") in run.stderr
    assert not (tmp_path / "user/root/.venv").exists()


REQUIREMENTS = """
# a comment
exact==1.2.3
lenient[extra]==2.0  # from 1.5, optional: --that
plain==3.0  # from 2.9
"""


@pytest.mark.parametrize(
    ("installed", "exact", "wanted"),
    [
        ({}, True, ["exact==1.2.3", "plain==3.0"]),
        ({}, False, ["exact==1.2.3", "plain==3.0"]),
        ({"exact": "1.2.3", "lenient": "1.10", "plain": "2.10.1"}, False, []),
        ({"exact": "1.2.3", "lenient": "1.10", "plain": "2.10.1"}, True, ["lenient[extra]==2.0", "plain==3.0"]),
        ({"exact": "1.2.4", "lenient": "1.10", "plain": "2.8"}, False, ["exact==1.2.3", "plain==3.0"]),
        ({"exact": "1.2.3", "lenient": "1.4.9", "plain": "3.0"}, False, ["lenient[extra]==2.0"]),
    ],
)  # fmt: skip
def test_requirements_to_install(
    installed: dict[str, str], exact: bool, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_requirements, "installed_version", installed.get)
    requirements = check_requirements.parse(REQUIREMENTS)
    found, remarks = check_requirements.to_install(requirements, exact)
    assert [requirement["spec"] for requirement in found] == wanted
    assert any("lenient" in remark for remark in remarks) == (
        not exact and "lenient[extra]==2.0" not in wanted
    )
    assert any("(optional, for --that;" in remark for remark in remarks) == (not exact and not installed)
    with_optional, _ = check_requirements.to_install(requirements, exact, optional=True)
    added = {r["spec"] for r in with_optional} - set(wanted)
    assert added == (set() if installed else {"lenient[extra]==2.0"})


def test_requirements_are_pinned() -> None:
    files = sorted(ROOT.glob("requirements*.txt"))
    assert [f.name for f in files] == [
        f"requirements{part}.txt" for part in ("-dev", "-gpu", "-prep", "-serving", "")
    ]
    pins = [r.group("name", "version") for f in files for r in check_requirements.parse(f.read_text())]
    names = [name for name, _ in pins]
    # that of serving, an environment of its own, has the same one with what it serves by
    assert [name for name in names if names.count(name) > 1] == ["transformers"] * 2
    assert len(set(pins)) == len(set(names)) > 10
    assert "torch" not in names, "torch is chosen by the machine"
    with pytest.raises(ValueError):
        check_requirements.parse("a==1\nb>=2\n")


@pytest.mark.slow
def test_gpu_test_run_record(tmp_path: Path) -> None:
    test, results = tmp_path / "test_x.py", tmp_path / "results" / "gpu_tests.json"
    command = [sys.executable, *"-m pytest -q -p scripts.pytest_gpu_run -p no:cacheprovider".split()]
    command += [f"--results={results.parent}", str(test)]
    good = "import pytest\ndef test_a():\n    pass\n"
    skip = "def test_b():\n    pytest.skip('no device')\n"
    fail = "def test_c():\n    raise OSError\n"
    for text, status, skipped, failed in (
        (good, 0, [], []),
        (good + skip, 1, ["test_x.py::test_b"], []),
        (good + fail, 1, [], ["test_x.py::test_c"]),
    ):
        test.write_text(text)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = programs.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == status, run.stdout + run.stderr
        report = json.loads(results.read_text())
        found = [report[name] for name in ("status", "passed", "skipped", "failed")]
        assert found == [status, 1, skipped, failed]
        assert re.match(r"[0-9a-f]{40}|unknown", report["commit"])
        assert {"date", "machine", "versions", "seconds"} <= report.keys()
