"""model/hf_folder.py: training, evaluation and the demo read the same weights, or refuse the same tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model.build import build_model
from model.config import load_config, load_sizes, weight_shapes
from model.conversion import to_hf_state_dict
from model.fp8.hf_fp8 import Quantized, flat, quantization_config, quantize_rows
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.hf_folder import BLOCK, WeightsError, read_header, read_hf_folder
from tests.conftest import numbers, refused, small_config
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


def head_alone(folder: Folder) -> None:
    folder.tensors[HEAD] = folder.tensors.pop(EMBEDDING)


def head_again(folder: Folder) -> None:
    folder.tensors[HEAD] = folder.tensors[EMBEDDING].clone()


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
    ("head again, tied", True, head_again, None),
    ("head alone, tied", True, head_alone, None),
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
def test_a_folder_is_read_or_a_tensor_is_named(
    tied: bool, change: Callable, named: str | None, tmp_path: Path
) -> None:
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


def test_every_program_has_the_values_of_the_file(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("dtypes", "compute"),
    [([torch.float16], "fp16"), ([torch.bfloat16], "bf16"), ([torch.bfloat16, torch.float32], "fp32")],
)
def test_a_folder_is_evaluated_in_the_dtype_of_its_files(
    tmp_path: Path, dtypes: list[torch.dtype], compute: str
) -> None:
    folder = Folder(tmp_path)
    in_dtype(folder, dtypes[0], "float32")
    folder.tensors[NORM] = folder.tensors[NORM].to(dtypes[-1])
    folder.write()
    assert plan_model(tmp_path, None).precision.compute == compute
    assert plan_model(tmp_path, "bf16").precision.compute == "bf16"


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
    folder.tensors, folder.expected = flat(weights), weights
    return folder


@pytest.mark.parametrize("blocks", [False, True])
def test_weights_in_fp8_are_read_for_evaluation_alone(tmp_path: Path, blocks: bool) -> None:
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
def test_fp8_that_is_not_as_exports_write_it_is_refused(tmp_path: Path, change: Callable, named: str) -> None:
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
def test_files_that_are_not_whole_are_named(tmp_path: Path, change: Callable) -> None:
    path = tmp_path / "model.safetensors"
    with refused(WeightsError, code="not_safetensors", key=str(path)):
        read_header(path)
    save_file({"a": torch.zeros(4), "b": torch.zeros(2)}, path, {"format": "pt"})
    assert read_header(path) == {"a": ("F32", (4,)), "b": ("F32", (2,))}
    path.write_bytes(change(path.read_bytes()))
    with refused(WeightsError, code="not_safetensors", key=str(path)):
        read_header(path)
