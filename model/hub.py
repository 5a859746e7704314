"""Download models and tokenizers from the Hugging Face Hub, given as org/name."""

from __future__ import annotations

import re
from pathlib import Path

from model.errors import UserError

FILES = ["*.json", "*.jinja", "tokenizer.model"]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class HubError(UserError, ValueError):
    """An error raised when a Hugging Face Hub repository cannot be downloaded."""

    code = "hub"


def local_folder(name: str, weights: bool = True) -> str:
    """Download a Hugging Face Hub repository and return its local folder. Local paths are returned unchanged.

    `name` is a repository if it has the form org/name and is not a local path. Several processes on a node may call
    this function at the same time, because huggingface_hub locks each file while downloading.

    Args:
        weights: whether to also download *.safetensors.

    Raises HubError if the download fails.
    """
    path = Path(name)
    if not HUB_ID.fullmatch(name) or path.exists() or path.parent.exists() or path.suffix == ".json":
        return name
    from huggingface_hub import snapshot_download  # takes half a second

    try:
        return snapshot_download(
            name,
            allow_patterns=[*FILES, *["*.safetensors"] * weights],
            ignore_patterns=["*/*", "consolidated*"],
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise HubError(
            f"{name} is not a local folder and cannot be downloaded from the Hugging Face Hub ({reason}). Check the "
            f"name, or run `hf download {name} --local-dir DIR` on a host with access to the Hub and pass DIR",
            key=name,
        ) from error
