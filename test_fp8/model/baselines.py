"""What gives the rows hf_* and torchao_* of `bench_model.py` their best: an attention of torch's SDPA that is pinned,
and a fused loss. And, of any row, which kernels of attention a pass really ran."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import MistralConfig
from transformers.modeling_outputs import CausalLMOutput

from model.config import head_dim, window_size
from model.fp8.te_backend import is_installed
from model.mistral_base import causal_lm_loss
from model.proof import ATTENTION_TOLERANCE, sdpa
from model.te_reference.attention import causal_mask
from test_fp8.common.rows import NotHere
from test_fp8.common.same_model import DifferentModel, relative_error

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "fa4": SDPBackend.FLASH_ATTENTION,  # FlashAttention-4 in its place, a prototype of torch's
}
LIGER = "liger-kernel"


# ---------------------------------------------------------------- attention


@contextmanager
def pinned_sdpa(name: str, config: MistralConfig, tokens: int) -> Iterator[None]:
    """A block in which torch's SDPA runs `name` ("auto": what torch chooses), which is proven before it begins.

    Raises NotHere: it does not take the attention of a model of `config` on samples of so many tokens here;
    DifferentModel: it computes something else.
    """
    if name == "auto":
        yield
        return
    with ExitStack() as stack:
        if name == "fa4":
            stack.callback(_activate_flash_attention_4())
        stack.enter_context(sdpa_kernel(BACKENDS[name]))
        # the key of this cache, which is on the disk, has no attention in it: what is compiled here would run the
        # attention of the pin before
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        error = _sdpa_error(name, config, tokens)
        if not error <= ATTENTION_TOLERANCE["bf16"]:
            raise DifferentModel(f"torch's SDPA with {name} differs from float32's by {error:.1e} relative")
        yield


@contextmanager
def _asking_for(name: str) -> Iterator[None]:
    """Raises NotHere for what torch and the packages raise inside where there is no such attention."""
    try:
        yield
    except (RuntimeError, ImportError) as failure:
        text = " ".join(str(failure).split())[:200]
        raise NotHere(f"torch's SDPA has no attention {name} for this model here: {text}") from failure


def _activate_flash_attention_4() -> Callable[[], None]:
    """Returns what undoes it. Raises NotHere."""
    attention: Any = importlib.import_module("torch.nn.attention")
    if not hasattr(attention, "activate_flash_attention_impl"):
        raise NotHere("this torch has no place for FlashAttention-4")
    with _asking_for("fa4"):
        attention.activate_flash_attention_impl("FA4")
    return attention.restore_flash_attention_impl


def _sdpa_error(name: str, config: MistralConfig, tokens: int) -> float:
    """The largest relative error, of the output and the three gradients, of torch's SDPA in bf16 with what is pinned,
    `name`, called as transformers does, on one random sample. Raises NotHere: it does not take it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    N, K, D = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
    sizes = [(1, tokens, heads, D) for heads in (N, K, K)]
    qkv = [torch.randn(size, generator=generator).to(device, torch.bfloat16) for size in sizes]
    upstream = torch.randn(1, tokens, N * D, generator=generator).to(qkv[0])
    window = window_size(config)
    leaves = [t.transpose(1, 2).detach().requires_grad_() for t in qkv]
    q, k, v = leaves
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": N != K}
    if 0 <= window[0] < tokens:  # a sample of as many tokens as the window gets a mask from transformers, too
        k, v = (t.repeat_interleave(N // K, dim=1) for t in (k, v))
        options = {"attn_mask": causal_mask(tokens, window[0], device)}
    with _asking_for(name):
        out = F.scaled_dot_product_attention(q, k, v, **options)
        gradients = torch.autograd.grad(out, leaves, upstream.view(1, tokens, N, D).transpose(1, 2))
    ours = [out.transpose(1, 2).flatten(2), *(g.transpose(1, 2) for g in gradients)]
    with sdpa_kernel(SDPBackend.MATH):
        truth = sdpa([t.float() for t in qkv], upstream.float(), window, None)
    return max(relative_error(a.detach().float(), b) for a, b in zip(ours, truth, strict=True))


# ---------------------------------------------------------------- loss


def use_loss(model: Any, name: str) -> None:
    """Have `model`, of transformers' modules, compute its loss by `name`, one of rows.LOSSES. Logits are as they were.

    "torch": cross entropy of the logits in float32, which its backward keeps. "compiled": the same in two kernels of
    torch.compile's, which keep the bf16 logits alone. "liger": Liger's kernel of lm_head and loss in pieces, which
    keeps no logits and computes the gradients in the forward.
    Raises NotHere: liger-kernel is not installed, there is no GPU, or lm_head is no plain Linear.
    """
    if name == "torch":
        return
    plain = model.forward
    if name == "compiled":
        loss_of = torch.compile(causal_lm_loss, fullgraph=True, dynamic=False)
        fused = lambda ids, labels: loss_of(plain(ids).logits, labels)  # noqa: E731
    else:
        linear_loss = _liger(model)

        def fused(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            return linear_loss(hidden.flatten(0, 1), model.lm_head.weight, labels.flatten())

    def forward(
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
        documents: None = None,
    ) -> CausalLMOutput:
        if labels is None:
            return plain(input_ids)
        return CausalLMOutput(loss=fused(input_ids, labels))

    model.forward = forward


def _liger(model: Any) -> Callable[..., torch.Tensor]:
    if not is_installed(LIGER):
        raise NotHere(f"{LIGER} is not installed, which has the loss liger (requirements-gpu.txt)")
    if not torch.cuda.is_available():
        raise NotHere("the loss liger needs a GPU")
    if type(model.lm_head) is not nn.Linear:
        raise NotHere("the loss liger multiplies by lm_head itself, in bf16; this row's lm_head is FP8")
    # its mean is over the labels that are not -100
    return importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy


# ---------------------------------------------------------------- what ran

# How torch names the operation that SDPA becomes, and what kernels of attention have in their names.
OPERATION = re.compile(
    r"aten::_scaled_dot_product_(?:(\w+?)_attention(?:_for_cpu)?|attention_(math))(?:_backward)?$"
)
KERNEL = re.compile(r"sdpa|fmha|flash|attention|attn", re.IGNORECASE)
NAMED_KERNELS = 8


def attention_kernels(run: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """(the attentions of torch's SDPA that `run` called, of "cudnn", "flash", "efficient", "math"; the names of the
    attention kernels that it launched on the GPU, without their template arguments), as torch's profiler saw them."""
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CPU, *([activity.CUDA] if torch.cuda.is_available() else [])]
    # torch 2.13's says on the console when it starts and stops
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with torch.profiler.profile(activities=kinds) as profiled:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    operations, kernels = set(), set()
    for event in profiled.key_averages():
        if found := OPERATION.match(event.key):
            operations.add(found[1] or found[2])
        elif event.device_type != torch.autograd.DeviceType.CPU and is_attention_kernel(event.key):
            kernels.add(short_name(event.key))
    return sorted(operations), sorted(kernels)[:NAMED_KERNELS]


def is_attention_kernel(name: str) -> bool:
    """Not those of torch.compile, whose names tell all that is near them, nor ranges of the program's own."""
    return bool(KERNEL.search(name)) and not name.startswith(("triton_", "aten::", "##", "Torch-Compiled"))


def short_name(kernel: str) -> str:
    """`void pytorch_flash::flash_fwd_kernel<...>(...)` -> `pytorch_flash::flash_fwd_kernel`."""
    return re.split(r"[<(]", kernel.removeprefix("void "))[0].strip()[:100] or kernel[:100]
