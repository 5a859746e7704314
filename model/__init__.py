"""A Mistral, its variants and their FP8: config.py and variants.py say what a model may be, build.py makes it,
startup_check.py verifies what it runs on.

It imports nothing of train/. Without torch, for who checks arguments: config, variants, keys and fp8/recipes.
transformers' model class is imported only where it is used (hf_baseline). `need` is what programs begin with.
`install_command` is for errors about optional packages.
"""

import importlib.util
import shlex
import sys
from pathlib import Path


def need(what: str, *packages: str, requirements: str = "requirements.txt") -> None:
    """End the program with status 2 where one of `packages` is not installed: most likely the environment that has them
    was not activated. `what` needs them, and the file `requirements` lists them."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        root = Path(__file__).resolve().parent.parent
        activate = f". {shlex.quote(str(root / '.venv/bin/activate'))}"
        print(
            f"error: {what} needs {', '.join(missing)}: activate the project's environment ({activate}), which "
            f"./run_training.sh makes, or pip install -r {requirements}",
            file=sys.stderr,
        )
        sys.exit(2)


def install_command(*packages: str, requirements: str = "requirements.txt") -> str:
    """Return the command that installs the tested versions of optional packages, which `requirements` lists."""
    file = Path(__file__).resolve().parent.parent / requirements
    return shlex.join([sys.executable, "-m", "pip", "install", "-c", str(file), *packages])
