"""Mistral models, their variants and FP8.

config.py and variants.py define which models are possible, build.py builds one, and startup_check.py checks it before
the first step.

This package does not import train/. config, variants, keys and fp8/recipes do not import torch, so that commands can
check their arguments quickly. transformers' model class is imported only in hf_baseline.
"""

import importlib.util
import shlex
import sys
from pathlib import Path


def need(what: str, *packages: str, requirements: str = "requirements.txt") -> None:
    """Exit with status 2 if one of `packages` is not installed, usually because the environment is not activated.

    Args:
        what: the program that needs the packages, for the message.
        requirements: the file that lists the packages.
    """
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        root = Path(__file__).resolve().parent.parent
        activate = f". {shlex.quote(str(root / '.venv/bin/activate'))}"
        print(
            f"error: {what} needs {', '.join(missing)}: activate the project's environment ({activate}), which "
            f"./run_training.sh creates, or run pip install -r {requirements}",
            file=sys.stderr,
        )
        sys.exit(2)


def install_command(*packages: str, requirements: str = "requirements.txt") -> str:
    """Return the command that installs the tested versions (listed in `requirements`) of optional packages."""
    file = Path(__file__).resolve().parent.parent / requirements
    return shlex.join([sys.executable, "-m", "pip", "install", "-c", str(file), *packages])
