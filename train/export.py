#!/usr/bin/env python3
"""A checkpoint -> a Hugging Face folder: config.json, model.safetensors, tokenizer.

    python train/export.py output/run/checkpoints/step-00001000 OUT [--tokenizer DIR]

OUT loads with transformers' AutoModelForCausalLM.from_pretrained, and so in whatever serves Mistral models.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from train.checkpoint.files import CheckpointError, RunState, identity, problems, read_state
from train.data.encoder import TOKENIZER_FILES, TextEncoder
from train.data.format import TOKENIZER_FOLDER, DataError
from train.run_folder import EXPORTED_FROM


def export(path: Path, out: Path, tokenizer: Path) -> None:
    """Write the Hugging Face folder `out` from the verified checkpoint `path`, with the tokenizer in the folder
    `tokenizer`, of which nothing else is taken: that may be a model's. It is written beside `out` and then renamed, so
    that `out` is whole or absent; an older one is replaced. exported_from.json in it names the checkpoint.

    Raises CheckpointError: `path` holds weights that do not fit its configuration; `tokenizer` has none; `out` is a
    folder that no export wrote.
    """
    found = []
    files = [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
    if not {"tokenizer.model", "tokenizer.json"} & {file.name for file in files}:
        found.append(
            f"{tokenizer} has no tokenizer.model or tokenizer.json; --tokenizer DIR names a folder that has"
        )
    if out.exists() and not (out / EXPORTED_FROM).exists():
        found.append(f"{out} exists and is no export of this program; remove it or choose another folder")
    if found:
        raise CheckpointError("; ".join(found))
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    _write_model(path, partial)
    for file in files:
        shutil.copy2(file, partial / file.name)
    origin = {"checkpoint": path.name, "manifest_sha256": identity(path)}
    (partial / EXPORTED_FROM).write_text(json.dumps(origin) + "\n")
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)


def _write_model(path: Path, out: Path) -> None:
    """config.json and weights, in the dtype of training."""
    # Here: it takes seconds, which --help and a wrong path do not wait for, nor a run, whose ranks import this file.
    import torch
    from transformers import MistralConfig, MistralForCausalLM
    from transformers.utils import logging as transformers_logging

    from model.fp8.precision import DTYPES
    from train.checkpoint.load import read_hf_weights

    state = read_state(path)
    config = MistralConfig.from_dict(state.model_config)
    weights = read_hf_weights(path, config)
    dtype = DTYPES[state.train_config["precision"]["compute"]]
    with torch.device("meta"):
        model: Any = MistralForCausalLM(config)
    missing, unexpected = model.load_state_dict(
        {name: tensor.to(dtype) for name, tensor in weights.items()}, strict=False, assign=True
    )
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise CheckpointError(f"{path}: missing weights {missing}, unknown weights {unexpected}")
    model.tie_weights()
    model.config.dtype = dtype
    transformers_logging.disable_progress_bar()
    model.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="a folder step-NNNNNNNN")
    parser.add_argument("out", type=Path, help="the Hugging Face folder to write")
    parser.add_argument("--tokenizer", type=Path, help="folder of another one; default: the training data's")
    arguments = parser.parse_args()
    try:
        if found := problems(arguments.checkpoint):
            from train.checkpoint.load import others_than  # imports torch

            found.append("give the folder of a committed checkpoint, RUN/checkpoints/step-NNNNNNNN")
            raise CheckpointError("; ".join(found) + others_than(arguments.checkpoint))
        state = read_state(arguments.checkpoint)
        tokenizer = arguments.tokenizer or tokenizer_of(state.train_config["data"]["sources"])
        check_tokenizer(tokenizer, state, arguments.tokenizer is None)
        export(arguments.checkpoint, arguments.out.absolute(), tokenizer)
    except (CheckpointError, DataError, OSError) as error:
        parser.exit(1, f"error: {error}\n")
    print(f"wrote {arguments.out}")


def check_tokenizer(folder: Path, state: RunState, must_be_the_same: bool) -> None:
    """Raise DataError: the tokenizer in `folder` has more ids than the model, or is not the one of its training."""
    encoder = TextEncoder(folder)
    if encoder.vocab_size > (allowed := state.model_config["vocab_size"]):
        raise DataError(
            f"--tokenizer {folder} has a vocabulary of {encoder.vocab_size}, the model one of {allowed}: it is another "
            "model's"
        )
    trained = {source["tokenizer_sha256"] for source in state.data_fingerprint["sources"].values()}
    if must_be_the_same and encoder.sha256() not in trained:
        raise DataError(
            f"{folder} is not the tokenizer that the model was trained with: the data there are others by now; give "
            "that tokenizer as --tokenizer DIR"
        )


def tokenizer_of(sources: dict[str, str]) -> Path:
    """The tokenizer that prepare_data.py left with the data; that of all sources is the same."""
    return Path(next(iter(sources.values()))) / TOKENIZER_FOLDER


if __name__ == "__main__":
    main()
