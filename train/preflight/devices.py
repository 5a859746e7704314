"""How fast a GPU is, and how it is: a GEMM, a copy, and what nvidia-smi says of clocks and errors."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

GEMM, COPY_BYTES, REPEATS = 8192, 2**29, 10
TIMEOUT_S = 30
# Fields of nvidia-smi --query-gpu.
CLOCK, MAX_CLOCK, ECC = "clocks.sm", "clocks.max.sm", "ecc.errors.uncorrected.volatile.total"
SLOWDOWNS = {
    "clocks_throttle_reasons.hw_slowdown": "the hardware slows it down (power, or heat)",
    "clocks_throttle_reasons.hw_thermal_slowdown": "it is too hot, and the hardware slows it down",
    "clocks_throttle_reasons.sw_thermal_slowdown": "it is hot, and the driver slows it down",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "the power supply slows it down",
}


@dataclass(frozen=True)
class Speed:
    """gemm_tflops: of a bf16 GEMM of 8192 x 8192 x 8192. copy_gb_s: bytes read and written, in its memory."""

    gemm_tflops: float
    copy_gb_s: float


def speed_of_gpu() -> Speed | None:
    """Of this rank's; None without one: ranks on a CPU share its cores."""
    if not torch.cuda.is_available():
        return None
    gemm_s, copy_s = _gemm_s(), _copy_s()
    torch.cuda.empty_cache()
    return Speed(2 * GEMM**3 / gemm_s / 1e12, 2 * COPY_BYTES / copy_s / 1e9)


def _gemm_s() -> float:
    a, b = (torch.randn(GEMM, GEMM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return _seconds(lambda: torch.mm(a, b))


def _copy_s() -> float:
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return _seconds(lambda: target.copy_(source))


def _seconds(call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / REPEATS


@dataclass(frozen=True)
class Health:
    """What nvidia-smi says of a GPU, by field."""

    fields: dict[str, str]

    def findings(self) -> list[str]:
        found = [
            f"its GPU at {self.fields.get(CLOCK)} of {self.fields.get(MAX_CLOCK)} MHz: {text}; look at its cooling and "
            "power, or leave the node out"
            for name, text in SLOWDOWNS.items()
            if self.fields.get(name) == "Active"
        ]
        errors = self.fields.get(ECC, "")
        if errors.isdecimal() and int(errors):
            found.append(
                f"{errors} uncorrected ECC errors of its GPU's memory since the driver was loaded: its numbers are not "
                "to be trusted. Leave the node out, and have the GPU reset or replaced"
            )
        return found


def health_of_gpu() -> Health | None:
    """Of this rank's GPU; None without one, or without nvidia-smi."""
    if not torch.cuda.is_available():
        return None
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    names = [CLOCK, MAX_CLOCK, ECC, *SLOWDOWNS]
    return read_health(names, ["nvidia-smi", "-i", f"GPU-{uuid}"])


def read_health(names: list[str], program: list[str]) -> Health | None:
    command = [*program, f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in run.stdout.strip().split(",")]
    return Health(dict(zip(names, values, strict=True))) if len(values) == len(names) else None
