"""Each variant is the same model as transformers' Mistral, Llama or Qwen3, on the reference and on the GPU."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig
from transformers import MistralForCausalLM as TransformersMistral

from model import conversion
from model.build import build_model
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from tests.conftest import random_ids, refused, small_config
from tests.model.conftest import gradients, model_of, relative
from tests.published import PUBLISHED, small_model

CASES = {
    "gqa_32_8": dict(num_attention_heads=32, num_key_value_heads=8, head_dim=64),
    "gqa_4_2_head_dim_128": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=128),
    "sliding_window": dict(sliding_window=24, head_dim=64),
    "rope_theta_1e6": dict(rope_theta=1e6, head_dim=64),
    "tied": dict(tie_word_embeddings=True, head_dim=64),
    "window_tied_theta_mha": dict(
        sliding_window=7, tie_word_embeddings=True, rope_theta=1e6, num_key_value_heads=4, head_dim=128
    ),
    "qwen3": dict(model_type="qwen3", head_dim=64),
}
# the names are those of transformers 4 and 5
LLAMA_CASES = {
    **{name: small_model(name) for name in PUBLISHED},
    "linear": dict(model_type="llama", rope_scaling={"type": "linear", "factor": 4.0}),
    "llama3": dict(
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        }
    ),
    "yarn": dict(
        model_type="llama", rope_scaling={"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    ),
    "yarn_options": dict(
        sliding_window=24,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4, "original_max_position_embeddings": 32,
            "attention_factor": 1.5, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False,
        },
    ),
    "yarn_mscale": dict(
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 32,
            "mscale": 1.0, "mscale_all_dim": 0.7,
        }
    ),
}  # fmt: skip
CASES |= LLAMA_CASES
VARIANTS = ["te_linear", "te_layer"]


def transformers_model(
    config: MistralConfig, dtype: torch.dtype, device: torch.device
) -> TransformersMistral:
    """The weights are so large that attention and MLP outputs are not negligible.

    Norm weights are 0.5, 1 or 2, so that multiplying by them rounds nothing in bf16.
    """
    torch.manual_seed(0)
    config.initializer_range = 0.08
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = 2.0 ** torch.randint(-1, 2, parameter.shape, device=device)
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    model.to(dtype)
    model.model.rotary_emb.inv_freq = inv_freq  # float32, as from_pretrained keeps it
    return model.eval()


def compare(
    case: str, variant: str, compute: str, backend: str, batch: int, tokens: int
) -> tuple[float, float, dict[str, float]]:
    """(relative logits error, loss difference, relative gradient errors) of our variant against transformers."""
    config = small_config(**CASES[case])
    precision = Precision(PrecisionConfig(compute=compute, backend=backend))
    theirs = transformers_model(config, precision.dtype, precision.device).float()
    ours = build_model(config, variant, precision, seed=1)
    conversion.load_hf_state_dict(ours, conversion.to_hf_state_dict(theirs))
    ids = random_ids(config, batch, tokens + 1).to(precision.device)
    inputs, labels = ids[:, :-1], ids[:, 1:]
    with torch.no_grad():
        logits = ours(inputs).logits
    out = ours(inputs, labels=labels)
    reference = theirs(input_ids=inputs, use_cache=False).logits
    reference_loss = torch.nn.functional.cross_entropy(reference.float().flatten(0, 1), labels.flatten())
    out.loss.backward()
    reference_loss.backward()
    ours_grads = conversion.to_hf(gradients(ours), config)
    theirs_grads = gradients(theirs)
    errors = {name: relative(grad, theirs_grads[name]) for name, grad in ours_grads.items()}
    assert errors.keys() == theirs_grads.keys()
    return relative(logits, reference), float((out.loss - reference_loss).detach().abs()), errors


@pytest.mark.parametrize(
    ("case", "variant"),
    [
        *((case, "te_layer") for case in CASES),
        *((case, "te_linear") for case in CASES if case not in LLAMA_CASES),
        *(pytest.param(case, "te_linear", marks=pytest.mark.slow) for case in LLAMA_CASES),
        *((case, "hf") for case in [*LLAMA_CASES, "qwen3"]),
    ],
)
def test_reference_equals_transformers_in_float32(case: str, variant: str) -> None:
    logits, loss, grads = compare(case, variant, "fp32", "reference", batch=2, tokens=64)
    assert logits <= 1e-5
    assert loss <= 1e-5
    assert max(grads.values()) <= 1e-4, max(grads, key=grads.__getitem__)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_transformer_engine_equals_transformers_in_bf16(case: str, variant: str) -> None:
    # enough tokens that the mean of their rounding errors is below what is asserted
    logits, loss, grads = compare(case, variant, "bf16", "transformer_engine", batch=16, tokens=256)
    assert logits <= 2e-2
    assert loss <= 1e-3
    # bf16 rounds at other places in the backward; a wrong gradient is off by tenths
    assert max(grads.values()) <= 5e-2, max(grads, key=grads.__getitem__)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_without_labels_is_zero(variant: str) -> None:
    """As in the fused kernel of a GPU; torch's mean is NaN, for which all ranks would skip the step."""
    model, _ = model_of(variant, {"compute": "bf16"})
    ids = random_ids(small_config(), 2, 16)
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_state_dict_has_no_extra_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for what its modules add; weights that lack it are loaded, and others that lack are named."""
    precision = Precision(PrecisionConfig(compute="bf16", backend="reference"))
    for name in ("get_extra_state", "set_extra_state"):
        monkeypatch.setattr(precision.te.Linear, name, lambda self, *_: torch.zeros(1), raising=False)
    model = build_model(small_config(), "te_linear", precision)
    weights = model.state_dict()
    assert weights.keys() == TransformersMistral(small_config()).state_dict().keys()
    assert model.load_state_dict(weights).missing_keys == []
    del weights["lm_head.weight"]
    assert model.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]


def test_rotary_frequencies_stay_float32() -> None:
    """DeepSpeed calls model.bfloat16(); rounded frequencies would be another model."""
    ids = random_ids(small_config(), 1, 32)
    for variant in ("hf", *VARIANTS):
        model = model_of(variant, {"compute": "bf16"})[0].eval()
        before = model(ids).logits
        assert torch.equal(model.bfloat16()(ids).logits, before), variant


def test_mismatched_weights_are_named() -> None:
    model, _ = model_of(precision={"compute": "fp32"})
    weights = conversion.to_hf_state_dict(model)
    del weights["model.layers.0.self_attn.k_proj.weight"]
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][:-1]
    weights["model.layers.2.norm.weight"] = weights["model.norm.weight"]  # which would be lost
    k, up, other = (
        f"model.layers.{name}.weight" for name in ("0.self_attn.k_proj", "1.mlp.up_proj", "2.norm")
    )
    with refused(conversion.ConversionError, key=k) as error:
        conversion.load_hf_state_dict(model, weights)
    assert all(text in str(error.value) for text in (k, up, other))
