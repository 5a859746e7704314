"""The GEMM modules of a model: which are meant to run FP8, which not and why, and which did."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from model.variants import VARIANTS

if TYPE_CHECKING:
    from model.fp8.precision import Precision


@dataclass
class FP8Report:
    """What runs FP8. `planned`: GEMM modules meant to; `kept`: the others with the reason; `ran`: the modules whose
    last forward really ran FP8."""

    planned: list[str]
    kept: dict[str, str]
    ran: list[str]

    def lines(self, recipe: str | None) -> list[str]:
        """The log's statement: one line for FP8, one a reason for what stays in high precision."""
        total = len(self.planned) + len(self.kept)
        how = f" ({recipe} scaling)" if recipe else ""
        out = [f"FP8: {len(self.ran)} of {total} GEMM modules ran FP8{how}"]
        for reason in dict.fromkeys(self.kept.values()):
            names = [name for name, why in self.kept.items() if why == reason]
            shown = ", ".join(names[:4]) + (f", ... ({len(names)} in all)" if len(names) > 4 else "")
            out.append(f"  not FP8: {shown}: {reason}")
        return out


def keep_out_of_fp8(module: nn.Module, te: Any) -> None:
    """Run `module`, with everything inside, under a disabled autocast."""
    stack: list[Any] = []

    def enter(*_: Any) -> None:
        context = te.autocast(enabled=False)
        context.__enter__()
        stack.append(context)

    def leave(*_: Any) -> None:
        stack.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def gemm_modules(model: nn.Module, precision: Precision) -> dict[str, nn.Module]:
    """The modules that hold matrix products, by name: TE's, in transformers' own model torch's or torchao's Linear."""
    kinds: tuple[type, ...] = (nn.Linear,)
    variant = getattr(model, "variant", None)
    if variant is None or VARIANTS[variant].te:
        kinds = (precision.te.Linear, precision.te.LayerNormLinear, precision.te.LayerNormMLP)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def matrices(module: nn.Module) -> list[nn.Parameter]:
    """The weights of the GEMMs of one module: [outputs, inputs] each."""
    return [p for p in module.parameters(recurse=False) if p.dim() == 2]


def fp8_modules(model: nn.Module, precision: Precision) -> FP8Report:
    """Which GEMM modules of `model` are meant to run FP8, which not and why, and which ran FP8 last time; with torchao,
    the last time that `torchao_fp8.observe` watched."""
    report = FP8Report([], {}, [])
    for name, module in gemm_modules(model, precision).items():
        reason = None
        if not precision.fp8:
            reason = f"precision.compute is {precision.config.compute}"
        else:
            parents = [name[:i] for i, c in enumerate(name) if c == "."] + [name]
            for pattern in precision.config.bf16_modules:
                if fnmatch.filter(parents, pattern):
                    reason = f"precision.bf16_modules has {pattern!r}"
                    break
        if reason is None:
            report.planned.append(name)
        else:
            report.kept[name] = reason
        if getattr(module, "fp8", False):
            report.ran.append(name)
    return report
