"""Give the cases hf_* and torchao_* of bench_model.py their best: a pinned attention of torch's SDPA and a fused loss.
And find out which attention a pass ran."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_outputs import CausalLMOutput

from model.fp8.te_backend import is_installed
from model.mistral_base import causal_lm_loss
from test_fp8.common.cases import Unavailable

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LIGER = "liger-kernel"
# How torch names the operation that SDPA becomes.
OPERATION = re.compile(
    r"aten::_scaled_dot_product_(?:(\w+?)_attention(?:_for_cpu)?|attention_(math))(?:_backward)?$"
)


@contextmanager
def pinned_sdpa(name: str) -> Iterator[None]:
    """Run torch's SDPA with the backend `name` in the block ("auto": torch chooses)."""
    if name == "auto":
        yield
        return
    # the key of torch's cache on the disk does not include the backend, so code compiled for another one would run
    with sdpa_kernel(BACKENDS[name]), functorch_config.patch(enable_autograd_cache=False):
        yield


def use_loss(model: Any, name: str) -> None:
    """Make `model`, of transformers' modules, compute its loss by `name`, one of cases.LOSSES.

    "torch": cross entropy of float32 logits. "compiled": the same by torch.compile, which keeps bf16 logits. "liger":
    Liger's kernel of lm_head and loss, which keeps no logits and computes gradients in the forward. Raises Unavailable.
    """
    if name == "torch":
        return
    plain = model.forward
    if name == "compiled":
        loss_of = torch.compile(causal_lm_loss, fullgraph=True, dynamic=False)
    else:
        linear_loss = _liger(model)

    def forward(
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
        documents: None = None,
    ) -> CausalLMOutput:
        if labels is None:
            return plain(input_ids)
        if name == "compiled":
            return CausalLMOutput(loss=loss_of(plain(input_ids).logits, labels))
        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return CausalLMOutput(loss=linear_loss(hidden.flatten(0, 1), model.lm_head.weight, labels.flatten()))

    model.forward = forward


def _liger(model: Any) -> Callable[..., torch.Tensor]:
    if not is_installed(LIGER) or not torch.cuda.is_available():
        raise Unavailable(f"the loss liger needs a GPU and {LIGER} (requirements-gpu.txt)")
    if type(model.lm_head) is not nn.Linear:
        raise Unavailable("the loss liger multiplies by lm_head in bf16, and this case's lm_head is FP8")
    return importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy


def sdpa_operations(run: Callable[[], Any]) -> list[str]:
    """Profile `run` and return the backends of torch's SDPA that it called, of "cudnn", "flash", "efficient",
    "math"."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler prints when it starts and stops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        run()
    found = (OPERATION.match(event.key) for event in profiled.key_averages())
    return sorted({match[1] or match[2] for match in found if match})
