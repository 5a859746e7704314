"""Variants of Mistral, Llama and Qwen3 models with FP8 precision.

config.py and variants.py define the supported models, build.py builds a model, and checks/startup.py checks the model
before training starts.

This package never imports train/. config, variants, keys and fp8/recipes do not import torch, so that commands can
check their arguments quickly. Only hf.py imports transformers' model class.
"""

import importlib.util
import os
import select
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def require_packages(what: str, *packages: str, requirements: str = "requirements.txt") -> None:
    """Print an error and exit with status 2 if one of `packages` is not installed.

    The usual reason is that the virtual environment is not activated.

    Args:
        what: name of the command that needs the packages, for the message.
        requirements: the requirements file that lists the packages.
    """
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        root = Path(__file__).resolve().parent.parent
        activate = f". {shlex.quote(str(root / '.venv/bin/activate'))}"
        print(
            f"error: {what} needs packages that are not installed: {', '.join(missing)}. Activate the project's "
            f"environment ({activate}), which ./run_training.sh creates, or run pip install -r {requirements}",
            file=sys.stderr,
        )
        sys.exit(2)


def install_command(*packages: str, requirements: str = "requirements.txt") -> str:
    """Return the pip command that installs optional packages in the tested versions listed in `requirements`."""
    file = Path(__file__).resolve().parent.parent / requirements
    return shlex.join([sys.executable, "-m", "pip", "install", "-c", str(file), *packages])


@contextmanager
def end_with_reader() -> Iterator[None]:
    """Context manager that ends the program silently if the reader of stdout (for example, `head`) has exited.

    The exit status is 141, the status of a program killed by SIGPIPE.
    """
    try:
        yield
    finally:
        with suppress(BrokenPipeError):
            print(end="", flush=True)
        poll = select.poll()
        poll.register(1, 0)  # reports errors only
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout again at exit
            raise SystemExit(141) from None
