"""What memory and speed of a run follow from, without torch: sizes of the model, precision, batch, ZeRO, ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import gcd
from typing import Any

from model.config import head_dim, num_parameters
from model.fp8.recipes import FP8_TRAIN_ROW_MULTIPLE, FULL_STATES, PrecisionConfig, bytes_of_states, fits_fp8
from model.variants import FLASH_HEAD_DIMS, VARIANTS
from train.config.arguments import TrainingArguments
from train.config.schedule import precisions_of, stage_shares

# DeepSpeed's defaults, in elements.
REDUCE_BUCKET, MOST_LIVE_PARAMETERS = 500_000_000, 1_000_000_000
ZERO_3_BUCKET = 50_000_000  # ds_config_zero3.json's


def widths_of(sizes: Any) -> tuple[int, int, int, int, int]:
    """(H hidden, I intermediate, q all query heads, kv all key heads, V vocabulary), elements of a token."""
    D = head_dim(sizes)
    q, kv = sizes.num_attention_heads * D, sizes.num_key_value_heads * D
    return sizes.hidden_size, sizes.intermediate_size, q, kv, sizes.vocab_size


def can_accumulate_in_float32(zero_stage: int, compute: str) -> bool:
    """Return whether data_types.grad_accum_dtype fp32 adds memory: 16-bit weights at a ZeRO stage that takes it."""
    return compute in ("fp8", "bf16") and zero_stage >= 1 or compute == "fp16" and zero_stage >= 2


@dataclass(frozen=True)
class Setting:
    """One rank of a run. Sizes as the shape suffixes of model/ name them; buckets in elements. What the stages of
    precision.schedule have otherwise is that of the first one: `in_each_stage`."""

    sizes: Any
    variant: str
    compute: str
    recipe: str
    fp8_layers: int  # layers whose matrix products are FP8
    fp8_head: bool
    fp8_head_gradients: bool  # of a head in bf16
    compiled: bool
    fused_cross_entropy: bool
    fused_swiglu: bool  # te_linear's, which computes silu(gate) again in its backward (model/fused/swiglu.py)
    main_grad_asked: bool  # speed.main_grad, wherever there are float32 gradients (`main_grad`)
    cuda_graphs: bool
    health: bool  # precision.health_steps: a look at FP8's operands, which has a CUDA graph of its own
    recompute: bool
    flash: bool  # FlashAttention is named
    deterministic: bool
    optim: str
    micro_batch: int
    eval_batch: int | None  # samples of an evaluation's; None: as micro_batch, 0: there is none
    seq_length: int
    accumulation: int
    ranks: int
    zero_stage: int
    float32_gradients: bool  # micro-batches accumulate in float32, weights have 16 bits
    optimizer_states: str  # as the key of precision; can be packed where there are float32 gradients
    moments: str  # the type of AdamW's moments, a key of MOMENT_BYTES
    adam_beta2: float
    reduces_in_float32: bool  # precision.gradient_communication
    reduce_bucket: int
    overlap_comm: bool
    stages: tuple[
        tuple[float, dict[str, Any]], ...
    ] = ()  # share of the steps, and fields that are otherwise in it

    @classmethod
    def of(
        cls,
        args: TrainingArguments,
        ds_config: dict[str, Any],
        sizes: Any,
        ranks: int,
        max_steps: int | None = None,
    ) -> Setting:
        """`ds_config`: of `resolve_ds_config` for these arguments on so many ranks. max_steps: where the run is not as
        long as the arguments say."""
        shares = stage_shares(args, max_steps or args.max_steps)
        stages = tuple(
            (share, of_precision(args.model.variant, section, sizes))
            for share, section in zip(shares, precisions_of(args.precision), strict=True)
            if share
        )
        precision, speed, te = args.precision, args.speed, VARIANTS[args.model.variant].te
        zero = ds_config["zero_optimization"]
        stage = zero["stage"]
        wanted = ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
        evaluated = args.per_device_eval_batch_size or args.per_device_train_batch_size
        return cls(
            **stages[0][1],
            sizes=sizes,
            variant=args.model.variant,
            compiled=args.model.variant == "torchao" if args.model.compile is None else args.model.compile,
            fused_cross_entropy=te and speed.fused_cross_entropy and precision.compute != "fp16",
            fused_swiglu=args.model.variant == "te_linear" and speed.fused_swiglu,
            main_grad_asked=speed.main_grad,
            cuda_graphs=te and speed.cuda_graphs and stage < 3,
            recompute=args.gradient_checkpointing,
            flash=args.model.attention_backend == "flash"
            or (args.model.attention_backend == "auto" and head_dim(sizes) in FLASH_HEAD_DIMS),
            deterministic=args.full_determinism,
            optim=args.optim,
            micro_batch=args.per_device_train_batch_size,
            eval_batch=None if evaluated == args.per_device_train_batch_size else evaluated,
            seq_length=args.max_seq_length,
            accumulation=args.gradient_accumulation_steps or 1,
            ranks=ranks,
            zero_stage=stage,
            float32_gradients=wanted and can_accumulate_in_float32(stage, precision.compute),
            optimizer_states=precision.optimizer_states,
            moments=precision.moment_type,
            adam_beta2=args.adam_beta2,
            reduces_in_float32=ds_config.get("communication_data_type") == "fp32",
            reduce_bucket=int(zero.get("reduce_bucket_size", REDUCE_BUCKET)),
            overlap_comm=bool(zero.get("overlap_comm", stage == 3)),
            stages=stages if len(stages) > 1 else (),
        )

    @property
    def in_each_stage(self) -> list[tuple[float, Setting]]:
        """(share of the steps, what runs in it) of the stages of precision.schedule; without one, all of it."""
        return [(share, replace(self, stages=(), **own)) for share, own in self.stages] or [(1.0, self)]

    @property
    def te(self) -> bool:
        return VARIANTS[self.variant].te

    @property
    def bf16_optimizer(self) -> bool:
        """Whether DeepSpeed steps with its BF16_Optimizer."""
        return self.zero_stage == 1 and self.float32_gradients

    @property
    def main_grad(self) -> bool:
        """Whether GEMMs add into the float32 gradients."""
        return self.te and self.main_grad_asked and self.bf16_optimizer

    @property
    def fp8(self) -> bool:
        return self.compute == "fp8"

    @property
    def micro_batch_unit(self) -> int:
        """Samples of a micro-batch come in multiples of it: FP8 takes FP8_TRAIN_ROW_MULTIPLE tokens or more of them."""
        return FP8_TRAIN_ROW_MULTIPLE // gcd(FP8_TRAIN_ROW_MULTIPLE, self.seq_length) if self.fp8 else 1

    @property
    def precision(self) -> str:
        """In words."""
        return f"FP8 {self.recipe}" if self.fp8 else self.compute

    @property
    def sharing(self) -> str:
        """What was chosen of the memory, in words."""
        states = f", optimizer_states {self.optimizer_states}" * self.packs
        return f"ZeRO {self.zero_stage}{states}{', recomputation' * self.recompute}, micro-batch {self.micro_batch}"

    @property
    def packs(self) -> bool:
        """Whether AdamW's states are packed."""
        return self.compute != "fp32" and self.optimizer_bytes < FULL_STATES

    @property
    def element(self) -> int:
        """Bytes of a weight and of an activation that is not FP8."""
        return 4 if self.compute == "fp32" else 2

    @property
    def optimizer_bytes(self) -> float:
        """Of a parameter: AdamW's states."""
        if self.compute == "fp32" or not self.bf16_optimizer:
            return FULL_STATES - (4 if self.compute == "fp32" else 0)
        return bytes_of_states(self.optimizer_states, self.moments)

    @property
    def parameters(self) -> int:
        return num_parameters(self.sizes)

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.seq_length

    @property
    def eval_tokens(self) -> int:
        """Of a batch of an evaluation."""
        return (self.micro_batch if self.eval_batch is None else self.eval_batch) * self.seq_length

    @property
    def step_tokens(self) -> int:
        """Of a step, over all ranks."""
        return self.tokens * self.accumulation * self.ranks

    @property
    def widths(self) -> tuple[int, int, int, int, int]:
        return widths_of(self.sizes)

    @property
    def layer_matrices(self) -> int:
        """Weights of the matrices of a layer."""
        H, I, q, kv, _ = self.widths  # noqa: E741
        return H * (2 * q + 2 * kv) + 3 * H * I

    @property
    def zero_stages(self) -> tuple[int, ...]:
        """That are recommended: all that share the optimizer between ranks; with Muon the one that it has of them."""
        if self.optim == "muon":
            return (0,) if self.compute == "fp32" else (1,)
        return 1, 2, 3

    @property
    def keeps_fp8_weights(self) -> bool:
        """Whether an FP8 copy of all weights is kept over the micro-batches of a step (`MicroStep`)."""
        return self.fp8 and self.te and self.accumulation > 1 and self.zero_stage < 3

    def described(self) -> str:
        """What was chosen, in the order in which somebody asks."""
        each = self.in_each_stage
        how = ", then ".join(
            f"{its.precision}{f' ({100 * share:.3g} %)' * bool(self.stages)}" for share, its in each
        )
        states = f"optimizer_states {self.optimizer_states}"
        if self.optimizer_states == "bf16_remainder":
            states += f" with {self.moments} moments"
        extras = [
            text
            for text, there in (
                ("lm_head in FP8", any(its.fp8_head for _, its in each)),
                ("CUDA graphs", self.cuda_graphs),
                ("recomputation", self.recompute),
                (states, self.packs),
                ("Muon", self.optim == "muon"),
            )
            if there
        ]
        gpus = f"{self.ranks} GPU{'s' if self.ranks > 1 else ''}"
        batch = f"micro-batch {self.micro_batch} x {self.seq_length}, accumulation {self.accumulation}"
        return ", ".join([f"{self.variant} {how}", *extras, f"ZeRO {self.zero_stage} on {gpus}", batch])


def of_precision(variant: str, precision: PrecisionConfig, sizes: Any) -> dict[str, Any]:
    """The fields of a Setting in which stages of precision.schedule differ."""
    fp8 = precision.compute == "fp8"

    def in_bf16(*names: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in names for pattern in precision.bf16_modules)

    layers = sizes.num_hidden_layers
    kept = sum(in_bf16("model", "model.layers", f"model.layers.{i}") for i in range(layers))
    return {
        "compute": precision.compute,
        "recipe": precision.recipe,
        "fp8_layers": (layers - kept) if fp8 else 0,
        "fp8_head": fp8 and not in_bf16("lm_head"),
        "fp8_head_gradients": VARIANTS[variant].te
        and precision.head_gradients
        and fits_fp8(sizes.hidden_size, sizes.vocab_size),
        "health": VARIANTS[variant].te and fp8 and precision.health_steps > 0,
    }
