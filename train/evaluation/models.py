"""Find the model to evaluate, plan its precision and variant (`plan_model`), and build it (`Plan.build`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.config import load_config, make_config, trained_length
from model.errors import UserError
from model.fp8.recipes import PrecisionConfig
from model.hf_folder import find_weights, read_hf_folder, stored_compute
from model.variants import VARIANTS, SpeedConfig
from train.checkpoint.files import (
    RUN_STATE,
    RunState,
    find_checkpoint,
    rank_file,
    read_state,
)
from train.data.encoder import TOKENIZER_FILES, TextEncoder, find_tokenizer
from train.data.format import read_manifest
from train.files import data_folder, sha256_file
from train.record.run_folder import RunFolder

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import MistralConfig

    from model.fp8.precision import Precision


class EvaluationError(UserError, ValueError):
    """The evaluation is not possible. `key` names the option, path or source."""

    code = "evaluation"


logger = logging.getLogger(__name__)
MAX_SEQ_LENGTH, BATCH_SIZE = 2048, 8  # maximum length in tokens and batch size for a Hugging Face folder


def find_model(given: Path) -> Path:
    """Return a checkpoint or Hugging Face folder.

    Args:
        given: A checkpoint, a Hugging Face folder, or an output_dir. For an output_dir, the newest undamaged checkpoint
            is returned, or the export if there is no checkpoint.

    Raises:
        EvaluationError, CheckpointError: There is no model, or no checkpoint is undamaged.
    """
    if (given / "config.json").is_file():
        return given
    if given.is_dir() and (checkpoint := find_checkpoint(given)):
        return checkpoint
    if ((export := RunFolder(given).hf) / "config.json").is_file():
        return export
    raise EvaluationError(
        f"MODEL {given} has no checkpoint and no config.json; pass the output_dir of a run, a checkpoint, or a Hugging "
        "Face folder, followed by DATA",
        code="not_a_model",
        key=str(given),
    )


@dataclass
class Plan:
    """The model to evaluate, and its precision, variant and sizes."""

    path: Path
    state: RunState | None  # None: a Hugging Face folder
    config: MistralConfig
    variant: str
    precision: PrecisionConfig
    max_seq_length: int
    batch_size: int
    document_mask: bool = False
    attention_backend: str = "auto"
    speed: SpeedConfig | None = None
    fallbacks: dict[str, str] = field(default_factory=dict)  # fallbacks: module -> recipe, see Precision

    def describe(self) -> str:
        """Return a description in one line."""
        fp8 = self.precision.compute == "fp8"
        how = f"FP8 ({self.precision.recipe} scaling)" if fp8 else self.precision.compute
        if self.fallbacks:
            how += f", {len(self.fallbacks)} modules with a fallback (precision.on_trouble)"
        trained = (
            "" if self.state is None else f", step {self.state.step}, {self.state.consumed_tokens:,} tokens"
        )
        return f"{self.path}{trained}: {self.variant} in {how}"

    def sources(self) -> dict[str, str]:
        """Return the training data of a checkpoint, name -> folder. {} for a Hugging Face folder."""
        trained_on = {} if self.state is None else self.state.train_config["data"]["sources"]
        return {name: data_folder(folder) for name, folder in trained_on.items()}

    def check_data(self, folders: Iterable[str], tokenizer: Path | None) -> None:
        """Check that prepared data use the tokenizer of the model.

        Raises:
            DataError, EvaluationError: Data cannot be read, or were prepared with another tokenizer.
        """
        known = self.tokenizers(tokenizer)
        for folder in folders:
            if known and read_manifest(folder).tokenizer_sha256 not in known:
                raise EvaluationError(
                    f"{folder} was prepared with another tokenizer; prepare it with the tokenizer of the model, or if "
                    f"both are equal, pass --tokenizer {Path(folder) / 'tokenizer'}",
                    code="another_tokenizer",
                    key=str(folder),
                )
            if not known:
                logger.info(
                    f"note: {self.path} has no tokenizer, so the tokenizer of {folder} was not checked"
                )

    def tokenizer_folder(self, given: Path | None) -> Path:
        """Return the folder of the tokenizer.

        This is `given`, or else the Hugging Face folder, the tokenizer of the training data, or that of the run's
        export.

        Raises:
            DataError: There is no tokenizer.
        """
        if given is not None:
            return given
        if self.state is None:
            return self.path
        return find_tokenizer(self.sources(), self.path.absolute().parent.parent / "hf")

    def tokenizers(self, given: Path | None) -> set[str]:
        """Return SHA-256 hashes of the model's tokenizer files; matching data have one of them. Empty if unknown."""
        if self.state is not None and given is None:
            return {s["tokenizer_sha256"] for s in self.state.data_fingerprint["sources"].values()}
        files = [self.tokenizer_folder(given) / name for name in TOKENIZER_FILES[:2]]
        return {sha256_file(file) for file in files if file.is_file()}

    def encoder(self, given: Path | None) -> TextEncoder:
        """Return the tokenizer of the model.

        Raises:
            EvaluationError: The tokenizer of the training data has changed.
        """
        encoder = TextEncoder(self.tokenizer_folder(given))
        if given is None and encoder.sha256() not in self.tokenizers(None):
            raise EvaluationError(
                f"{encoder.folder} is not the tokenizer that the model was trained with, because the data were "
                "prepared again; pass the original tokenizer with --tokenizer DIR",
                code="another_tokenizer",
                key=str(encoder.folder),
            )
        return encoder

    def build(self) -> tuple[nn.Module, Precision]:
        """Build the model in evaluation mode with its weights. Delayed scaling uses the scales of training (rank 0).

        Raises:
            ValueError, CheckpointError: Weights are missing, damaged, or of another model.
            PrecisionError, BackendError: This machine does not support the precision.
        """
        from model.build import choose_attention, make_modules
        from model.conversion import load_hf_state_dict
        from model.fp8.modules import apply_precision
        from model.fp8.precision import Precision
        from model.fp8.state import load_fp8_state

        precision = Precision(self.precision, fallbacks=self.fallbacks)
        weights = self._weights(precision.dtype)  # load before allocating memory on a GPU
        choose_attention(self.attention_backend, self.variant, precision, self.config, self.document_mask)
        speed = self.speed or SpeedConfig()
        model: Any = make_modules(self.config, self.variant, precision, speed, self.document_mask)
        apply_precision(model, precision)
        load_hf_state_dict(model, weights)
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


def plan_model(path: Path, compute: Any) -> Plan:
    """Plan the evaluation of a checkpoint or Hugging Face folder.

    By default, a checkpoint is evaluated in its training precision, and a Hugging Face folder as the transformers model
    in the dtype of its weights. In FP8, a model that was not trained in FP8 uses current scaling, which needs no
    history; a Hugging Face folder, and a checkpoint of a variant without Transformer Engine, then uses te_layer.

    Args:
        path: The checkpoint or Hugging Face folder.
        compute: The value of --precision, or None for the default.

    Raises:
        CheckpointError, ValueError: The configuration, or the weights of a Hugging Face folder, cannot be read.
    """
    if not (path / RUN_STATE).is_file():
        config = load_config(str(path))
        compute = compute or stored_compute(find_weights(path, config))
        length = min(MAX_SEQ_LENGTH, trained_length(config) or config.max_position_embeddings)
        variant = "te_layer" if compute == "fp8" else "hf"
        precision = PrecisionConfig(compute=compute, recipe="current")
        return Plan(path, None, config, variant, precision, length, BATCH_SIZE)
    state = read_state(path)
    trained = state.train_config
    precision, variant = PrecisionConfig(**state.precision), trained["model"]["variant"]
    precision.backend = "auto"  # select the backend of this machine
    fallbacks = state.fallbacks if precision.compute == "fp8" and compute in (None, "fp8") else {}
    if compute not in (None, precision.compute):
        precision = PrecisionConfig(compute=compute, recipe="current")
        if not VARIANTS[variant].te:
            variant = "te_layer" if compute == "fp8" else "hf"
    return Plan(
        path,
        state,
        make_config(state.model_config),
        variant,
        precision,
        trained["max_seq_length"],
        trained["per_device_eval_batch_size"] or trained["per_device_train_batch_size"],
        trained["data"]["document_mask"],
        trained["model"]["attention_backend"],
        SpeedConfig(**trained["speed"]),
        fallbacks,
    )
