"""The cases that record_te_tensors.py runs with Transformer Engine on a GPU and test_te_recorded.py with the
reference.

Inputs come from integers of numpy's frozen RandomState, so both sides make the same ones and only results are
stored.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.te_layer import FusedTransformerLayer
from model.variants import SpeedConfig

ROWS, COLUMNS = 16, 144
FLOAT32_MAX = float(torch.finfo(torch.float32).max)


def draw(seed: int, *shape: int) -> Tensor:
    """float64, roughly normal with standard deviation 1: the sum of 12 uniform integers, the same everywhere."""
    integers = np.random.RandomState(seed).randint(-(2**20), 2**20, size=(12, *shape))
    return torch.from_numpy(integers.sum(0) / 2.0**21)


def _peaked_rows(peaks: list[float]) -> Tensor:
    """Rows of COLUMNS values below 0.9 whose first and last value is scaled up to the row's peak."""
    rows = draw(2, len(peaks), COLUMNS).clamp(-0.9, 0.9)
    rows[:, 0], rows[:, -1] = 1.0, -1.0
    return rows * torch.tensor(peaks, dtype=torch.float64)[:, None]


def _boundaries() -> Tensor:
    """Peaks on and next to the values where a power-of-two scale jumps, by one unit of bfloat16 and of
    float32.
    """
    peaks = []
    for unit in (2.0**-7, 2.0**-23):
        for peak in (1.0, 1.75, 448.0, 57344.0):
            peaks += [peak, peak * (1 + unit) if peak == 1.0 else peak + unit * 2.0 ** int(np.log2(peak))]
    return _peaked_rows(peaks)


def _ties() -> Tensor:
    """All midpoints between e4m3 values and their neighbours, under a peak that makes the scale 1."""
    steps = torch.arange(ROWS * COLUMNS, dtype=torch.float64)
    values = (16 + steps % 32) * 2.0 ** ((steps // 32) % 18 - 14)
    values = values.reshape(ROWS, COLUMNS).clamp(max=448.0)
    values[::2] *= -1
    values[:, 0], values[:, -1] = 448.0, 448.0
    return values


def _sprinkled(value: float) -> Tensor:
    x = draw(4, ROWS, COLUMNS)
    x[3, 5], x[7, 140], x[7, 141] = value, value, -value if value == value else value
    x[11, :] = value
    return x


def inputs(name: str) -> Tensor:
    """float64 input of a quantization case."""
    tiny = [2.0**-100, 2.0**-119, 2.0**-120, 2.0**-125, 2.0**-126, 1e-38, 2.0**-130, 2.0**-133]
    makers: dict[str, Any] = {
        "random": lambda: draw(1, ROWS, COLUMNS),
        "zeros": lambda: torch.zeros(ROWS, COLUMNS, dtype=torch.float64),
        "boundaries": _boundaries,
        "ties": _ties,
        "tiny": lambda: _peaked_rows(tiny + [8 * peak for peak in tiny]),
        "range": lambda: draw(5, ROWS, COLUMNS) * torch.exp2(torch.round(draw(6, ROWS, COLUMNS) * 12)),
        "inf": lambda: _sprinkled(float("inf")),
        "nan": lambda: _sprinkled(float("nan")),
        "large": lambda: draw(7, COLUMNS, COLUMNS),
    }
    return makers[name]()


SMALL = ("random", "zeros", "boundaries", "ties", "tiny", "range", "inf", "nan")


@dataclass(frozen=True)
class QuantizationCase:
    """kind: "delayed", "current", "block1" (1x128 tiles) or "block2" (128x128). options: what the kind needs."""

    kind: str
    data: str
    input_dtype: torch.dtype
    fp8_dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        dtypes = f"{str(self.input_dtype)[6:]}_{str(self.fp8_dtype)[13:17]}"
        options = "".join(f"_{name}={value:g}" for name, value in self.options.items())
        return f"quantize/{self.kind}/{self.data}_{dtypes}{options}"

    def input(self, device: str = "cpu") -> Tensor:
        return inputs(self.data).to(self.input_dtype).to(device)


def quantization_cases() -> Iterator[QuantizationCase]:
    e4m3, e5m2, bf16, fp32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
    for data in SMALL:
        for fp8 in (e4m3, e5m2):
            for scale in (1.0, 448.0 / 3.0):
                yield QuantizationCase("delayed", data, bf16, fp8, {"scale": scale})
            yield QuantizationCase("current", data, bf16, fp8, {"power_2_scale": False})
            yield QuantizationCase("current", data, bf16, fp8, {"power_2_scale": True})
        yield QuantizationCase("current", data, bf16, e4m3, {"power_2_scale": False, "amax_epsilon": 8.0})
        yield QuantizationCase("current", data, fp32, e4m3, {"power_2_scale": False})
        yield QuantizationCase("current", data, fp32, e5m2, {"power_2_scale": True})
        for power_2 in (True, False):
            yield QuantizationCase("block1", data, bf16, e4m3, {"power_2_scale": power_2})
            yield QuantizationCase("block2", data, bf16, e4m3, {"power_2_scale": power_2})
            yield QuantizationCase("block1", data, fp32, e4m3, {"power_2_scale": power_2})
        yield QuantizationCase("block1", data, bf16, e4m3, {"power_2_scale": True, "amax_epsilon": 2.0**-60})
        yield QuantizationCase("block2", data, fp32, e4m3, {"power_2_scale": True})
        yield QuantizationCase("block1", data, bf16, e5m2, {"power_2_scale": True})
    for data in ("tiny", "range"):
        yield QuantizationCase("delayed", data, fp32, e4m3, {"scale": 2.0**100})
        yield QuantizationCase("delayed", data, fp32, e4m3, {"scale": FLOAT32_MAX})
    for kind in ("block1", "block2"):
        for power_2 in (True, False):
            yield QuantizationCase(kind, "large", bf16, e4m3, {"power_2_scale": power_2})


INF, NAN = float("inf"), float("nan")
AMAXES = [
    # one column a tensor, one row a step
    [1.0, 0.0, 3.0, 2.0, INF, 1e-38, NAN],
    [2.0, 0.0, 5.0, 0.0, 1.0, 1e-36, 1.0],
    [0.5, 7.0, INF, 2.0, 1.0, 1e-30, 2.0],
    [0.25, 0.0, 1.0, 0.0, 1.0, 0.0, NAN],
    [0.125, 0.0, 1.0, 1.0, 1.0, 1e-3, 0.5],
    [0.1, 3.0, 1.0, 0.0, 2.0, 3.0, 0.25],
]
"""Running amaxes of seven tensors over six steps."""
UPDATE_OPTIONS = [
    {"length": length, "algorithm": algorithm, "margin": margin, "fp8_dtype": dtype}
    for length, algorithm, margin, dtype in (
        (1, "max", 0, torch.float8_e4m3fn),
        (3, "max", 0, torch.float8_e4m3fn),
        (3, "max", 2, torch.float8_e5m2),
        (3, "most_recent", 0, torch.float8_e4m3fn),
        (4, "most_recent", -1, torch.float8_e5m2),
        (300, "max", 0, torch.float8_e5m2),
    )
]


def update_key(options: dict[str, Any]) -> str:
    return f"update/{options['algorithm']}_{options['length']}_{options['margin']}_{str(options['fp8_dtype'])[13:17]}"


def recipes(te: SimpleNamespace) -> dict[str, Any]:
    """The recipes that layers are run with, made of the backend's classes."""
    r = te.recipe
    current_power_2, block_float32 = r.Float8CurrentScaling(), r.Float8BlockScaling()
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(current_power_2, name, r.QParams(power_2_scale=True, amax_epsilon=2.0**-10))
        setattr(block_float32, name, r.QParams(power_2_scale=False))
    return {
        "delayed": r.DelayedScaling(amax_history_len=3),
        "delayed_e4m3": r.DelayedScaling(
            amax_history_len=2, fp8_format=r.Format.E4M3, margin=1, amax_compute_algo="most_recent"
        ),
        "current": r.Float8CurrentScaling(),
        "current_power_2": current_power_2,
        "block": r.Float8BlockScaling(),
        "block_float32": block_float32,
    }


BATCH, LENGTH, HIDDEN, HEADS, GROUPS, CHANNELS = 2, 32, 128, 4, 2, 32
LAYERS = ("Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer")


def make_layer(te: SimpleNamespace, kind: str, device: str) -> nn.Module:
    """A layer with the same weights on each backend."""
    common: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": device}
    norm: dict[str, Any] = {"normalization": "RMSNorm", **common}
    if kind == "Linear":
        layer = te.Linear(HIDDEN, 96, **common)
    elif kind == "LayerNormLinear":
        layer = te.LayerNormLinear(HIDDEN, 96, eps=1e-5, **norm)
    elif kind == "LayerNormMLP":
        layer = te.LayerNormMLP(HIDDEN, 192, eps=1e-5, activation="swiglu", **norm)
    elif te.name == "reference":
        layer = _our_transformer_layer()
    else:
        layer = importlib.import_module("transformer_engine.pytorch").TransformerLayer(
            HIDDEN,
            192,
            HEADS,
            num_gqa_groups=GROUPS,
            kv_channels=CHANNELS,
            layernorm_epsilon=1e-5,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation="swiglu",
            self_attn_mask_type="causal",
            window_size=(8, 0),
            attn_input_format="bshd",
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            **norm,
        )
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(layer.named_parameters())):
            values = draw(100 + index, *parameter.shape) * 0.1
            parameter.copy_(values + 1.0 if "layer_norm" in name else values)
    return layer


def _our_transformer_layer() -> nn.Module:
    """The layer of the variant te_layer, which has the modules of te.TransformerLayer."""
    from transformers import MistralConfig

    config = MistralConfig(
        hidden_size=HIDDEN,
        intermediate_size=192,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=CHANNELS,
        sliding_window=9,
        rms_norm_eps=1e-5,
    )
    precision = Precision(PrecisionConfig(backend="reference"))
    return FusedTransformerLayer(config, precision, SpeedConfig.off(), index=0)


def sample(tensor: Tensor) -> np.ndarray:
    """At most 256 elements of a tensor, as float32, spread over all of it."""
    flat = tensor.detach().float().flatten()
    stride = max(1, flat.numel() // 256)
    return flat[:: stride + (stride % 2 == 0)][:256].cpu().numpy()


def fp8_tensors(te: SimpleNamespace, layer: nn.Module) -> dict[str, np.ndarray]:
    """Copies of the scales and histories of delayed scaling, by "<module>.<direction>.<what>"."""
    found = {}
    for name, module in layer.named_modules():
        if not isinstance(module, te.Linear | te.LayerNormLinear | te.LayerNormMLP):
            continue
        for direction in ("scaling_fwd", "scaling_bwd"):
            state = module.fp8_meta.get(direction)
            if getattr(state, "scale", None) is not None:
                for what in ("scale", "amax_history"):
                    # modules update them in place, and numpy() of a CPU tensor shares its memory
                    found[f"{name}.{direction}.{what}"] = getattr(state, what).detach().cpu().numpy().copy()
    return found


def run_layer(
    te: SimpleNamespace, kind: str, recipe: Any, device: str, *, steps: int = 3, recompute: bool = False
) -> dict[str, np.ndarray]:
    """Train steps: samples of output and gradients, and all of the FP8 state, after each."""
    layer, results = make_layer(te, kind, device), {}
    arguments: dict[str, Any] = {}
    if kind == "TransformerLayer":
        arguments["rotary_pos_emb"] = te.RotaryPositionEmbedding(CHANNELS).to(device)(LENGTH)
    for step in range(steps):
        x = draw(200 + step, BATCH, LENGTH, HIDDEN) * (1 + step)
        x = x.to(torch.bfloat16).to(device).requires_grad_()
        with te.autocast(enabled=True, recipe=recipe):
            if recompute:
                out = te.checkpoint(layer, x, use_reentrant=False, **arguments)
            else:
                out = layer(x, **arguments)
        grad = draw(300 + step, *out.shape) * 2.0 ** (-4 - step)
        layer.zero_grad()
        out.backward(grad.to(torch.bfloat16).to(device))
        results[f"{step}/output"] = sample(out)
        results[f"{step}/grad/input"] = sample(x.grad)
        for name, parameter in layer.named_parameters():
            results[f"{step}/grad/{name}"] = sample(parameter.grad)
        for name, tensor in fp8_tensors(te, layer).items():
            results[f"{step}/state/{name}"] = tensor
    return results


def run_sequence(te: SimpleNamespace, device: str) -> dict[str, np.ndarray]:
    """When the state of a Linear moves: training, evaluation, a nested autocast, kept weight copies."""
    layer, results = make_layer(te, "Linear", device), {}
    recipe = te.recipe.DelayedScaling(amax_history_len=4)

    def note(what: str, out: Tensor | None = None) -> None:
        number = len({key.split("/")[0] for key in results})
        for name, tensor in fp8_tensors(te, layer).items():
            results[f"{number} {what}/{name}"] = tensor
        if out is not None:
            results[f"{number} {what}/output"] = sample(out)

    def forward(size: float, **arguments: Any) -> Tensor:
        x = (draw(400, BATCH, LENGTH, HIDDEN) * size).to(torch.bfloat16).to(device)
        return layer(x, **arguments)

    with te.autocast(enabled=True, recipe=recipe):
        out = forward(1.0)
        note("inside the autocast", out)
    note("after the forward")
    out.sum().backward()
    note("after the backward")
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        out = forward(8.0)
    note("evaluation", out)
    with te.autocast(enabled=True, recipe=recipe):
        with te.autocast(enabled=False):
            out = forward(1.0)
        note("FP8 off inside", out)
        out = forward(2.0)
        note("FP8 on again", out)
    note("after the outermost exit")
    (3 * out).sum().backward()
    note("after its backward")
    for first in (True, False, None):
        with torch.no_grad():
            layer.weight.mul_(2.0)
        with te.autocast(enabled=True, recipe=recipe):
            out = forward(1.0, is_first_microbatch=first)
        out.sum().backward()
        note(f"is_first_microbatch={first}", out)
    return results
