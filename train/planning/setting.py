"""Collect the settings that determine the memory and speed of a run, such as precision, batch size and ZeRO stage.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import gcd
from typing import Any

from model.config import head_dim, layer_matrix_parameters, num_parameters
from model.errors import UserError
from model.fp8.recipes import (
    FULL_STATES,
    RECIPES,
    PrecisionConfig,
    fits_fp8,
    fp8_multiple,
    optimizer_state_bytes,
)
from model.variants import VARIANTS, GradientCheckpointing
from train.config.arguments import TrainingArguments
from train.config.ds_config import offloads_optimizer
from train.config.schedule import phase_precisions, phase_shares

# DeepSpeed's default values for reduce_bucket_size and stage3_max_live_parameters, in elements.
REDUCE_BUCKET, MOST_LIVE_PARAMETERS = 500_000_000, 1_000_000_000
ZERO_3_BUCKET = 200_000_000  # reduce_bucket_size in ds_config_zero3.json, in elements
GPUS_OF_A_NODE = 8
PLANNED = {"fp8", "bf16"}  # values of precision.compute for which memory and speed can be predicted


def layer_widths(sizes: Any) -> tuple[int, int, int, int, int]:
    """Return the widths of a model's tensors.

    Returns:
        The hidden size H, the intermediate size I, the total width q of all query heads, the total width kv of all key
        heads, and the vocabulary size V.
    """
    D = head_dim(sizes)
    q, kv = sizes.num_attention_heads * D, sizes.num_key_value_heads * D
    return sizes.hidden_size, sizes.intermediate_size, q, kv, sizes.vocab_size


class PlanError(UserError):
    """An error raised if no plan can be made for the requested run, for example because the model does not fit."""

    code = "plan"


@dataclass(frozen=True)
class Setting:
    """The settings that determine the GPU memory and speed of a training run.

    If the run has a precision.schedule, the fields that differ between its phases have the values of the first phase.
    `phases` returns one setting per phase. `is_planned` is true if memory and speed can be predicted.
    """

    args: TrainingArguments  # the other fields take precedence over these values
    sizes: Any
    compute: str
    recipe: str
    fp8_layers: int  # number of layers that compute their GEMMs in FP8
    fp8_head: bool
    fp8_head_gradients: bool  # a bf16 lm_head computes its gradients in FP8
    health: bool  # FP8 health checks are on, which need a second CUDA graph
    cuda_graphs: bool
    recompute: GradientCheckpointing  # gradient_checkpointing
    micro_batch: int
    eval_batch: int | None  # samples per evaluation batch; None if equal to micro_batch, 0 without evaluation
    seq_length: int
    accumulation: int
    ranks: int
    zero_stage: int
    float32_gradients: bool  # gradients of 16-bit weights accumulate in float32
    optimizer_states: str
    moments: str  # data type of AdamW's moments, a key of MOMENT_BYTES
    reduces_in_float32: bool  # ranks reduce gradients in float32 (precision.gradient_communication)
    reduce_bucket: int  # elements
    overlap_comm: bool
    offloads: bool  # optimizer states are in host memory (zero_optimization.offload_optimizer)
    pins: bool  # offloaded tensors that are copied from or to the GPU are in pinned memory
    # For each phase of precision.schedule, its fraction of the steps and its `precision_fields`. Empty without a
    # schedule.
    schedule: tuple[tuple[float, dict[str, Any]], ...] = ()

    @classmethod
    def from_run(
        cls,
        args: TrainingArguments,
        ds_config: dict[str, Any],
        sizes: Any,
        ranks: int,
        max_steps: int | None = None,
    ) -> Setting:
        """Create the setting for a training run.

        Args:
            args: The resolved training arguments.
            ds_config: The result of `resolve_ds_config` for these arguments.
            sizes: The model configuration.
            ranks: The number of ranks.
            max_steps: The number of steps in the run. Defaults to args.max_steps.
        """
        sections = zip(
            phase_shares(args, max_steps or args.max_steps), phase_precisions(args.precision), strict=True
        )
        schedule = tuple((share, precision_fields(section, sizes)) for share, section in sections if share)
        precision, zero = args.precision, ds_config["zero_optimization"]
        eval_batch = args.per_device_eval_batch_size or args.per_device_train_batch_size
        return cls(
            **schedule[0][1],
            args=args,
            sizes=sizes,
            cuda_graphs=args.speed.cuda_graphs and zero["stage"] < 3,
            recompute=args.gradient_checkpointing,
            micro_batch=args.per_device_train_batch_size,
            eval_batch=None if eval_batch == args.per_device_train_batch_size else eval_batch,
            seq_length=args.max_seq_length,
            accumulation=args.gradient_accumulation_steps or 1,
            ranks=ranks,
            zero_stage=zero["stage"],
            float32_gradients=ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
            and zero["stage"] >= 1
            and precision.compute in PLANNED,
            optimizer_states=precision.optimizer_states,
            moments=precision.moment_type,
            reduces_in_float32=ds_config.get("communication_data_type") == "fp32",
            reduce_bucket=int(zero.get("reduce_bucket_size", REDUCE_BUCKET)),
            overlap_comm=bool(zero.get("overlap_comm", zero["stage"] == 3)),
            offloads=offloads_optimizer(ds_config),
            pins=(zero.get("offload_optimizer") or {}).get("pin_memory", True),
            schedule=schedule if len(schedule) > 1 else (),
        )

    @property
    def phases(self) -> list[tuple[float, Setting]]:
        """Return a pair for each phase of precision.schedule: its fraction of the steps, and its setting.

        Without a schedule, the whole run is one phase.
        """
        return [(share, replace(self, schedule=(), **own)) for share, own in self.schedule] or [(1.0, self)]

    @property
    def is_planned(self) -> bool:
        """Return whether memory and speed can be predicted.

        This is possible for the model variants te_layer and te_linear in FP8 or bf16.
        """
        return VARIANTS[self.args.model.variant].te and {phase.compute for _, phase in self.phases} <= PLANNED

    @property
    def bf16_optimizer(self) -> bool:
        """Return whether DeepSpeed uses its BF16_Optimizer class, which accumulates gradients in float32."""
        return self.zero_stage == 1 and self.float32_gradients

    @property
    def main_grad(self) -> bool:
        """Return whether the weight-gradient GEMMs accumulate gradients directly in float32 buffers."""
        return self.args.speed.main_grad and self.bf16_optimizer

    @property
    def fp8(self) -> bool:
        """Return whether the run trains in FP8."""
        return self.compute == "fp8"

    @property
    def micro_batch_unit(self) -> int:
        """Return the smallest valid micro-batch size in samples. All valid sizes are multiples of this number.

        The number of rows in an FP8 GEMM (batch size x sequence length) must be divisible by 16, or by 32 with mxfp8.
        """
        multiple = fp8_multiple(self.recipe)
        return multiple // gcd(multiple, self.seq_length) if self.fp8 else 1

    @property
    def packs(self) -> bool:
        """Return whether AdamW's states are stored in a packed format, which takes less memory than float32."""
        return self.bf16_optimizer and self.optimizer_bytes < FULL_STATES

    @property
    def optimizer_bytes(self) -> float:
        """Return the size of the AdamW optimizer states, in bytes per parameter."""
        if not self.bf16_optimizer:
            return FULL_STATES - (4 if self.compute == "fp32" else 0)
        return optimizer_state_bytes(self.optimizer_states, self.moments)

    @property
    def node_ranks(self) -> int:
        """Return the number of ranks on a node with GPUS_OF_A_NODE GPUs."""
        return min(self.ranks, GPUS_OF_A_NODE)

    @property
    def parameters(self) -> int:
        """Return the number of parameters in the model."""
        return num_parameters(self.sizes)

    @property
    def tokens(self) -> int:
        """Return the number of tokens in a micro-batch."""
        return self.micro_batch * self.seq_length

    @property
    def step_tokens(self) -> int:
        """Return the number of tokens per step, summed over all ranks."""
        return self.tokens * self.accumulation * self.ranks

    @property
    def layer_matrices(self) -> int:
        """Return the number of elements in the weight matrices of a decoder layer. Norm weights are excluded."""
        return layer_matrix_parameters(self.sizes) // self.sizes.num_hidden_layers

    @property
    def keeps_fp8_weights(self) -> bool:
        """Return whether FP8 copies of all weights are kept between the micro-batches of a step."""
        return self.fp8 and self.accumulation > 1 and self.zero_stage < 3

    @property
    def fp8_parameters(self) -> int:
        """Return the number of weights that are operands of an FP8 GEMM in the forward pass."""
        head = self.sizes.hidden_size * self.sizes.vocab_size
        return self.layer_matrices * self.fp8_layers + head * self.fp8_head

    @property
    def gathers_fp8(self) -> bool:
        """Return whether ZeRO 3 gathers FP8 weights in 8 bits."""
        return self.fp8 and self.zero_stage == 3 and self.args.precision.fp8_weight_gather

    @property
    def gathered_bytes(self) -> float:
        """Return the number of bytes per model parameter that ZeRO 3 gathers in a forward or backward pass."""
        return 2 - self.fp8_parameters / self.parameters * self.gathers_fp8

    def describe(self) -> str:
        """Describe the precision, ZeRO stage, batch size and other settings in one line of text."""
        precisions = [
            (f"FP8 {phase.recipe}" if phase.fp8 else phase.compute)
            + f" ({share:.3g} of all steps)" * bool(self.schedule)
            for share, phase in self.phases
        ]
        parts = [
            f"{self.args.model.variant} {', then '.join(precisions)}",
            *["CUDA graphs"] * self.cuda_graphs,
            *["Muon"] * (self.args.optim == "muon"),
            f"ZeRO {self.zero_stage}" + " with 8-bit gather" * self.gathers_fp8,
            *[f"optimizer_states {self.optimizer_states}"] * self.packs,
            *["optimizer offload"] * self.offloads,
            *["recomputation of SwiGLU"] * (self.recompute == "mlp"),
            *["recomputation"] * (self.recompute is True),
            f"micro-batch {self.micro_batch} x {self.seq_length}",
            f"accumulation {self.accumulation}",
            f"{self.ranks} GPUs",
        ]
        return ", ".join(parts)


def precision_fields(precision: PrecisionConfig, sizes: Any) -> dict[str, Any]:
    """Return the fields of a `Setting` that can differ between the phases of precision.schedule."""
    fp8 = precision.compute == "fp8"

    def is_bf16(*names: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in names for pattern in precision.bf16_modules)

    layers = sizes.num_hidden_layers
    kept = sum(is_bf16("model", "model.layers", f"model.layers.{i}") for i in range(layers))
    return {
        "compute": precision.compute,
        "recipe": precision.recipe,
        "fp8_layers": (layers - kept) if fp8 else 0,
        "fp8_head": fp8 and not is_bf16("lm_head"),
        "fp8_head_gradients": precision.head_gradients and fits_fp8(sizes.hidden_size, sizes.vocab_size),
        "health": fp8 and precision.health_steps > 0 and "health_steps" in RECIPES[precision.recipe].knobs,
    }
