"""run_training.sh and what it sources: set-up that says what is missing, launchers, states of a run.

The programs that would be started are stood in for by scripts that write down their arguments.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.machine import ROOT, executable, run_training

sys.path.insert(0, str(ROOT / "scripts"))
import check_requirements
import run_info

from train.checkpoint.files import RunState
from train.config.arguments import TrainingArguments, load_arguments


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


def test_a_wrong_key_stops_before_anything_starts(
    machine: dict[str, str], tmp_path: Path, config: Path
) -> None:
    run = run_training(machine, tmp_path, config, "--max_stepz", "3")
    assert run.returncode == 2
    assert "did you mean max_steps" in run.stderr
    assert not (tmp_path / "started.txt").exists()


def started(tmp_path: Path) -> str:
    return (tmp_path / "started.txt").read_text()


def test_two_processes_on_a_cpu(machine: dict[str, str], tmp_path: Path, config: Path) -> None:
    run = run_training(machine, tmp_path, config, "--learning_rate", "1e-4")
    assert run.returncode == 7, run.stderr
    words = started(tmp_path).split()
    assert words[1:4] == [f"{ROOT}/train/launch.py", "--nproc", "2"]
    assert words[-4:] == [f"{ROOT}/train/train.py", str(config), "--learning_rate", "1e-4"]


def test_process_count(machine: dict[str, str], tmp_path: Path, config: Path) -> None:
    assert run_training({**machine, "NPROC": "3"}, tmp_path, config).returncode == 7
    assert "--nproc 3" in started(tmp_path)
    run = run_training({**machine, "NPROC": "two"}, tmp_path, config)
    assert run.returncode == 1 and "NPROC=two" in run.stderr


def test_slurm_starts_one_launcher_a_node(machine: dict[str, str], tmp_path: Path, config: Path) -> None:
    job = {"SLURM_JOB_ID": "41234", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]", "NPROC": "8"}
    path = f"{tmp_path}/slurm:{machine['PATH']}"
    run = run_training({**machine, **job, "PATH": path}, tmp_path, config)
    assert run.returncode == 7, run.stderr
    command = started(tmp_path)
    assert "/srun --nodes=2 --ntasks=2 --ntasks-per-node=1" in command
    assert "train/launch.py --nproc 8 --nnodes 2 --master_addr node-a --master_port 21234" in command
    assert command.endswith(f"{ROOT}/train/train.py {config}\n")


def test_nodes_without_slurm(machine: dict[str, str], tmp_path: Path, config: Path) -> None:
    nodes = {"NNODES": "2", "NODE_RANK": "1", "NPROC": "4"}
    run = run_training({**machine, **nodes}, tmp_path, config)
    assert run.returncode == 1 and "MASTER_ADDR" in run.stderr
    run = run_training({**machine, **nodes, "MASTER_ADDR": "node-a"}, tmp_path, config)
    assert run.returncode == 7, run.stderr
    assert "--nnodes 2 --node_rank 1 --master_addr node-a --master_port 29500" in started(tmp_path)


def test_help() -> None:
    for script in ("run_training.sh", "run_tests.sh"):
        run = subprocess.run([str(ROOT / script), "--help"], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0
        assert f"./{script}" in run.stdout and "set -euo" not in run.stdout


def test_states_of_a_run(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def arguments(*overrides: str) -> TrainingArguments:
        return load_arguments([str(config), "--output_dir", str(run), *overrides])

    def state(*overrides: str) -> tuple[str, str]:
        return run_info.run_state(arguments(*overrides))

    def commit(step: int) -> None:
        folder = run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        saved = RunState(step, 0, 0, 2, 1, arguments().resolve(2).to_dict(), {})
        (folder / "run_state.json").write_text(json.dumps(vars(saved)))
        (folder / "manifest.json").write_text("{}")

    assert state() == ("new", "")
    commit(5)
    (run / "checkpoints" / "step-00000007").mkdir()  # died in its save: no manifest
    assert state() == ("resume", "step-00000005")
    assert state("--resume_from_checkpoint", "never") == ("new", "")
    commit(10)
    assert state() == ("resume", "step-00000010"), "all steps done, but not exported"
    (run / "hf").mkdir()
    (run / "hf" / "exported_from.json").write_text('{"manifest_sha256": "that of another run"}')
    assert state() == ("resume", "step-00000010"), "exported from another checkpoint"
    digest = hashlib.sha256((run / "checkpoints/step-00000010/manifest.json").read_bytes()).hexdigest()
    (run / "hf" / "exported_from.json").write_text(json.dumps({"manifest_sha256": digest}))
    assert state() == ("finished", "step-00000010")
    assert state("--logging_steps", "3") == ("finished", "step-00000010")
    for change in (
        "max_steps=20",
        "learning_rate=1e-4",
        "precision.compute=bf16",
        "data.sources.text=elsewhere",
    ):
        assert state(f"--{change}") == ("resume", "step-00000010"), (
            "train.py has to say what it makes of that"
        )
    assert state("--resume_from_checkpoint", "never") == ("new", "")


@pytest.mark.parametrize(("strategy", "saves"), [("steps", "saves=yes"), ("no", "saves=")])
def test_the_demo_needs_a_run_that_saves(
    config: Path, strategy: str, saves: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", ["run_info.py", str(config), "--save_strategy", strategy])
    assert run_info.main() == 0
    assert saves in capsys.readouterr().out.splitlines()


def test_embedded_corpus_is_prepared_once(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "python-stdlib"
    arguments = load_arguments([str(config), "--data.sources.text", str(folder)])
    assert run_info.missing_corpus(arguments) == str(folder)
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    assert run_info.missing_corpus(arguments) == ""
    assert run_info.missing_corpus(load_arguments([str(config)])) == "", (
        "the user's own data is not ours to make"
    )


def test_default_configuration_uses_the_embedded_corpus() -> None:
    arguments = load_arguments([str(ROOT / "train_args" / "train_config_tiny.json")])
    assert [Path(folder).name for folder in arguments.data.sources.values()] == [run_info.EMBEDDED_CORPUS]


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
    names = [r.name for file in files for r in check_requirements.parse(file.read_text())]
    assert len(names) == len(set(names)) > 10
    assert "torch" not in names, "torch is chosen by the machine"
    with pytest.raises(ValueError, match="line 2"):
        check_requirements.parse("a==1\nb>=2\n")


def test_local_versions_are_the_same_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_requirements.metadata, "version", lambda name: "2.13.0+cpu")
    assert check_requirements.installed_version("torch") == "2.13.0"


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
