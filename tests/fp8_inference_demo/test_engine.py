"""The engine against transformers: the same tokens, alone and in a batch, beyond the window; and what it refuses."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralForCausalLM

from fp8_inference_demo import InferenceError
from fp8_inference_demo import engine as engine_module
from fp8_inference_demo.engine import Engine
from fp8_inference_demo.reference import attend_prompt
from fp8_inference_demo.sampling import Sampling
from fp8_inference_demo.weights import pack
from model.config import weight_shapes
from model.te_reference.quantize import Quantized, quantize_rows
from tests.conftest import refused, small_config

GREEDY = Sampling(temperature=0)


Model = tuple[Path, MistralForCausalLM]


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    """The folder of the model, and the model as transformers loads it."""
    return folder, MistralForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 40, 3, 11, *range(5, 100)][:count]
    return [[1, *torch.randint(3, 320, (n - 1,), generator=generator).tolist()] for n in lengths]


def tokens(engine: Engine, rows: list[list[int]], new: int, sampling: Sampling = GREEDY) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in rows]
    for step in engine.generate(rows, sampling, list(range(len(rows))), new):
        for answer, token in zip(out, step, strict=True):
            if token is not None:
                answer.append(token)
    return out


@pytest.mark.parametrize("changes", [{"sliding_window": 24}, {"model_type": "qwen3"}])
@torch.no_grad()
def test_greedy_tokens_equal_transformers(changes: dict, tmp_path: Path) -> None:
    """Prompts and answers are longer than the window of 24 tokens."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(small_config(initializer_range=0.2, **changes)).eval()
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    theirs.save_pretrained(tmp_path)
    rows = prompts(20)
    batched = tokens(Engine.load(tmp_path, "fp32", batch_size=20, max_length=360), rows, 256)
    assert len({token for answer in batched for token in answer}) > 100
    for row, answer in zip(rows, batched, strict=True):
        logits = theirs(torch.tensor([row + answer])).logits[0]
        assert answer == logits[len(row) - 1 : -1].argmax(-1).tolist() and len(answer) == 256
    engine = Engine.load(tmp_path, "fp32", batch_size=3, max_length=80)
    for row, answer in zip(rows[:3], batched[:3], strict=True):
        assert tokens(engine, [row], 40) == [answer[:40]], "nothing of earlier rows in the cache is seen"


def test_rows_stop_independently(model: Model) -> None:
    engine = Engine.load(model[0], "fp32", batch_size=3, max_length=48)
    rows = prompts(3)  # 1, 40 and 3 tokens
    run = engine.generate(rows, GREEDY, [0, 0, 0], 20)
    assert run.full == {1}
    steps = []
    for step in run:
        steps.append(step)
        if len(steps) == 5:
            run.stop(0)
    assert [sum(token is not None for token in row) for row in zip(*steps, strict=True)] == [5, 8, 20]
    assert (run.timing.prefill_tokens, run.timing.decode_tokens) == (44, 33 - 3)
    assert engine.generate([[1] * 28], GREEDY, [0], 20).full == set(), "it just fits"
    run.stop(1)
    assert run.full == set(), "it did not end because of the context"


def test_long_prompts_are_prefilled_in_chunks(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rows = Engine.load(model[0], "fp32", 5, 64), prompts(5)
    whole = tokens(engine, rows, 3)
    for most in (100, 39):  # of up to 40 tokens a prompt: two prompts at a time, and one
        monkeypatch.setattr(engine_module, "PREFILL_TOKENS", most)
        assert tokens(engine, rows, 3) == whole


@pytest.mark.parametrize("window", [1, 5, 8, 29, 30, None])
def test_sliding_window_prefill_with_any_block_size(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 30, 4, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, 30, 8, generator=generator)
    behind = torch.arange(30)[:, None] - torch.arange(30)
    visible = (behind >= 0) & (behind < (window or 30))
    wide_k, wide_v = (part.repeat_interleave(2, 1) for part in (k, v))
    scores = (q.transpose(1, 2) @ wide_k.mT / 8**0.5).masked_fill(~visible, -math.inf)
    expected = (scores.softmax(-1) @ wide_v).transpose(1, 2)
    for block in (1, 7, 8, 1024):
        torch.testing.assert_close(attend_prompt(q, k, v, window, block), expected)


@torch.no_grad()
def test_activation_precision_by_batch_size(
    model: Model,
) -> None:
    fp8, bf16 = (Engine.load(model[0], precision, 17, 32).forward for precision in ("fp8", "bf16"))
    for rows, kind in ((1, "fp8 weights"), (16, "fp8 weights"), (17, "fp8 gemm")):
        ids = torch.zeros(rows, dtype=torch.int64)
        for forward, counted in ((fp8, {kind: 2 * 4}), (bf16, {"bfloat16": 2 * 4})):
            forward.ran.clear()
            forward.decode(ids, torch.arange(rows))
            assert forward.ran == counted, rows
            forward.ran.clear()
            forward.prefill(ids[None])
            assert forward.ran == counted, rows


def test_nbytes_counts_each_tensor_once(model: Model) -> None:
    folder, theirs = model
    shapes = weight_shapes(theirs.config)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    saved = sum(sizes[name] - 4 * shape[0] for name, shape in shapes.items() if "_proj" in name)
    for precision, nbytes in (("bf16", 2 * sum(sizes.values())), ("fp8", 2 * sum(sizes.values()) - saved)):
        weights = Engine.load(folder, precision, 1, 8).weights
        assert weights.nbytes == nbytes
    weights.head.values = weights.embedding  # tied
    assert weights.nbytes == nbytes - 2 * sizes["lm_head.weight"]


def test_non_finite_logits_raise(model: Model) -> None:
    engine = Engine.load(model[0], "fp8", batch_size=2, max_length=48)
    engine.weights.norm[5] = math.nan
    with refused(InferenceError, code="not_finite"):
        tokens(engine, prompts(2), 4)


@pytest.mark.parametrize(
    ("rows", "code", "key"),
    [
        ([], "row_count", "batch_size"),
        ([[1]] * 3, "row_count", "batch_size"),
        ([[1], []], "row_length", "row 1"),
        ([[1] * 48], "row_length", "row 0"),
    ],
)
def test_too_many_rows_raise(model: Model, rows: list[list[int]], code: str, key: str) -> None:
    engine = Engine.load(model[0], "fp32", 2, 48)
    with refused(InferenceError, code=code, key=key):
        engine.generate(rows, GREEDY, [0] * len(rows), 4)
    with refused(InferenceError, code="max_length"):
        Engine(engine.weights, 1, 513)


def test_loading_stored_fp8_weights(model: Model) -> None:
    """Two modules of the training stayed in bf16; one of them is fused with modules that did not."""
    _, theirs = model
    kept = ("k_proj", "o_proj", "norm", "embed_tokens", "lm_head")
    tensors: dict[str, torch.Tensor | Quantized] = {
        name: p.detach().bfloat16() if any(part in name for part in kept) else quantize_rows(p.detach())
        for name, p in theirs.named_parameters()
    }
    layer = pack(dict(tensors), theirs.config, "fp8").layers[1]
    assert [m.fp8 for m in (layer.qkv, layer.o, layer.gate_up, layer.down)] == [False, False, True, True]
    at = "model.layers.1.self_attn"
    q, down = tensors[f"{at}.q_proj.weight"], tensors["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(q, Quantized) and isinstance(down, Quantized)
    assert torch.equal(layer.qkv.values[:128], q.dequantize(torch.bfloat16))
    assert torch.equal(layer.qkv.values[128:192], tensors[f"{at}.k_proj.weight"])
    assert torch.equal(layer.down.values.float(), down.codes.float())
    assert layer.down.scale is not None and torch.equal(layer.down.scale, down.scale)


@pytest.mark.parametrize(
    ("block", "size", "key"), [(False, 264, "0.mlp.gate_proj"), (True, 320, "0.mlp.down_proj")]
)
def test_unsupported_fp8_sizes_raise(model: Model, block: bool, size: int, key: str) -> None:
    """One scale per row needs multiples of 16, one per block columns in multiples of 128."""
    config = copy.deepcopy(model[1].config)
    config.intermediate_size = size
    tensors: dict[str, torch.Tensor | Quantized] = {
        name: Quantized(
            torch.ones(shape).to(torch.float8_e4m3fn), torch.ones(-(-shape[0] // 128), -(-shape[1] // 128))
        )
        if block and "proj" in name
        else torch.ones(shape)
        for name, shape in weight_shapes(config).items()
    }
    with refused(InferenceError, code="fp8_dimensions", key=f"model.layers.{key}.weight"):
        pack(dict(tensors), config, "fp8")
    if not block:
        pack(dict(tensors), config, "bf16")
