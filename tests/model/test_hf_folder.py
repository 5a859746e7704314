"""Hugging Face folders: training, evaluation and the demo read the same weights or refuse the same tensor; folders of
the Hub; and FP8 weights for serving, which are those that a training multiplies with, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from transformers import MistralForCausalLM

from model.build import build_model
from model.config import load_config, load_sizes, weight_shapes
from model.conversion import hf_parts, to_hf_state_dict
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import snapshot_fp8_state
from model.hf_folder import BLOCK, WeightsError, local_folder, read_header, read_hf_folder
from model.serving import (
    TrainedFP8,
    quantization_config,
    quantize_by_row,
    to_stored_tensors,
    untrained_fp8,
)
from model.te_reference.quantize import Quantized, quantize_rows
from tests.conftest import numbers, random_ids, refused, small_config
from train.evaluation.models import plan_model
from train.preflight.check import check_weights

UP, NORM, HEAD = "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
Weights = dict[str, torch.Tensor]


class Folder:
    """A Hugging Face folder, changed in place by a row of a table. expected: what every program reads from it."""

    def __init__(self, path: Path, tied: bool = False):
        self.path = path
        self.config = small_config(tie_word_embeddings=tied, dtype="bfloat16").to_dict()
        generator = torch.Generator().manual_seed(0)
        shapes = weight_shapes(small_config(tie_word_embeddings=tied))
        self.tensors: Weights = {
            name: torch.randn(shape, generator=generator) for name, shape in shapes.items()
        }
        self.expected = dict(self.tensors)

    def write(self) -> None:
        (self.path / "config.json").write_text(json.dumps(self.config))
        if self.tensors:
            save_file(self.tensors, self.path / "model.safetensors", {"format": "pt"})


def read(path: Path) -> dict[str, Any]:
    return read_hf_folder(path, load_config(str(path)), torch.float32)


def in_training(path: Path) -> Weights:
    """As model.init_from, with the checks before the ranks start."""
    args: Any = SimpleNamespace(model=SimpleNamespace(init_from=str(path)))
    check_weights(args, load_sizes(str(path)))
    precision = Precision(PrecisionConfig(compute="fp32", backend="reference"))
    return to_hf_state_dict(build_model(load_config(str(path)), "te_layer", precision, init_from=str(path)))


def in_evaluation(path: Path) -> Weights:
    return to_hf_state_dict(plan_model(path, "fp32").build()[0])


def in_dtype(folder: Folder, dtype: torch.dtype, tagged: str) -> None:
    folder.tensors = {name: weight.to(dtype) for name, weight in folder.tensors.items()}
    folder.config["dtype"] = tagged


def large_bfloat16_as_float16(folder: Folder) -> None:
    """bfloat16 has these values, float16 has not."""
    in_dtype(folder, torch.bfloat16, "float16")
    folder.tensors[UP][3, 5], folder.tensors[UP][3, 6] = 70000, 1e-9
    folder.expected = {name: weight.float() for name, weight in folder.tensors.items()}


def without_prefix(folder: Folder) -> None:
    folder.tensors = {name.removeprefix("model."): weight for name, weight in folder.tensors.items()}


def with_tensor(name: str, value: torch.Tensor) -> Callable[[Folder], None]:
    return lambda folder: folder.tensors.update({name: value})


def with_value(name: str, value: float) -> Callable[[Folder], None]:
    return lambda folder: folder.tensors[name].view(-1).__setitem__(7, value)


def in_shards(lost: bool) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        shards = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(folder.tensors)}
        (folder.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        for shard in sorted(set(shards.values()))[lost:]:
            part = {name: weight for name, weight in folder.tensors.items() if shards[name] == shard}
            save_file(part, folder.path / shard)
        folder.tensors = {}

    return change


FOLDERS: list[tuple[str, bool, Callable[[Folder], object], str | None]] = [
    # what, tied embeddings, change, the tensor, key or file that the error names (None: it is read)
    ("float32 as bfloat16", False, lambda folder: None, None),
    ("bfloat16 as float16", False, large_bfloat16_as_float16, None),
    ("float64", False, lambda folder: in_dtype(folder, torch.float64, "float64"), None),
    ("in shards", False, in_shards(lost=False), None),
    ("no prefix", False, without_prefix, None),
    ("no prefix, tied", True, without_prefix, None),
    ("buffer", False, with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(16)), None),
    ("head again, tied", True, lambda folder: folder.tensors.update({HEAD: folder.tensors[EMBEDDING].clone()}), None),
    ("head alone, tied", True, lambda folder: folder.tensors.update({HEAD: folder.tensors.pop(EMBEDDING)}), None),
    ("head of its own, tied", True, with_tensor(HEAD, torch.ones(512, 128)), HEAD),
    ("padding id -1", False, lambda folder: folder.config.update(pad_token_id=-1), None),
    ("padding id", False, lambda folder: folder.config.update(pad_token_id=512), "pad_token_id"),
    ("padded vocabulary", False, with_tensor(EMBEDDING, torch.ones(640, 128)), EMBEDDING),
    ("missing", False, lambda folder: folder.tensors.pop(UP), UP),
    ("no head", False, lambda folder: folder.tensors.pop(HEAD), HEAD),
    ("unknown", False, with_tensor("model.layers.2.x", torch.ones(1)), "model.layers.2.x"),
    ("bias", False, with_tensor("model.layers.0.self_attn.q_proj.bias", torch.ones(128)), "q_proj.bias"),
    ("shape", False, with_tensor(UP, torch.ones(4, 8)), UP),
    ("integers", False, with_tensor(UP, torch.ones(256, 128, dtype=torch.int8)), UP),
    ("FP8 without scales", False, with_tensor(UP, torch.ones(256, 128).to(torch.float8_e4m3fn)), UP),
    ("NaN", False, with_value(UP, float("nan")), UP),
    ("infinite", False, with_value(EMBEDDING, float("-inf")), EMBEDDING),
    ("lost shard", False, in_shards(lost=True), "model-0.safetensors"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tied", "change", "named"), [row[1:] for row in FOLDERS], ids=[row[0] for row in FOLDERS]
)
def test_read_hf_folder(tied: bool, change: Callable, named: str | None, tmp_path: Path) -> None:
    """Weights keep the dtype of the file."""
    folder = Folder(tmp_path, tied)
    change(folder)
    folder.write()
    if named is not None:
        with pytest.raises(ValueError) as error:
            read(tmp_path)
        assert named in str(error.value)
        return
    weights = read(tmp_path)
    assert weights.keys() == folder.expected.keys()
    for name, weight in weights.items():
        assert weight.dtype == folder.tensors.get(name, weight).dtype
        assert torch.equal(weight.float(), folder.expected[name]), name


def test_all_readers_return_the_stored_values(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    large_bfloat16_as_float16(folder)
    folder.write()
    for program in (in_training, in_evaluation):
        weights = program(tmp_path)
        assert weights.keys() == folder.expected.keys()
        for name, weight in weights.items():
            assert weight.dtype == torch.float32 and torch.equal(weight.cpu(), folder.expected[name]), name
    with refused(WeightsError, key=UP) as error:
        plan_model(tmp_path, "fp16").build()
    assert 70144 in numbers(error.value)


def in_fp8(path: Path, blocks: bool) -> Folder:
    """The matrices of the layers in FP8, as an export writes them."""
    folder = Folder(path)
    weights: dict[str, Any] = dict(folder.tensors)
    for name in [name for name in weights if "_proj" in name]:
        if blocks:
            scale = torch.rand([-(-n // BLOCK) for n in weights[name].shape])
            weights[name] = Quantized(weights[name].to(torch.float8_e4m3fn), scale)
        else:
            weights[name] = quantize_rows(weights[name])
    folder.config["quantization_config"] = quantization_config(blocks, ["lm_head"])
    folder.tensors, folder.expected = to_stored_tensors(weights), weights
    return folder


@pytest.mark.parametrize("blocks", [False, True])
def test_fp8_weights_are_only_read_for_evaluation(tmp_path: Path, blocks: bool) -> None:
    folder = in_fp8(tmp_path, blocks)
    folder.write()
    weights, evaluated = read(tmp_path), in_evaluation(tmp_path)
    assert weights.keys() == folder.expected.keys()
    for name, weight in weights.items():
        expected: Any = folder.expected[name]
        assert isinstance(weight, Quantized) == isinstance(expected, Quantized) == ("_proj" in name)
        if isinstance(weight, Quantized):
            assert torch.equal(weight.codes.view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(weight.scale, expected.scale) and weight.by_row != blocks
            expected = expected.dequantize(torch.float32)
        assert torch.equal(evaluated[name], expected), name
    with refused(WeightsError, code="quantized", key="model.init_from"):
        in_training(tmp_path)


SCALE = f"{UP}_scale"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: folder.tensors.pop(SCALE), SCALE),
        (lambda folder: folder.tensors.pop(UP), UP),
        (with_tensor(SCALE, torch.ones(1)), SCALE),
        (with_tensor(SCALE, torch.ones(256, 1, dtype=torch.int8)), SCALE),
        (with_tensor(UP, torch.ones(256, 128)), SCALE),
        (with_value(SCALE, float("inf")), UP),
        (with_value(UP, float("nan")), UP),
        (with_tensor(HEAD, torch.ones(512, 128).to(torch.float8_e4m3fn)), HEAD),
        (
            lambda folder: folder.config["quantization_config"].update(format="pack-quantized"),
            "pack-quantized",
        ),
        (lambda folder: folder.config["quantization_config"].update(config_groups={}), "compressed-tensors"),
        (lambda folder: folder.config.update(quantization_config={"quant_method": "awq"}), "awq"),
        (
            lambda folder: folder.config.update(
                quantization_config=quantization_config(True, []) | {"scale_fmt": "ue8m0"}
            ),
            "ue8m0",
        ),
    ],
)
def test_unsupported_fp8_format_raises(tmp_path: Path, change: Callable, named: str) -> None:
    folder = in_fp8(tmp_path, False)
    change(folder)
    folder.write()
    with refused(WeightsError) as error:
        read(tmp_path)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:4],
        lambda data: data[:-3],
        lambda data: data + b"more",
        lambda data: b"version https://git-lfs.github.com/spec/v1",
    ],
)
def test_damaged_files_are_named(tmp_path: Path, change: Callable) -> None:
    path = tmp_path / "model.safetensors"
    with refused(WeightsError, code="not_safetensors", key=str(path)):
        read_header(path)
    save_file({"a": torch.zeros(4), "b": torch.zeros(2)}, path, {"format": "pt"})
    assert read_header(path) == {"a": ("F32", (4,)), "b": ("F32", (2,))}
    path.write_bytes(change(path.read_bytes()))
    with refused(WeightsError, code="not_safetensors", key=str(path)):
        read_header(path)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, dict[str, Any]]]:
    monkeypatch.chdir(tmp_path)
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **which: calls.append((name, which)) or "/cache/snapshot",
    )
    return calls


def test_hub_download_excludes_pickles(downloads: list) -> None:
    assert local_folder("mistralai/Mistral-7B-v0.3") == "/cache/snapshot"
    assert local_folder("org/tokenizer.v1", weights=False) == "/cache/snapshot"
    (_, all_files), (name, small) = downloads
    assert name == "org/tokenizer.v1" and "*.safetensors" not in small["allow_patterns"]
    assert "*.safetensors" in all_files["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in all_files["allow_patterns"])


def test_local_path_is_not_downloaded(downloads: list) -> None:
    Path("data").mkdir()
    for name in (
        "tiny",
        "data/absent",
        "configs/absent.json",
        "/data/absent",
        "./org/name",
        "a/b/c",
        "~/model",
        "",
    ):
        assert local_folder(name) == name
    assert downloads == []


SIZES = {"num_key_value_heads": 4, "intermediate_size": 256}
"""Of a model that blocks of 128 divide."""


def train(
    variant: str, steps: int = 2, fallbacks: dict[str, str] | None = None, **keys: Any
) -> tuple[Any, Any, dict, dict, dict]:
    """A model, with modules at `fallbacks`, that took some steps: configurations, weights, FP8 state, and the FP8
    copies that its modules keep in the next step's first forward, by module and GEMM."""
    config, precision_config = small_config(**SIZES), PrecisionConfig(**keys)
    precision = Precision(precision_config, fallbacks=fallbacks)
    model: Any = build_model(config, variant, precision, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(steps):
        ids = random_ids(config, 2, 33, step).to(precision.device)
        model(ids[:, :-1], labels=ids[:, 1:], is_first_microbatch=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: tensor.cpu() for name, tensor in to_hf_state_dict(model).items()}
    state = {name: tensor.cpu() for name, tensor in snapshot_fp8_state(model, precision).items()}
    model(random_ids(config, 2, 32, 9).to(precision.device), is_first_microbatch=True)
    copies = {
        f"{name}.{gemm}": kept
        for name, module in model.named_modules()
        for gemm, kept in enumerate(getattr(module, "_fp8_workspaces", {}).values())
    }
    return config, precision_config, weights, state, copies


def expected(config: Any, copies: dict) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Codes and scales of the Hugging Face tensors of the layers in the FP8 copies of a model."""
    parameters = {
        "layernorm_mlp.0": "layernorm_mlp.fc1_weight",
        "layernorm_mlp.1": "layernorm_mlp.fc2_weight",
    }
    out = {}
    for key, kept in copies.items():
        end = next((end for end in parameters if key.endswith(end)), None)
        name = key.removesuffix(end) + parameters[end] if end else f"{key.removesuffix('.0')}.weight"
        (codes, scale), first = kept.rows, 0
        for part, rows in hf_parts(name, codes.shape, config):
            blocks = slice(first // 128, (first + rows) // 128)
            out[part] = codes[first : first + rows], scale[blocks] if scale.dim() else scale
            first += rows
    return {name: found for name, found in out.items() if name.startswith("model.layers.")}


@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
@pytest.mark.parametrize(
    "keys",
    [
        dict(recipe="delayed", amax_history_len=2, margin=1),
        dict(recipe="delayed", bf16_modules=["lm_head", "model.layers.0", "model.layers.1.*mlp"]),
        dict(recipe="current", bf16_modules=[]),
        dict(recipe="current", power_2_scales=True, amax_epsilon=0.4),
        dict(recipe="block", amax_epsilon=0.1),
        dict(recipe="block", power_2_scales=False),
    ],
    ids=lambda keys: "-".join(str(v) for v in keys.values()),
)
def test_exported_fp8_equals_training(variant: str, keys: dict) -> None:
    config, precision, weights, state, copies = train(variant, **keys)
    trained = TrainedFP8(config, variant, precision)
    quantized = trained.quantize(weights, state)
    wanted = expected(config, copies)
    assert sorted(trained.names) == sorted(quantized) == sorted(wanted)
    for name, (codes, scale) in wanted.items():
        ours = quantized[name]
        assert torch.equal(ours.codes.view(torch.uint8), codes.view(torch.uint8)), name
        assert ours.scale.dtype == torch.float32
        assert torch.equal(ours.scale, scale.repeat(len(codes), 1) if scale.dim() == 0 else scale), name
        assert ours.by_row == (precision.recipe != "block")
        assert ours.codes.float().abs().max() > 16, "the test's weights use the range"
    assert len(wanted) == (4 if keys.get("bf16_modules") else 14)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_exported_fp8_equals_transformer_engine(variant: str, recipe: str) -> None:
    """As the test above; what Transformer Engine keeps on a GPU, its block scales without their padding."""

    def of(kept: Any) -> SimpleNamespace:
        if recipe != "block":
            rows, scale = kept._data, kept._scale_inv.reshape(())
        else:
            rows = kept._rowwise_data
            scale = kept._rowwise_scale_inv[: rows.shape[0] // 128, : rows.shape[1] // 128]
        return SimpleNamespace(rows=(rows.cpu().view(torch.float8_e4m3fn), scale.cpu()))

    config, precision, weights, state, copies = train(variant, recipe=recipe)
    quantized = TrainedFP8(config, variant, precision).quantize(weights, state)
    copies = {name: of(kept) for name, kept in copies.items() if not name.startswith("lm_head")}
    wanted = expected(config, copies)
    assert sorted(quantized) == sorted(wanted) and len(wanted) == 14
    for name, (codes, scale) in wanted.items():
        assert torch.equal(quantized[name].codes.view(torch.uint8), codes.view(torch.uint8)), name
        assert torch.equal(quantized[name].scale, scale.expand_as(quantized[name].scale)), name


@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
def test_indivisible_blocks_raise(variant: str) -> None:
    config, layer = small_config(), "model.layers.0"  # two key/value heads of 32
    with refused(PrecisionError, code="block_dimensions", key=f"{layer}.self_attn.k_proj.weight") as error:
        TrainedFP8(config, variant, PrecisionConfig(recipe="block"))
    assert "(64, 128)" in str(error.value)
    TrainedFP8(config, variant, PrecisionConfig(recipe="current"))
    if variant == "te_linear":  # columns, too
        config = small_config(num_key_value_heads=4, intermediate_size=192)
        kept = ["lm_head", "*gate_proj", "*up_proj"]
        with refused(PrecisionError, code="block_dimensions", key=f"{layer}.mlp.down_proj.weight"):
            TrainedFP8(config, "te_linear", PrecisionConfig(recipe="block", bf16_modules=kept))


def test_quantization_with_row_scales() -> None:
    config = small_config()
    with torch.device("meta"):
        hf = MistralForCausalLM(config)
    names = untrained_fp8(hf, PrecisionConfig(compute="bf16", bf16_modules=["model.layers.0"]))
    assert len(names) == 14 and not any("lm_head" in name or "norm" in name for name in names)
    torchao = PrecisionConfig(recipe="rowwise", bf16_modules=["lm_head", "*.0.mlp", "*.k_proj"])
    assert len(untrained_fp8(hf, torchao)) == 14 - 3 - 2
    weight = torch.randn(48, 160, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[3] = 0
    (row,) = quantize_by_row({"a": weight}, ["a"]).values()
    assert row.by_row and row.scale[3] == 1
    error = (row.dequantize(torch.float32) - weight.float()).abs()
    assert (error <= weight.float().abs() / 16 + row.scale * 2**-10).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_raise(value: float) -> None:
    weight = torch.ones(4, 16)
    weight[1, 1] = value
    with refused(PrecisionError, code="not_finite", key="up"):
        quantize_by_row({"up": weight}, ["up"])
    config, precision, weights, state, _ = train("te_linear", steps=0, recipe="current")
    weights[name := "model.layers.1.mlp.up_proj.weight"][0, 0] = value
    with refused(PrecisionError, code="not_finite", key=name):
        TrainedFP8(config, "te_linear", precision).quantize(weights, state)
