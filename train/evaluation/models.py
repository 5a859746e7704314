"""Find the model to evaluate, choose its precision and variant, and build it."""

from __future__ import annotations

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
    trained_tokenizer,
)
from train.data.encoder import check_model_tokenizer
from train.data.format import read_manifest
from train.files import data_folder
from train.record.run_folder import RunFolder

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import MistralConfig

    from model.fp8.precision import Precision


class EvaluationError(UserError, ValueError):
    """Error raised if a model cannot be evaluated. `key` is the option, path or data source that caused the error."""

    code = "evaluation"


# Default values for a Hugging Face folder: the upper limit of the sequence length in tokens, and the batch size.
MAX_SEQ_LENGTH, BATCH_SIZE = 2048, 8


def find_model(given: Path) -> Path:
    """Return the folder of the model to evaluate: a checkpoint or a Hugging Face folder.

    Args:
        given: A checkpoint, a Hugging Face folder, or the output_dir of a run. For an output_dir, the result is the
            newest undamaged checkpoint, or the exported model if there is no checkpoint.

    Raises:
        EvaluationError, CheckpointError: If there is no model, or all checkpoints are damaged.
    """
    if (given / "config.json").is_file():
        return given
    if given.is_dir() and (checkpoint := find_checkpoint(given)):
        return checkpoint
    if ((export := RunFolder(given).hf) / "config.json").is_file():
        return export
    raise EvaluationError(
        f"MODEL {given} contains no checkpoint and no config.json; pass the output_dir of a run, a checkpoint, or a "
        "Hugging Face folder as MODEL, followed by DATA",
        code="not_a_model",
        key=str(given),
    )


@dataclass
class Plan:
    """The model to evaluate, with its precision, variant and batch shape."""

    path: Path
    state: RunState | None  # None for a Hugging Face folder
    config: MistralConfig
    variant: str
    precision: PrecisionConfig
    max_seq_length: int
    batch_size: int
    document_mask: bool = False
    attention_backend: str = "auto"
    speed: SpeedConfig | None = None
    fallbacks: dict[str, str] = field(default_factory=dict)  # {module: fallback recipe}, see Precision

    def describe(self) -> str:
        """Return a description of the model and its precision in one line."""
        fp8 = self.precision.compute == "fp8"
        how = f"FP8 ({self.precision.recipe} scaling)" if fp8 else self.precision.compute
        if self.fallbacks:
            how += f", {len(self.fallbacks)} modules with a fallback to a safer recipe or bf16 (precision.on_trouble)"
        trained = (
            "" if self.state is None else f", step {self.state.step}, {self.state.consumed_tokens:,} tokens"
        )
        return f"{self.path}{trained}: {self.variant} in {how}"

    def sources(self) -> dict[str, str]:
        """Return the training data of a checkpoint as {source name: folder}, or {} for a Hugging Face folder."""
        trained_on = {} if self.state is None else self.state.train_config["data"]["sources"]
        return {name: data_folder(folder) for name, folder in trained_on.items()}

    def check_data(self, folders: Iterable[str], tokenizer: Path | None) -> None:
        """Check that data were prepared with the model's tokenizer.

        Args:
            folders: Folders with prepared data.
            tokenizer: Folder of the model's tokenizer, or None to find the tokenizer.

        Raises:
            DataError: If the data cannot be read, or were prepared with a different tokenizer.
        """
        trained_with = self.state.tokenizers if self.state and tokenizer is None else ()
        for folder in folders:
            if read_manifest(folder).tokenizer_sha256 not in trained_with:
                check_model_tokenizer(folder, self.tokenizer_folder(tokenizer), str(folder))

    def tokenizer_folder(self, given: Path | None) -> Path:
        """Return the folder that contains the model's tokenizer.

        Args:
            given: Folder passed as --tokenizer, or None to use the Hugging Face folder, the training data or the
                exported model.

        Raises:
            DataError: If there is no tokenizer, or the tokenizer found was not used in training.
        """
        if given is not None:
            return given
        if self.state is None:
            return self.path
        return trained_tokenizer(self.path, self.state)

    def build(self) -> tuple[nn.Module, Precision]:
        """Build the model in evaluation mode, load its weights, and return the model and its precision.

        With delayed scaling, the model uses the FP8 scales that rank 0 used in training.

        Raises:
            ValueError, CheckpointError: If weights are missing or damaged, or belong to a different model.
            PrecisionError, BackendError: If this host does not support the precision.
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
        from model.te_reference.quantize import Quantized
        from train.checkpoint.load import read_hf_weights

        if self.state is not None:
            return read_hf_weights(self.path, self.config)
        weights = read_hf_folder(self.path, self.config, dtype)
        return {n: w.dequantize(dtype) if isinstance(w, Quantized) else w for n, w in weights.items()}


def plan_model(path: Path, compute: Any) -> Plan:
    """Choose the precision and the model variant for evaluating a checkpoint or Hugging Face folder.

    By default, a checkpoint is evaluated in its training precision, and a Hugging Face folder in the dtype of its
    weights with the transformers model. If FP8 is requested for a model that was not trained in FP8, the recipe is
    current scaling, which needs no amax history. If the variant of this model does not use Transformer Engine, te_layer
    (Transformer Engine's fused transformer layer) is used instead.

    Args:
        path: The checkpoint or Hugging Face folder.
        compute: The value of --precision, or None for the default.

    Raises:
        CheckpointError, ValueError: If the configuration, or the weights in a Hugging Face folder, cannot be read.
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
    precision.backend = "auto"  # select the backend for this host
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
