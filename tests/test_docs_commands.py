"""Run the commands of README.md and docs/ as written, in a fresh clone per page: ./run_tests.sh --docs.

Later commands of a page find the outputs of earlier ones. The clone's .venv is the environment of the tests, because
tests/scripts/test_setup.py tests the set-up.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.reliability.launching import clean_environment
from tests.test_docs import PAGES, ROOT, text_of

# What a command needs beyond a clone and a CPU -> the commands that need it.
NOT_RUN = {
    "long": r"run_tests\.sh",
    "Slurm": r"^srun |^sbatch |^exec |--executor ",
    "several nodes": r"^NNODES=",
    "a container image": r"^CONTAINER_IMAGE=",
    "a GPU": r"train_config_(fp8\.json(?! --gpus)|evidence|fastest|8b)|--nproc [28] |bench_|compare_",
    "network": r"pip install|hf:|convergence_data|HuggingFaceTB",
    "a file or run of the user": r"\b(CONFIG|FOLDER|RUN|OUT|PREFIX|TABLE|YOUR_FORK|WEB)\b|TEXT\.\.\.|"
    r"output/run\b|data/pretrain|^\$D ",
    "an OpenAI server": r"OpenAI",
}
NO_COMMAND = re.compile(
    r"""--|["{#]|```|step """
)  # options, JSON, a batch script's header, fences and output


def commands_of(page: Path) -> list[str]:
    """Return the commands in the code blocks of a page. A backslash continues a command on the next line."""
    text = re.sub(r"^```json\n.*?^```", "", text_of(page), flags=re.M | re.S)
    blocks = re.findall(r"^```\w*\n.*?^```|(?:^ {4}[^\n]*\n)+", text, re.M | re.S)
    code = "\n".join(textwrap.dedent(block) for block in blocks)
    commands = re.findall(r"^(?:[^\n]*\\\n)*[^\n]+", code, re.M)
    return [command for command in commands if not NO_COMMAND.match(command.strip())]


def needs(command: str) -> list[str]:
    """Return what a command needs that this test does not have."""
    return [what for what, pattern in NOT_RUN.items() if re.search(pattern, command)]


COMMANDS = {page: commands_of(page) for page in PAGES}
RUN = {page: [c for c in commands if not needs(c)] for page, commands in COMMANDS.items()}


def test_every_reason_applies() -> None:
    found = {what for commands in COMMANDS.values() for command in commands for what in needs(command)}
    assert found == NOT_RUN.keys()


@pytest.mark.docs
@pytest.mark.process
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "page",
    [page for page, commands in RUN.items() if set(commands) - {". .venv/bin/activate"}],
    ids=lambda p: p.name,
)
def test_commands_run_as_written(page: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    (clone / ".venv").symlink_to(sys.prefix)
    files = re.findall(r"`(\S+\.json)`[^`]*\n```json\n(.*?)```", text_of(page), re.S)
    for name, content in files:
        (clone / name).write_text(content)
    script = "\n".join(["set -eE; trap 'echo \"failed: $BASH_COMMAND\"' ERR", *RUN[page]])
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(["bash", "-c", script], cwd=clone, env=clean_environment(), **out)
    assert done.returncode == 0, done.stdout[-4000:]
