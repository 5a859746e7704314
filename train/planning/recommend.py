"""Recommend the fastest ZeRO stage, micro-batch, recomputation and optimizer states that fit into GPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from model.fp8.recipes import BF16_MOMENTS_MAX_BETA2
from model.variants import GradientCheckpointing, supports_mlp
from train.planning.memory import Memory, largest_micro_batch, predict_memory
from train.planning.setting import REDUCE_BUCKET, ZERO_3_BUCKET, Setting
from train.planning.speed import Estimate, Gpu, estimate

MAX_SUGGESTED_MICRO_BATCH = 128  # samples
MODES: tuple[GradientCheckpointing, ...] = (False, "mlp", True)  # from the most memory to the least
NEARLY_AS_FAST = 0.01  # if speeds differ by at most this fraction, the simpler setting is recommended
# Packed optimizer states are recommended only if they are faster by this fraction, because they round the moments
# (docs/validation.md).
CLEARLY_FASTER = 0.1


@dataclass(frozen=True)
class Planned:
    """A training setting with its predicted memory and speed on a GPU model."""

    setting: Setting
    gpu: Gpu
    memory: Memory
    estimate: Estimate

    @classmethod
    def predict(cls, setting: Setting, gpu: Gpu, network_gbit_s: float) -> Planned:
        """Predict GPU memory and speed for a training setting."""
        return cls(setting, gpu, predict_memory(setting), estimate(setting, gpu, network_gbit_s))

    @property
    def needed_gib(self) -> float:
        """Return the GPU memory that the run needs, in GiB."""
        return self.memory.needed_gib(self.setting.ranks)

    @property
    def fits(self) -> bool:
        """Return whether the run fits into GPU memory."""
        return self.needed_gib <= self.gpu.memory_gib

    def days(self, tokens: int) -> float:
        """Return the predicted time for training on `tokens` tokens, in days."""
        return tokens / self.estimate.tokens_per_second / 86400

    def to_json(self, tokens: int) -> dict[str, Any]:
        """Return the setting and the predictions for training on `tokens` tokens as a JSON object."""
        s = self.setting
        return {
            "gpus": s.ranks,
            "zero_stage": s.zero_stage,
            "per_device_train_batch_size": s.micro_batch,
            "gradient_accumulation_steps": s.accumulation,
            "train_batch_size_tokens": s.step_tokens,
            "gradient_checkpointing": s.recompute,
            "optimizer_states": s.optimizer_states,
            "optimizer_moments": s.moments if s.optimizer_states == "bf16_remainder" else None,
            "memory_gib": {**self.memory.parts, "peak": self.memory.peak_gib, "needed": self.needed_gib},
            "peak_is_at": self.memory.moment,
            "fits": self.fits,
            "largest_micro_batch": largest_micro_batch(s, self.gpu.memory_gib),
            **asdict(self.estimate),
            "days": self.days(tokens),
            "gpu_hours": self.days(tokens) * 24 * s.ranks,
        }


def optimizer_options(s: Setting) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return the candidates for precision.optimizer_states, starting with the one that needs the most memory.

    Returns:
        Tuples of precision.optimizer_states, the data type of the moments, and the ZeRO stages to consider. Muon and
        packed states need ZeRO 1.
    """
    if s.args.optim == "muon":
        return [("fp32", "fp32", (1,))]
    moments = "bf16" if s.args.adam_beta2 <= BF16_MOMENTS_MAX_BETA2 else "fp32"
    return [("fp32", "fp32", (1, 2, 3)), ("bf16_remainder", moments, (1,)), ("int8", "int8", (1,))]


def recommend(s: Setting, gpu: Gpu, ranks: int, batch_tokens: int, network_gbit_s: float) -> Planned | None:
    """Return the fastest setting that fits into GPU memory, or None if no setting fits.

    The candidates are the configured setting, and ZeRO 1 to 3 with each supported value of gradient_checkpointing. The
    number of tokens per step is the nearest to `batch_tokens` with whole samples for each rank, and only micro-batch
    sizes that divide a rank's samples per step are candidates. Optimizer states are float32 unless no float32 setting
    fits or packed states are CLEARLY_FASTER. Among settings that are NEARLY_AS_FAST, the configured setting is
    preferred, then the lowest ZeRO stage, then the least recomputation, and then the least memory.

    Args:
        s: The configured setting.
        gpu: The GPU model.
        ranks: Number of GPUs.
        batch_tokens: Number of tokens per step, summed over all ranks.
        network_gbit_s: Network bandwidth between nodes, in Gbit/s per GPU.
    """
    chosen: Planned | None = None
    for states, moments, zero_stages in optimizer_options(s):
        packed = replace(s, ranks=ranks, optimizer_states=states, moments=moments)
        fitting = list(_fitting(packed, gpu, zero_stages, batch_tokens, network_gbit_s))
        fastest = max((p.estimate.tokens_per_second for p in fitting), default=0)
        if fastest > (chosen.estimate.tokens_per_second * (1 + CLEARLY_FASTER) if chosen else 0):
            good = [p for p in fitting if p.estimate.tokens_per_second >= (1 - NEARLY_AS_FAST) * fastest]
            chosen = min(
                good, key=lambda p: (p.setting.zero_stage, MODES.index(p.setting.recompute), p.needed_gib)
            )
    itself = Planned.predict(s, gpu, network_gbit_s)
    speeds = [planned.estimate.tokens_per_second for planned in (itself, chosen) if planned]
    is_fast = speeds[0] >= (1 - NEARLY_AS_FAST) * speeds[-1]
    return itself if ranks == s.ranks and itself.fits and is_fast else chosen


def _fitting(
    s: Setting, gpu: Gpu, zero_stages: tuple[int, ...], batch_tokens: int, network_gbit_s: float
) -> Iterator[Planned]:
    """Yield variations of a setting that fit into GPU memory.

    The number of micro-batches per step is chosen so that a step has about `batch_tokens` tokens. ZeRO stages other
    than the configured one use the DeepSpeed settings from train_args/ds_config_zero*.json.
    """
    samples = max(1, round(batch_tokens / (s.seq_length * s.ranks)))
    sizes = range(s.micro_batch_unit, min(samples, MAX_SUGGESTED_MICRO_BATCH) + 1, s.micro_batch_unit)
    packs = any(p.fp8 and supports_mlp(s.args.model.variant, s.args.speed, p.recipe) for _, p in s.phases)
    modes = [mode for mode in MODES if packs or mode != "mlp"]
    for stage, recompute in product(zero_stages, modes):
        bucket = ZERO_3_BUCKET if stage == 3 else REDUCE_BUCKET
        other: dict[str, Any] = {
            "float32_gradients": True,
            "reduce_bucket": bucket,
            "overlap_comm": stage == 3,
        }
        for micro_batch in (size for size in sizes if samples % size == 0):
            setting = replace(
                s,
                zero_stage=stage,
                micro_batch=micro_batch,
                recompute=recompute,
                accumulation=max(1, round(batch_tokens / (micro_batch * s.seq_length * s.ranks))),
                cuda_graphs=s.cuda_graphs and stage < 3 and recompute is not True,
                **({} if stage == s.zero_stage else other),
            )
            if predict_memory(setting).needed_gib(s.ranks) > gpu.memory_gib:
                break
            yield Planned.predict(setting, gpu, network_gbit_s)
