"""SwiGLU and its gradient as FP8 with delayed scaling, each in one kernel. The gradient is also written transposed.

`swiglu` and `dswiglu` have the same arguments as Transformer Engine's kernels with these names, and are faster. They
compute in float32 and round once.

With gradient_checkpointing "mlp", `swiglu` also packs its input for the backward pass: 8 bits for each value and one
scale for each row of 128 values. `dswiglu` then reads the packed input, and `swiglu_transposed` recomputes the output
from it. Values are int8, because e4m3 has only 3 bits of mantissa, and the error in the gradients would be larger.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# rows, columns and warps of a block
FORWARD = 8, 256, 4
TRANSPOSED = BACKWARD = 32, 128, 8
GROUP = 128  # packed values with a common scale
UNPACKED_ROWS = 2048  # rows to unpack at a time, because the calculation needs float32


@triton.jit
def _cast(x, E4M3: tl.constexpr):
    """Cast float32 to FP8 bytes. The hardware's cast saturates at the largest value."""
    return tl.cast(x.to(tl.float8e4nv if E4M3 else tl.float8e5), tl.uint8, bitcast=True)


@triton.jit
def _update_amax(amax, scale, scale_inv, largest, is_first):
    """Update the amax of the FP8 output. The first program also stores the inverse scale.

    largest: largest magnitude in the block of this program, before scaling. As in Transformer Engine, NaN is ignored.
    """
    tl.atomic_max(amax, tl.maximum(largest, 0.0), sem="relaxed")
    if is_first:
        tl.store(scale_inv, tl.div_rn(1.0, scale))


@triton.jit
def _pack(x, codes, scales, m, f, M, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Store a block x [ROWS, COLUMNS] of gate or up as int8, and one float32 scale for each row of a group.

    codes, scales: addresses of the first code and of the first scale in each row.
    """
    groups = tl.reshape(x, (ROWS, COLUMNS // GROUP, GROUP))
    scale = tl.maximum(tl.max(tl.abs(groups), axis=2) / 127.0, 1e-30)
    rounded = tl.floor(groups / scale[:, :, None] + 0.5).to(tl.int8)
    inside = (m < M)[:, None] & (f < F)[None, :]
    tl.store(codes + f[None, :], tl.reshape(rounded, (ROWS, COLUMNS)), mask=inside)
    group = tl.min(f, axis=0) // GROUP + tl.arange(0, COLUMNS // GROUP)
    tl.store(scales + group[None, :], scale, mask=(m < M)[:, None] & (group * GROUP < F)[None, :])


@triton.jit
def _unpack(packed, m, f, M, F, PITCH, GROUP: tl.constexpr):
    """Load a block of gate and a block of up from the packed input. All columns `f` must be in one group."""
    groups = tl.cdiv(F, GROUP)
    codes = packed + m.to(tl.int64)[:, None] * PITCH
    scales = (codes + 2 * F).to(tl.pointer_type(tl.float32)) + tl.min(f, axis=0) // GROUP
    rows = (m < M)[:, None]
    inside = rows & (f < F)[None, :]
    gate = tl.load(codes + f[None, :], mask=inside, other=0).to(tl.float32)
    up = tl.load(codes + F + f[None, :], mask=inside, other=0).to(tl.float32)
    return gate * tl.load(scales, mask=rows, other=0.0), up * tl.load(scales + groups, mask=rows, other=0.0)


@triton.jit
def _forward(
    x, packed, out, scale, scale_inv, amax, M, F, PITCH, E4M3: tl.constexpr, PACK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # a one-dimensional grid, because a second dimension is limited to 65,535 programs (a million rows)
    program, across = tl.program_id(0), tl.cdiv(F, COLUMNS)
    block_f, block_m = program % across, program // across
    m = block_m * ROWS + tl.arange(0, ROWS)
    f = block_f * COLUMNS + tl.arange(0, COLUMNS)
    inside = (m < M)[:, None] & (f < F)[None, :]
    row = m.to(tl.int64)[:, None]
    gate = tl.load(x + row * (2 * F) + f[None, :], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * F) + F + f[None, :], mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    factor = tl.load(scale)
    _update_amax(amax, factor, scale_inv, tl.max(tl.max(tl.abs(y), axis=1), axis=0), program == 0)
    tl.store(out + row * F + f[None, :], _cast(y * factor, E4M3), mask=inside)
    if PACK:
        codes = packed + row * PITCH
        scales = (codes + 2 * F).to(tl.pointer_type(tl.float32))
        _pack(gate, codes, scales, m, f, M, F, ROWS, COLUMNS, GROUP)
        _pack(up, codes + F, scales + tl.cdiv(F, GROUP), m, f, M, F, ROWS, COLUMNS, GROUP)


@triton.jit
def _transposed(
    packed, out, scale_inv, M, F, PITCH, E4M3: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    block_f, block_m = tl.program_id(0), tl.program_id(1)
    m = block_m * ROWS + tl.arange(0, ROWS)
    f = block_f * COLUMNS + tl.arange(0, COLUMNS)
    gate, up = _unpack(packed, m, f, M, F, PITCH, GROUP)
    y = gate * tl.sigmoid(gate) * up * tl.div_rn(1.0, tl.load(scale_inv))
    turned = (f < F)[:, None] & (m < M)[None, :]
    tl.store(out + f.to(tl.int64)[:, None] * M + m[None, :], tl.trans(_cast(y, E4M3)), mask=turned)


@triton.jit
def _clamp(x, E4M3: tl.constexpr):
    """Clamp values to the range of the FP8 format. NaN stays NaN."""
    largest = 448.0 if E4M3 else 57344.0
    x = tl.where(x > largest, largest, x)
    return tl.where(x < -largest, -largest, x)


@triton.jit
def _backward(
    gradient, x, rows, columns, scale, scale_inv, amax, M, F, PITCH, E4M3: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute one block of the gate gradient and the matching block of the up gradient, and cast both to FP8.

    Rows and columns are cast separately. The values for the rows are clamped first, so that the compiler cannot merge
    the two casts. A merged cast stores the codes as words and also extracts their bytes. The ptxas in Triton 3.6.0
    (12.8.93) miscompiles this and reads every fourth byte from a register that was never written.
    """
    block_f, block_m = tl.program_id(0), tl.program_id(1)
    m = block_m * ROWS + tl.arange(0, ROWS)
    f = block_f * COLUMNS + tl.arange(0, COLUMNS)
    inside = (m < M)[:, None] & (f < F)[None, :]
    row = m.to(tl.int64)[:, None]
    at = row * (2 * F) + f[None, :]
    above = tl.load(gradient + row * F + f[None, :], mask=inside, other=0.0).to(tl.float32)
    if PACKED:
        gate, up = _unpack(x, m, f, M, F, PITCH, GROUP)
    else:
        gate = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + at + F, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = above * up * (sigmoid + gate * sigmoid * (1.0 - sigmoid))
    of_up = above * gate * sigmoid
    factor = tl.load(scale)
    largest = tl.max(tl.maximum(tl.abs(of_gate), tl.abs(of_up)), axis=1)
    _update_amax(amax, factor, scale_inv, tl.max(largest, axis=0), (block_f == 0) & (block_m == 0))
    of_gate *= factor
    of_up *= factor
    tl.store(rows + at, _cast(_clamp(of_gate, E4M3), E4M3), mask=inside)
    tl.store(rows + at + F, _cast(_clamp(of_up, E4M3), E4M3), mask=inside)
    column = f.to(tl.int64)[:, None]
    turned = (f < F)[:, None] & (m < M)[None, :]
    tl.store(columns + column * M + m[None, :], tl.trans(_cast(of_gate, E4M3)), mask=turned)
    tl.store(columns + (column + F) * M + m[None, :], tl.trans(_cast(of_up, E4M3)), mask=turned)


def _is_e4m3(quantizer: Any) -> bool:
    return bool(quantizer.dtype.name.endswith("E4M3"))


def empty_packed(x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized buffer for the packed form of the SwiGLU input x [..., 2 F].

    A row [2 F + 8 ceil(F / 128)] of the int8 buffer contains the codes of gate and up, and then the float32 scales of
    their groups of 128 values.
    """
    F = x.shape[-1] // 2
    return torch.empty(*x.shape[:-1], 2 * F + 8 * triton.cdiv(F, GROUP), dtype=torch.int8, device=x.device)


def unpack(packed: torch.Tensor, F: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a packed SwiGLU input [M, ...] with feature size F, as [M, 2 F]."""
    packed = packed.view(torch.int8)
    out = torch.empty(len(packed), 2 * F, dtype=dtype, device=packed.device)
    for rows, values in zip(packed.split(UNPACKED_ROWS), out.split(UNPACKED_ROWS), strict=True):
        scales = rows[:, 2 * F :].contiguous().view(torch.float32).unflatten(-1, (2, -1))
        scales = scales.repeat_interleave(GROUP, -1)[..., :F].flatten(1)
        values.copy_(rows[:, : 2 * F] * scales)
    return out


def swiglu(x: torch.Tensor, quantizer: Any, packed: torch.Tensor | None = None) -> Any:
    """Compute silu(gate) * up as row-wise FP8 codes [..., F], where x [..., 2 F] contains gate and up side by side.
    CUDA only.

    Args:
        quantizer: Transformer Engine's quantizer for delayed scaling.
        packed: buffer from `empty_packed` to which the packed form of x is written, or None.
    """
    x = x.contiguous()
    F = x.shape[-1] // 2
    M = x.numel() // (2 * F)
    quantizer.set_usage(rowwise=True, columnwise=False)
    out = quantizer.make_empty((*x.shape[:-1], F), dtype=x.dtype, device=x.device)
    ROWS, COLUMNS, warps = FORWARD
    _forward[(triton.cdiv(F, COLUMNS) * triton.cdiv(M, ROWS),)](
        x, x if packed is None else packed, out._data, quantizer.scale, out._scale_inv, quantizer.amax, M, F,
        0 if packed is None else packed.shape[-1],
        E4M3=_is_e4m3(quantizer), PACK=packed is not None, ROWS=ROWS, COLUMNS=COLUMNS, GROUP=GROUP, num_warps=warps,
    )  # fmt: skip
    return out


def swiglu_transposed(packed: torch.Tensor, F: int, scale_inv: torch.Tensor, e4m3: bool) -> torch.Tensor:
    """Compute silu(gate) * up from a packed input [M, 2 F + ...] as transposed FP8 codes: uint8 [F, M]. CUDA only.

    Args:
        scale_inv: inverse of the scale that `swiglu` used to cast the output to FP8.
        e4m3: whether the FP8 format is e4m3 instead of e5m2.
    """
    M, pitch = packed.shape
    out = torch.empty(F, M, dtype=torch.uint8, device=packed.device)
    ROWS, COLUMNS, warps = TRANSPOSED
    _transposed[(triton.cdiv(F, COLUMNS), triton.cdiv(M, ROWS))](
        packed,
        out,
        scale_inv,
        M,
        F,
        pitch,
        E4M3=e4m3,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        GROUP=GROUP,
        num_warps=warps,
    )
    return out


def dswiglu(gradient: torch.Tensor, x: torch.Tensor, quantizer: Any) -> Any:
    """Compute the SwiGLU gradient for the input x [..., 2 F] as FP8 [..., 2 F].

    The result is both row-wise and transposed. CUDA only.

    Args:
        gradient: gradient of silu(gate) * up, [..., F] (feature size F).
        x: gate and up side by side, [..., 2 F], or their packed form.
        quantizer: Transformer Engine's quantizer for delayed scaling.
    """
    gradient, x = gradient.contiguous(), x.contiguous()
    F = gradient.shape[-1]
    M = gradient.numel() // F
    packed = x.shape[-1] != 2 * F
    quantizer.set_usage(rowwise=True, columnwise=True)
    out = quantizer.make_empty((*gradient.shape[:-1], 2 * F), dtype=gradient.dtype, device=x.device)
    x = x.view(torch.int8) if packed else x
    ROWS, COLUMNS, warps = BACKWARD
    _backward[(triton.cdiv(F, COLUMNS), triton.cdiv(M, ROWS))](
        gradient, x, out._data, out._transpose, quantizer.scale, out._scale_inv, quantizer.amax, M, F, x.shape[-1],
        E4M3=_is_e4m3(quantizer), PACKED=packed, ROWS=ROWS, COLUMNS=COLUMNS, GROUP=GROUP, num_warps=warps,
    )  # fmt: skip
    return out


def matches_reference(quantizer: Any) -> bool:
    """Return whether the compiled `dswiglu` kernel writes the same FP8 codes to the row-wise and the transposed output.

    The check uses the FP8 format of `quantizer` and waits for the GPU. CUDA only.
    """
    x = torch.linspace(-4.0, 4.0, 128 * 256, device=quantizer.scale.device).bfloat16().view(128, 256)
    made = dswiglu(x.view(256, 128)[:128], x, quantizer)
    return torch.equal(made._transpose, made._data.t())
