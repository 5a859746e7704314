"""What a contributor uses: the hooks of pre-commit, the workflows, the version."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.scripts.machine import ROOT
from train.record.provenance import origin

pytestmark = pytest.mark.process


def hooks() -> dict[str, dict[str, Any]]:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [r["repo"] for r in repositories] == ["local"], "others have versions, as requirements-dev.txt has"
    return {hook["id"]: hook for hook in repositories[0]["hooks"]}


def test_hooks_run_the_tools_of_run_tests() -> None:
    tools = set(re.findall(r"-m (ruff \w+|codespell_lib|mypy)\b", (ROOT / "run_tests.sh").read_text()))
    assert {hook["entry"].partition(" -m ")[2] for hook in hooks().values()} == tools and len(tools) == 4


# With the settings of pyproject.toml: the line is longer than by default, and `te` is Transformer Engine.
GOOD = f"te = {list(range(26))}\n"


@pytest.mark.parametrize(
    ("hook", "bad"),
    [
        ("ruff-format", "x=1\n"),
        ("ruff", "import os\n"),
        ("codespell", "# t_eh\n".replace("_", "")),
        ("mypy", 'x: int = ""\n'),
    ],
)
def test_hooks_find_mistakes(tmp_path: Path, hook: str, bad: str) -> None:
    """ruff format corrects the file, from which pre-commit sees that it has failed."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("model", "train", "fp8_inference_demo", "test_fp8", "scripts"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    file, found = tmp_path / "model/code.py", []
    command = hooks()[hook]
    names = [] if command.get("pass_filenames") is False else [str(file)]
    for content in (GOOD, bad):
        file.write_text(content)
        done = subprocess.run([*shlex.split(command["entry"]), *names], cwd=tmp_path, capture_output=True)
        found.append(bool(done.returncode) or file.read_text() != content)
    assert found == [False, True]


def test_workflows_run_existing_scripts() -> None:
    steps = [
        step
        for file in (ROOT / ".github/workflows").glob("*.yml")
        for job in yaml.safe_load(file.read_text())["jobs"].values()
        for step in job["steps"]
    ]
    scripts = {words[0] for step in steps if "/" in (words := step.get("run", "").split() or [""])[0]}
    assert scripts == {".ci/run", "scripts/build_docs.sh"}
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


def test_every_issue_asks_for_run_json() -> None:
    for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        fields = yaml.safe_load(file.read_text())["body"]
        (field,) = (field for field in fields if field["attributes"]["label"] == "run.json")
        assert field["validations"] == {"required": True}


def test_version() -> None:
    done = subprocess.run([ROOT / "run_training.sh", "--version"], capture_output=True, text=True, check=True)
    newest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    assert [done.stdout.strip(), origin({})["version"]] == [newest] * 2
    assert re.fullmatch(r"\d+\.\d+\.\d+", newest)
