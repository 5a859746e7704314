"""MODEL -> a checkpoint or a Hugging Face folder, what it is evaluated in (`plan`), and the modules (`Plan.build`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.config import load_config, trained_length
from model.errors import UserError
from model.fp8.recipes import PrecisionConfig
from model.hf_folder import find_weights, read_hf_folder, stored_compute
from model.variants import VARIANTS, SpeedConfig
from train.checkpoint.files import (
    RUN_STATE,
    CheckpointError,
    RunState,
    find_checkpoint,
    rank_file,
    read_state,
)
from train.data.encoder import TOKENIZER_FILES, TextEncoder, tokenizer_of
from train.data.format import read_manifest
from train.files import data_folder, sha256_file
from train.record.run_folder import RunFolder

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import MistralConfig

    from model.fp8.precision import Precision


class EvaluationError(UserError, ValueError):
    """What was asked for cannot be evaluated; `key` names the option, the path or the source."""

    code = "evaluation"


logger = logging.getLogger(__name__)
MAX_SEQ_LENGTH, BATCH_SIZE = 2048, 8  # at most, and of a Hugging Face folder


def find_model(given: Path) -> Path:
    """Return the checkpoint or Hugging Face folder `given`, or of a run its newest good checkpoint, else its export.
    Raises EvaluationError, CheckpointError."""
    if (given / "config.json").is_file():
        return given
    try:
        checkpoint = find_checkpoint(given) if given.is_dir() else None
    except CheckpointError as error:
        raise CheckpointError(f"MODEL {given}: {error}") from error
    if checkpoint:
        return checkpoint
    if ((export := RunFolder(given).hf) / "config.json").is_file():
        return export
    raise EvaluationError(
        f"MODEL {given} has no checkpoint and no config.json; pass a run's output_dir, a checkpoint, or a Hugging Face "
        "folder, and DATA after it",
        code="not_a_model",
        key=str(given),
    )


@dataclass
class Plan:
    """What is evaluated, and as what."""

    path: Path
    state: RunState | None  # of a checkpoint
    config: MistralConfig
    variant: str
    precision: PrecisionConfig
    max_seq_length: int
    batch_size: int
    document_mask: bool = False
    attention_backend: str = "auto"
    speed: SpeedConfig | None = None
    levels: dict[str, str] = field(default_factory=dict)  # of modules, see Precision

    def describe(self) -> str:
        """One line."""
        fp8 = self.precision.compute == "fp8"
        how = f"FP8 ({self.precision.recipe} scaling)" if fp8 else self.precision.compute
        if self.levels:
            how += f", {len(self.levels)} modules at the levels that precision.on_trouble has taken them to"
        trained = (
            "" if self.state is None else f", step {self.state.step}, {self.state.consumed_tokens:,} tokens"
        )
        return f"{self.path}{trained}: {self.variant} in {how}"

    def sources(self) -> dict[str, str]:
        """Return the data folders that a checkpoint was trained on, by name; {} for a Hugging Face folder."""
        trained_on = {} if self.state is None else self.state.train_config["data"]["sources"]
        return {name: data_folder(folder) for name, folder in trained_on.items()}

    def changed_data(self, folders: Iterable[str]) -> list[str]:
        """Return those of `folders` that the checkpoint was trained on and that have other tokens now."""
        names = {os.path.realpath(folder): name for name, folder in self.sources().items()}
        fingerprints = self.state.data_fingerprint["sources"] if self.state else {}
        return [
            folder
            for folder in folders
            if (name := names.get(os.path.realpath(folder))) is not None
            and read_manifest(folder).split_digest("train") != fingerprints[name]["shards_sha256"]
        ]

    def check_data(self, folders: Iterable[str], tokenizer: Path | None) -> None:
        """Raises DataError, EvaluationError: prepared data cannot be read, or have ids of another tokenizer than the
        model's."""
        known = self.tokenizers(tokenizer)
        for folder in folders:
            manifest = read_manifest(folder)
            if known and manifest.tokenizer_sha256 not in known:
                raise EvaluationError(
                    f"{folder} was prepared with another tokenizer than the model's: prepare it with the model's, or "
                    f"if both are equal, pass --tokenizer {Path(folder) / 'tokenizer'}",
                    code="another_tokenizer",
                    key=str(folder),
                )
            if manifest.vocab_size > self.config.vocab_size:
                raise EvaluationError(
                    f"{folder} has a vocabulary of {manifest.vocab_size}, the model one of {self.config.vocab_size}: "
                    "prepare it with the model's tokenizer",
                    code="another_tokenizer",
                    key=str(folder),
                )
            if not known:
                logger.info(f"note: {self.path} has no tokenizer to compare with that of {folder}")

    def tokenizer_folder(self, given: Path | None) -> Path:
        """Return `given`, the Hugging Face folder, or the tokenizer of the training data or of the run's export. Raises
        DataError: there is none."""
        if given is not None:
            return given
        if self.state is None:
            return self.path
        return tokenizer_of(self.sources(), self.path.absolute().parent.parent / "hf")

    def tokenizers(self, given: Path | None) -> set[str]:
        """Return the sha256 of the files that define the model's token ids, of which data have one; {} if unknown."""
        if self.state is not None and given is None:
            return {s["tokenizer_sha256"] for s in self.state.data_fingerprint["sources"].values()}
        files = [self.tokenizer_folder(given) / name for name in TOKENIZER_FILES[:2]]
        return {sha256_file(file) for file in files if file.is_file()}

    def encoder(self, given: Path | None) -> TextEncoder:
        """The model's tokenizer. Raises EvaluationError: none there, or it is another model's."""
        encoder = TextEncoder(self.tokenizer_folder(given))
        if encoder.vocab_size > self.config.vocab_size:
            raise EvaluationError(
                f"--tokenizer {encoder.folder} has a vocabulary of {encoder.vocab_size}, the model one of "
                f"{self.config.vocab_size}: it is another model's",
                code="another_tokenizer",
                key=str(encoder.folder),
            )
        if given is None and encoder.sha256() not in self.tokenizers(None):
            raise EvaluationError(
                f"{encoder.folder} is not the tokenizer that the model was trained with: the data there are others by "
                "now; give that tokenizer as --tokenizer DIR",
                code="another_tokenizer",
                key=str(encoder.folder),
            )
        return encoder

    def build(self) -> tuple[nn.Module, Precision]:
        """The model with its weights, and in delayed scaling the scales of training (rank 0's), ready to evaluate.

        Raises EvaluationError, CheckpointError: missing, damaged or other weights, values that are not finite;
        PrecisionError, BackendError: this machine does not have the precision.
        """
        from model.build import choose_attention, make_modules
        from model.conversion import load_hf_state_dict
        from model.fp8.modules import apply_precision
        from model.fp8.precision import Precision
        from model.fp8.state import load_fp8_state

        precision = Precision(self.precision, levels=self.levels)
        weights = self._weights(precision.dtype)  # before anything is on a GPU
        choose_attention(self.attention_backend, self.variant, precision, self.config, self.document_mask)
        speed = self.speed or SpeedConfig()
        model: Any = make_modules(self.config, self.variant, precision, speed, self.document_mask)
        apply_precision(model, precision)
        try:
            load_hf_state_dict(model, weights)
        except ValueError as error:
            raise EvaluationError(f"{self.path}: {error}", code="weights", key=str(self.path)) from error
        wrong = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
        if wrong:
            why = "the training had gone wrong by then; take an earlier checkpoint"
            if self.precision.compute == "fp16":
                why = "float16 ends at 65504; give --precision bf16 or fp32"
            raise EvaluationError(
                f"{self.path}: {len(wrong)} weights have values that are not finite, such as {wrong[0]}: {why}",
                code="weights_not_finite",
                key=wrong[0],
            )
        if precision.has_state:
            from train.checkpoint.reshard import load_shard

            load_fp8_state(model, precision, load_shard(self.path / rank_file(0))["fp8"])
        return model.eval(), precision

    def _weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        from model.fp8.hf_fp8 import Quantized
        from train.checkpoint.load import read_hf_weights

        if self.state is not None:
            return read_hf_weights(self.path, self.config)
        weights = read_hf_folder(self.path, self.config, dtype)
        return {n: w.dequantize(dtype) if isinstance(w, Quantized) else w for n, w in weights.items()}


def plan_model(path: Path, compute: str | None) -> Plan:
    """Return how to evaluate the checkpoint or Hugging Face folder `path`: as it was trained, or with `compute`.

    A Hugging Face folder is transformers' model in the dtype of its weights. In FP8 it, and a checkpoint that was not
    trained in FP8, is te_layer with current scaling, which needs no history.

    Raises CheckpointError, ValueError: its configuration cannot be read, or the weights of a Hugging Face folder.
    """
    from transformers import MistralConfig

    def converted(compute: Any) -> PrecisionConfig:
        return (
            PrecisionConfig(compute=compute, recipe="current")
            if compute == "fp8"
            else PrecisionConfig(compute=compute)
        )

    if not (path / RUN_STATE).is_file():
        config = load_config(str(path))
        compute = compute or stored_compute(find_weights(path, config))
        length = min(MAX_SEQ_LENGTH, trained_length(config) or config.max_position_embeddings)
        variant = "te_layer" if compute == "fp8" else "hf"
        return Plan(path, None, config, variant, converted(compute), length, BATCH_SIZE)
    state = read_state(path)
    trained = state.train_config
    precision, variant = PrecisionConfig(**state.precision), trained["model"]["variant"]
    precision.backend = "auto"  # this machine's
    levels = state.levels if precision.compute == "fp8" and compute in (None, "fp8") else {}
    if compute not in (None, precision.compute):
        precision = converted(compute)
        if not VARIANTS[variant].te:
            variant = "te_layer" if compute == "fp8" else "hf"
    return Plan(
        path,
        state,
        MistralConfig.from_dict(state.model_config),
        variant,
        precision,
        trained["max_seq_length"],
        trained["per_device_eval_batch_size"] or trained["per_device_train_batch_size"],
        trained["data"]["document_mask"],
        trained["model"]["attention_backend"],
        SpeedConfig(**trained["speed"]),
        levels,
    )
