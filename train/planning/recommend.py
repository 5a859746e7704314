"""Which ZeRO stage, micro-batch, recomputation and optimizer states are the fastest that fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from model.fp8.recipes import BF16_MOMENTS_MOST_BETA2
from train.planning.memory import Memory, largest_micro_batch, memory_of
from train.planning.rates import Estimate, Gpu, estimate
from train.planning.setting import REDUCE_BUCKET, ZERO_3_BUCKET, Setting, can_accumulate_in_float32

MOST_RECOMMENDED = 128  # samples of a micro-batch
NEARLY_AS_FAST = 0.01  # of two settings that are, the simpler one is recommended
# Packed states round moments, and their step takes longer (docs/validation.md): for less they are not worth it.
CLEARLY_FASTER = 0.1
FLOAT32_STATES = ("fp32", "fp32")  # precision.optimizer_states, the type of the moments
NO_OTHERS = "others need AdamW, compute fp8 or bf16, and ZeRO 1 with data_types.grad_accum_dtype fp32"


@dataclass(frozen=True)
class Planned:
    """A setting on `gpu`s, and what follows. states: of a recommendation, why these optimizer states."""

    setting: Setting
    gpu: Gpu
    memory: Memory
    estimate: Estimate
    states: str = ""

    @classmethod
    def of(cls, setting: Setting, gpu: Gpu, network_gbit_s: float) -> Planned:
        return cls(setting, gpu, memory_of(setting), estimate(setting, gpu, network_gbit_s))

    @property
    def needed_gib(self) -> float:
        return self.memory.needed_gib(self.setting.ranks)

    @property
    def fits(self) -> bool:
        return self.needed_gib <= self.gpu.memory_gib

    def days(self, tokens: int) -> float:
        return tokens / self.estimate.tokens_per_second / 86400

    def to_json(self, tokens: int) -> dict[str, Any]:
        s = self.setting
        days = self.days(tokens)
        return {
            "gpus": s.ranks,
            "zero_stage": s.zero_stage,
            "per_device_train_batch_size": s.micro_batch,
            "gradient_accumulation_steps": s.accumulation,
            "train_batch_size_tokens": s.step_tokens,
            "gradient_checkpointing": s.recompute,
            "optimizer_states": s.optimizer_states,
            "optimizer_moments": s.moments if s.optimizer_states == "bf16_remainder" else None,
            "why_these_states": self.states or None,
            "memory_gib": {**self.memory.parts, "peak": self.memory.peak_gib, "needed": self.needed_gib},
            "peak_is_at": self.memory.moment,
            "fits": self.fits,
            "largest_micro_batch": largest_micro_batch(s, self.gpu.memory_gib),
            **asdict(self.estimate),
            "days": days,
            "gpu_hours": days * 24 * s.ranks,
        }


def at(
    s: Setting,
    ranks: int,
    micro_batch: int,
    zero_stage: int,
    recompute: bool,
    batch_tokens: int,
    states: tuple[str, str] = FLOAT32_STATES,
) -> Setting:
    """`s` otherwise, with the accumulation that comes nearest to a step of so many tokens, and of DeepSpeed's sizes
    what train_args/ has for the stage. states: of `states_of`."""
    same = zero_stage == s.zero_stage
    float32 = s.float32_gradients if same else can_accumulate_in_float32(zero_stage, s.compute)
    return replace(
        s,
        ranks=ranks,
        micro_batch=micro_batch,
        zero_stage=zero_stage,
        recompute=recompute,
        accumulation=max(1, round(batch_tokens / (micro_batch * s.seq_length * ranks))),
        float32_gradients=float32,
        optimizer_states=states[0],
        moments=states[1],
        cuda_graphs=s.cuda_graphs and zero_stage < 3 and not recompute,
        reduce_bucket=s.reduce_bucket if same else ZERO_3_BUCKET if zero_stage == 3 else REDUCE_BUCKET,
        overlap_comm=s.overlap_comm if same else zero_stage == 3,
    )


def states_of(s: Setting) -> list[tuple[str, str]]:
    """(precision.optimizer_states, the type of the moments) that are recommended, the least packed first. All but the
    first need ZeRO 1 with float32 gradients, and AdamW."""
    at_zero_1 = at(s, s.ranks, 1, 1, s.recompute, s.step_tokens)
    if s.optim != "adamw" or not at_zero_1.float32_gradients:
        return [FLOAT32_STATES]
    moments = "bf16" if s.adam_beta2 <= BF16_MOMENTS_MOST_BETA2 else "fp32"
    return [FLOAT32_STATES, ("bf16_remainder", moments), ("int8", "int8")]


def recommend(s: Setting, gpu: Gpu, ranks: int, batch_tokens: int, network_gbit_s: float) -> Planned | None:
    """The fastest that fits of `s` itself and of ZeRO 1 to 3, recomputation or none, and all micro-batches that divide
    the samples of a rank's step: the size of a step is part of what is trained. Of those that are nearly as fast `s`,
    else the one with the lowest stage, no recomputation and the least memory. AdamW's states are float32 unless nothing
    fits with these, or what fits with packed ones is clearly faster. None: nothing fits.

    batch_tokens: of a step, as `s` has."""
    chosen, without = None, []
    for states in states_of(s):
        best = _fastest(s, gpu, ranks, batch_tokens, network_gbit_s, states)
        if best is None:
            without.append(_named(states))
        elif chosen is None:
            why = f"with {' and '.join(without)} nothing fits" if without else ""
            chosen = replace(best, states=why)
        elif (faster := _speed(best) / _speed(chosen) - 1) > CLEARLY_FASTER:
            than = f"{_named(_states(chosen.setting))} ({chosen.setting.sharing})"
            chosen = replace(best, states=f"{100 * faster:.0f} % faster than the best with {than}")
    itself = Planned.of(s, gpu, network_gbit_s)
    if ranks == s.ranks and itself.fits:
        if chosen is None or _speed(itself) >= (1 - NEARLY_AS_FAST) * _speed(chosen):
            why = "as configured" if s.packs else ""
            chosen = replace(itself, states=chosen.states if chosen and chosen.setting == s else why)
    if chosen is None:
        return None
    others = (
        f"no others that fit would be {100 * CLEARLY_FASTER:.0f} % faster"
        if len(states_of(s)) > 1
        else NO_OTHERS
    )
    why = chosen.states or others
    return replace(chosen, states=f"{_named(_states(chosen.setting))}, {_memory_of_each(chosen)}: {why}")


def _fastest(
    s: Setting, gpu: Gpu, ranks: int, batch_tokens: int, network_gbit_s: float, states: tuple[str, str]
) -> Planned | None:
    """With these states; None: nothing fits."""
    found: list[Planned] = []
    samples = max(1, round(batch_tokens / (s.seq_length * ranks)))
    for stage in s.zero_stages if states == FLOAT32_STATES else (1,):
        if stage == 3 and s.compiled:  # DeepSpeed cannot
            continue
        for recompute in (False, True):
            for micro_batch in range(
                s.micro_batch_unit, min(samples, MOST_RECOMMENDED) + 1, s.micro_batch_unit
            ):
                if samples % micro_batch:
                    continue
                setting = at(s, ranks, micro_batch, stage, recompute, batch_tokens, states)
                if memory_of(setting).needed_gib(ranks) > gpu.memory_gib:
                    break
                found.append(Planned.of(setting, gpu, network_gbit_s))
    fastest = max(map(_speed, found), default=0)
    good = [p for p in found if _speed(p) >= (1 - NEARLY_AS_FAST) * fastest]
    return min(good, key=lambda p: (p.setting.zero_stage, p.setting.recompute, p.needed_gib), default=None)


def _speed(p: Planned) -> float:
    return p.estimate.tokens_per_second


def _states(s: Setting) -> tuple[str, str]:
    return s.optimizer_states, s.moments


def _named(states: tuple[str, str]) -> str:
    return f"{states[0]} with optimizer_moments fp32" if states == ("bf16_remainder", "fp32") else states[0]


def _memory_of_each(p: Planned) -> str:
    """GiB a GPU of the optimizer as chosen, and of each that could be."""
    s = p.setting
    text = f"{p.memory.parts['optimizer']:,.1f} GiB a GPU at ZeRO {s.zero_stage}"
    others = [
        f"{_named(states)} {memory_of(at(s, s.ranks, 1, 1, True, 1, states)).parts['optimizer']:,.1f}"
        for states in states_of(s)
        if s.zero_stage != 1 or states != _states(s)
    ]
    return f"{text} ({', '.join(others)}{' at ZeRO 1' * (s.zero_stage != 1)})" if others else text


def least_gib(s: Setting, batch_tokens: int) -> tuple[float, str]:
    """(GiB of a GPU that is needed at least, with which settings)."""
    settings = [
        at(s, s.ranks, s.micro_batch_unit, stage, True, batch_tokens, states)
        for states in states_of(s)
        for stage in (s.zero_stages if states == FLOAT32_STATES else (1,))
        if not (stage == 3 and s.compiled)
    ]
    needed, setting = min(
        ((memory_of(its).needed_gib(its.ranks), its) for its in settings), key=lambda item: item[0]
    )
    return needed, setting.sharing
