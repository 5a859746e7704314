"""AdamW with packed optimizer states (precision.optimizer_states), for DeepSpeed's BF16_Optimizer.

Bytes per parameter, in addition to the bf16 weight of the model:

    fp32             12      a float32 weight and two float32 moments (torch's AdamW)
    bf16_remainder    6      the 16 bits of a float32 weight that bf16 lacks, and two bf16 moments (10 if float32)
    int8, fp8         4.03   the same 16 bits, and two 8-bit moments with a scale for each block of 256 (torchao)

A step decodes `STATE_CHUNK` elements at a time, updates them with torch's AdamW in float32, and encodes them again. The
float32 weights are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from model.checks.startup import StartupCheckError
from model.fp8.recipes import STATE_BLOCK, STATE_CHUNK
from model.fp8.torchao_fp8 import STATE_DTYPES, dequantize_state, quantize_state

MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

State = dict[str, torch.Tensor]  # optimizer state of one flat weight, as in torch.optim.Optimizer.state


# ---------------------------------------------------------------- float32 as bf16 and 16 more bits


def split_float32(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Split the float32 tensor `master` into the bf16 tensor `weight` and the int16 tensor `remainder`.

    All tensors are 1-D and have the same length. A weight is the nearest bf16 number, and ties round away from zero.
    Rounding ties to even would map 65,537 numbers to one weight, one more than 16 bits can distinguish.
    """
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    remainder.copy_(bits - (high << 16))
    weight.view(torch.int16).copy_(high)


def join_float32(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Join a bf16 `weight` and an int16 `remainder` from `split_float32` into the original float32 tensor."""
    bits = weight.view(torch.int16).to(torch.int32) << 16
    return bits.add_(remainder).view(torch.float32)


# ---------------------------------------------------------------- moments


def new_moment(moment: str, length: int, kind: str, device: torch.device) -> State:
    """Allocate an AdamW moment of `length` zeros.

    Return the optimizer state entries that store the moment, in the format that `decode_moment` reads.

    Args:
        moment: Name of the moment, an element of MOMENTS.
        kind: Storage type of the moment.
    """
    if kind in DTYPES:
        return {moment: torch.zeros(length, dtype=DTYPES[kind], device=device)}
    blocks = -(-length // STATE_BLOCK)
    return {
        moment: torch.zeros(blocks * STATE_BLOCK, dtype=STATE_DTYPES[kind], device=device),
        f"{moment}_scale": torch.zeros(blocks, device=device),
    }


def decode_moment(state: State, moment: str, start: int, end: int) -> torch.Tensor:
    """Decode the elements `start` to `end` of an AdamW moment to float32. For a float32 moment, return a view."""
    if (scale := state.get(f"{moment}_scale")) is None:
        return state[moment][start:end].float()
    blocks = slice(start // STATE_BLOCK, -(-end // STATE_BLOCK))
    codes = state[moment][blocks.start * STATE_BLOCK : blocks.stop * STATE_BLOCK]
    values = dequantize_state(codes, scale[blocks], moment == MOMENTS[0])
    return values[start - blocks.start * STATE_BLOCK :][: end - start]


def encode_moment(values: torch.Tensor, state: State, moment: str, start: int) -> None:
    """Write float32 values to the elements of an AdamW moment, beginning at element `start`.

    For 8-bit moments, `values` must consist of whole blocks or extend to the end of the moment.
    """
    held, scale = state[moment][start : start + len(values)], state.get(f"{moment}_scale")
    if scale is not None:
        values = nn.functional.pad(values, (0, -len(values) % STATE_BLOCK))
        codes, scales = quantize_state(values, held.dtype, moment == MOMENTS[0])
        state[moment][start : start + len(values)].copy_(codes)
        scale[start // STATE_BLOCK :][: len(scales)].copy_(scales)
    elif held.data_ptr() != values.data_ptr():
        held.copy_(values)


# ---------------------------------------------------------------- the optimizer


class PackedAdamW(torch.optim.Optimizer):
    """AdamW optimizer for 1-D bf16 weights.

    The optimizer state contains the 16 bits of each float32 weight that bf16 cannot store.

    Args:
        groups: Parameter groups, as for torch.optim.AdamW.
        gradients: Float32 gradient of each weight. `.grad` is not used, because it would have to be bf16.
        moments: Storage type of the moments, a key of MOMENT_BYTES.
    """

    def __init__(self, groups: list[dict[str, Any]], gradients: list[torch.Tensor], moments: str):
        super().__init__(groups, {})
        self.moments = moments
        self.gradients = dict(zip(self._weights(), gradients, strict=True))

    def _weights(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight] or self._begin(weight, group)
                for start in range(0, len(weight), STATE_CHUNK):
                    self._step(group, weight, state, start, min(start + STATE_CHUNK, len(weight)))
                state["step"] += 1

    def _step(self, group: dict[str, Any], weight: torch.Tensor, state: State, start: int, end: int) -> None:
        half, remainder = weight[start:end], state["remainder"][start:end]
        master = join_float32(half, remainder)
        first, second = (decode_moment(state, moment, start, end) for moment in MOMENTS)
        adamw(
            [master],
            [self.gradients[weight][start:end]],
            [first],
            [second],
            [],
            [state["step"].clone()],  # adamw increments it
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        split_float32(master, half, remainder)
        encode_moment(first, state, MOMENTS[0], start)
        encode_moment(second, state, MOMENTS[1], start)

    def _begin(self, weight: torch.Tensor, group: dict[str, Any], step: float = 0.0) -> State:
        """Allocate the optimizer state for a weight. The float32 master weight is initialized from the bf16 weight."""
        state = self.state[weight]
        # torch's kernel reads the step on this device
        state["step"] = torch.tensor(step, device=weight.device if group["fused"] else "cpu")
        state["remainder"] = torch.zeros(len(weight), dtype=torch.int16, device=weight.device)
        for moment in MOMENTS:
            state |= new_moment(moment, len(weight), self.moments, weight.device)
        return state

    @torch.no_grad()
    def set_weight(
        self, weight: torch.Tensor, master: torch.Tensor, moments: State, step: float | None
    ) -> None:
        """Set the float32 values and the AdamW state of a weight, for example from a checkpoint.

        Args:
            weight: A weight of this optimizer.
            master: Float32 values of the weight, 1-D, on any device.
            moments: Float32 moments by name, 1-D, on any device.
            step: Number of completed steps. None before the first step, when the float32 values equal the bf16 values.
        """
        if step is None:
            weight.copy_(master)
            return
        (group,) = (g for g in self.param_groups if any(p is weight for p in g["params"]))
        state = self._begin(weight, group, step)
        for start in range(0, len(weight), STATE_CHUNK):
            part = slice(start, start + STATE_CHUNK)
            split_float32(master[part].to(weight.device), weight[part], state["remainder"][part])
            for moment in MOMENTS:
                encode_moment(moments[moment][part].to(weight.device), state, moment, start)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this optimizer without conversion.

        torch's implementation would cast all states to the dtype of the weights.
        """
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.state.clear()
        for index, weight in enumerate(self._weights()):
            for key, value in state_dict["state"].get(index, {}).items():
                own = self.state[weight]
                on_host = key == "step" and not self.param_groups[0]["fused"]
                own[key] = value.to("cpu" if on_host else weight.device, copy=True)


def check_packed_adamw(moments: str, device: torch.device) -> str:
    """Compare three steps of PackedAdamW on random data with torch's AdamW in float32, and return a log line.

    Raises:
        StartupCheckError: The weight updates differ by more than 5 %. Rounding the moments is expected to cause a
            difference of at most 1.4 %.
    """
    generator = torch.Generator().manual_seed(0)
    size, options = 5 * STATE_BLOCK + 7, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    start = torch.randn(size, generator=generator).mul_(0.02).bfloat16().float().to(device)
    weight, gradient = start.bfloat16(), torch.empty_like(start)
    fused = device.type == "cuda"
    ours = PackedAdamW(
        [{"params": [weight], "fused": fused, "foreach": False, **options}], [gradient], moments
    )
    theirs = torch.optim.AdamW([nn.Parameter(start.clone())], foreach=False, **options)
    for _ in range(3):
        gradient.copy_(torch.randn(size, generator=generator) * 1e-3)
        ours.step()
        theirs.param_groups[0]["params"][0].grad = gradient.clone()
        theirs.step()
    expected = theirs.param_groups[0]["params"][0].detach() - start
    changed = join_float32(weight, ours.state[weight]["remainder"]) - start
    error = float((changed - expected).norm() / expected.norm())
    line = f"numeric check of AdamW with {moments} moments: relative error {error:.1e} (allowed 5.0e-02)"
    if not error <= 0.05:
        raise StartupCheckError(
            f"{line}. Set precision.optimizer_states to fp32, or install the package versions in requirements-gpu.txt",
            code="wrong_numbers",
            key="precision.optimizer_states",
        )
    return line


# ---------------------------------------------------------------- reading from files


@dataclass
class DecodedSlice:
    """A range of a packed optimizer tensor that is decoded to float32 on access.

    The class implements the methods of a 1-D tensor that train/checkpoint/reshard.py uses.
    """

    decode: Callable[[int, int], torch.Tensor]  # (start, end) -> float32
    start: int
    length: int

    def __len__(self) -> int:
        return self.length

    def narrow(self, dim: int, start: int, length: int) -> DecodedSlice:
        return DecodedSlice(self.decode, self.start + start, length)

    def __getitem__(self, part: slice) -> torch.Tensor:
        first, last, _ = part.indices(self.length)
        return self.decode(self.start + first, self.start + last)


def decoded_slices(weight: torch.Tensor, state: State) -> tuple[DecodedSlice, dict[str, DecodedSlice]]:
    """Return the float32 values and moments of a PackedAdamW weight as slices that are decoded on access."""

    whole = DecodedSlice(
        lambda start, end: join_float32(weight[start:end], state["remainder"][start:end]), 0, len(weight)
    )
    return whole, {
        moment: DecodedSlice(partial(decode_moment, state, moment), 0, len(weight)) for moment in MOMENTS
    }
