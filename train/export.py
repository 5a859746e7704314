#!/usr/bin/env python3
"""A checkpoint -> a Hugging Face folder: config.json, model.safetensors, tokenizer.

    python train/export.py output/run/checkpoints/step-00001000 OUT [--tokenizer DIR]

OUT loads with transformers' AutoModelForCausalLM.from_pretrained, and so in whatever serves Mistral models.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import MistralConfig
from transformers import MistralForCausalLM as TransformersMistral
from transformers.utils import logging as transformers_logging

from model.precision import DTYPES
from train import checkpoint


def export(path: Path, out: Path, tokenizer: Path | None = None) -> None:
    """Write the Hugging Face folder `out` from the committed checkpoint `path`, with the files of the folder
    `tokenizer`.

    Raises CheckpointError: `path` does not verify, or holds weights that do not fit its configuration.
    """
    found = checkpoint.problems(path)
    if found:
        raise checkpoint.CheckpointError("; ".join(found))
    state = checkpoint.read_state(path)
    config = MistralConfig.from_dict(state.model_config)
    weights = checkpoint.read_hf_weights(path, config)
    dtype = DTYPES[state.train_config["precision"]["compute"]]
    with torch.device("meta"):
        model: Any = TransformersMistral(config)
    missing, unexpected = model.load_state_dict(
        {name: tensor.to(dtype) for name, tensor in weights.items()}, strict=False, assign=True
    )
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise checkpoint.CheckpointError(f"{path}: missing weights {missing}, unknown weights {unexpected}")
    model.tie_weights()
    model.config.dtype = dtype
    transformers_logging.disable_progress_bar()
    model.save_pretrained(out)
    if tokenizer is not None:
        for file in sorted(tokenizer.iterdir()):
            shutil.copy2(file, out / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="a folder step-NNNNNNNN")
    parser.add_argument("out", type=Path, help="the Hugging Face folder to write")
    parser.add_argument(
        "--tokenizer", type=Path, help="tokenizer folder to copy; default: the training data's"
    )
    arguments = parser.parse_args()
    try:
        tokenizer = arguments.tokenizer
        if tokenizer is None:
            sources = checkpoint.read_state(arguments.checkpoint).train_config["data"]["sources"]
            tokenizer = tokenizer_of(sources)
        export(arguments.checkpoint, arguments.out, tokenizer)
    except checkpoint.CheckpointError as error:
        parser.exit(1, f"error: {error}\n")
    print(f"wrote {arguments.out}")


def tokenizer_of(sources: dict[str, str]) -> Path | None:
    """The tokenizer that prepare_data.py left with the first of the data folders; None if it is not there."""
    folders = [Path(folder) / "tokenizer" for folder in sources.values()]
    return next((folder for folder in folders if folder.is_dir()), None)


if __name__ == "__main__":
    main()
