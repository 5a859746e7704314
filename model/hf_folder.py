"""Download Hugging Face model folders, and find, check and read their weights.

Training, evaluation, the inference demo and exports use these functions. Weights keep the dtype in the file; the dtype
in config.json is ignored. `find_weights` reads only config.json and the headers of safetensors files, and does not
import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.config import ARCHITECTURE, has_qk_norm, head_dim, load_sizes, rope_parameters, weight_shapes
from model.errors import UserError

if TYPE_CHECKING:
    import torch

    from model.te_reference.quantize import Quantized

ROW_SCALE, BLOCK_SCALE = "_scale", "_scale_inv"
"""Suffixes for the names of scales in the two FP8 formats of model/serving.py."""
BLOCK = 128  # rows and columns of a block that shares a scale
# Entries of quantization_config for the two FP8 formats. FP8_ROW_WEIGHTS are those of the weights of each group.
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
FP8_ROWS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
FP8_ROW_WEIGHTS = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
FP8, FP8_MAX, FP8_NAN = "F8_E4M3", 448, 0x7F
COMPUTE = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp32"}
"""Supported dtypes of safetensors files, and the precision.compute that can hold their values."""
HUB_FILES = ["*.json", "*.jinja", "tokenizer.model"]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class HubError(UserError, ValueError):
    """An error raised when a Hugging Face Hub repository cannot be downloaded."""

    code = "hub"


class WeightsError(UserError, ValueError):
    """An error raised when the weights in a Hugging Face folder are missing, damaged or do not match the model."""

    code = "weights"


@dataclass(frozen=True)
class StoredTensor:
    """Location, dtype and shape of a tensor in a safetensors file, read from the file's header.

    Attributes:
        name: tensor name in `file`.
        dtype: safetensors name of the dtype, such as BF16.
        scale: the stored scales if the tensor contains FP8 codes, otherwise None.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: StoredTensor | None = None


def local_folder(name: str, weights: bool = True) -> str:
    """Download a Hugging Face Hub repository and return its local folder. Local paths are returned unchanged.

    `name` is a repository if it has the form org/name and is not a local path. Several processes on a node may call
    this function at the same time, because huggingface_hub locks each file while downloading.

    Args:
        weights: whether to also download *.safetensors.

    Raises HubError if the download fails.
    """
    path = Path(name)
    if not HUB_ID.fullmatch(name) or path.exists() or path.parent.exists() or path.suffix == ".json":
        return name
    from huggingface_hub import snapshot_download  # takes half a second

    try:
        return snapshot_download(
            name,
            allow_patterns=[*HUB_FILES, *["*.safetensors"] * weights],
            ignore_patterns=["*/*", "consolidated*"],
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise HubError(
            f"{name} is not a local folder and cannot be downloaded from the Hugging Face Hub ({reason}). Check the "
            f"name, or run `hf download {name} --local-dir DIR` on a host with access to the Hub and pass DIR",
            key=name,
        ) from error


def check_init_from(folder: str, config: Any) -> None:
    """Check that the Hugging Face weights in `folder` can initialize a model with `config`. Reads only config.json.

    Raises:
        WeightsError: If the folder does not exist, its model does not match `config`, or its weights are quantized.
        ModelConfigError: If the config.json of the folder is invalid or unsupported.
    """

    def architecture(of: Any) -> dict[str, Any]:
        values = {key: getattr(of, key, None) for key in ARCHITECTURE if key != "rope_parameters"}
        return values | {"head_dim": head_dim(of), "qk_norm": has_qk_norm(of), **rope_parameters(of)}

    if not Path(folder).is_dir():
        raise WeightsError(
            f"model.init_from: {folder!r} is not a folder; pass a folder with a Hugging Face model, such as a run's "
            "hf folder",
            key="model.init_from",
        )
    theirs, ours = architecture(load_sizes(folder)), architecture(config)
    differences = {
        key: f"{key} is {theirs.get(key)} in the folder and {ours.get(key)} in model.config"
        for key in {**ours, **theirs}
        if theirs.get(key) != ours.get(key)
    }
    if differences:
        raise WeightsError(
            f"model.init_from: the architecture of {folder!r} differs from model.config: "
            + "; ".join(differences.values())
            + ". Set model.config to the path of this folder, or choose another folder",
            code="architecture",
            key=next(iter(differences)),
        )
    if method := read_quantization_config(folder).get("quant_method"):
        raise WeightsError(
            f"model.init_from: the weights in {folder!r} are quantized for inference ({method}). Pass a "
            "folder with unquantized weights: a run's hf folder, or an export with --format hf",
            code="quantized",
            key="model.init_from",
        )


def find_weights(folder: str | Path, config: Any) -> dict[str, StoredTensor]:
    """Find all weights of a model in a Hugging Face folder. Reads config.json and file headers, and does not import
    torch.

    Tensor names may lack the prefix "model.". Rotary buffers are ignored. With tied embeddings, the files may contain
    lm_head in addition to or instead of the embedding.

    Args:
        config: the model configuration from `load_config` or `load_sizes`.

    Returns: the stored tensors, keyed by the names from `weight_shapes`.

    Raises WeightsError if there are no safetensors files, they are damaged, the quantization is not supported, or
    tensors are missing, unknown, stored twice, or have the wrong shape or dtype.
    """
    folder = Path(folder)
    suffix, shapes = _scale_suffix(folder), weight_shapes(config)
    names = set(shapes)
    found: dict[str, StoredTensor] = {}
    problems = []
    for file in _weight_files(folder):
        for stored, (dtype, shape) in read_header(file).items():
            if "rotary_emb." in stored:
                continue
            name = f"model.{stored}" if stored.startswith(("embed_tokens.", "layers.", "norm.")) else stored
            if name in found:
                problems.append(f"{name} is stored twice; keep only one copy")
            found[name] = StoredTensor(file, stored, dtype, shape)
    if config.tie_word_embeddings and HEAD in found:
        shapes[HEAD] = shapes[EMBEDDING]
        found.setdefault(EMBEDDING, found[HEAD])
    quantized = {name for name, t in found.items() if suffix and t.dtype == FP8 and "_proj." in name} & names
    for name in quantized:
        rows, columns = shapes[name]
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        shapes[f"{name}{suffix}"] = (rows, 1) if suffix == ROW_SCALE else blocks
    for name in sorted({*shapes, *found}):
        tensor, needed = found.get(name), shapes.get(name)
        if tensor is None or tensor.shape != needed:
            problems.append(
                f"{name} has shape {tensor and tensor.shape}, but the model expects {needed} (None means that "
                "the tensor does not exist)"
            )
        elif tensor.dtype not in COMPUTE and name not in quantized:
            problems.append(f"{name} has dtype {tensor.dtype}, but only {', '.join(COMPUTE)} are supported")
    _refuse(folder, problems)
    return {
        name: replace(found[name], scale=found[f"{name}{suffix}"] if name in quantized else None)
        for name in shapes
        if name in names or name == HEAD
    }


def read_hf_folder(
    folder: str | Path, config: Any, dtype: torch.dtype
) -> dict[str, torch.Tensor | Quantized]:
    """Read all weights of a model with configuration `config` from a Hugging Face folder.

    Args:
        dtype: compute dtype. Weights keep the stored dtype, but every value must stay finite when cast to `dtype`.

    Returns: CPU tensors keyed by the names from `weight_shapes`, memory-mapped and in the dtype of the file. FP8
    matrices are returned as Quantized.

    Raises WeightsError for the same reasons as `find_weights`, if a weight is not finite in `dtype`, or if config.json
    ties embeddings but lm_head differs.
    """
    import torch
    from safetensors import safe_open

    from model.te_reference.quantize import Quantized

    stored = find_weights(folder, config)
    files: dict[Path, Any] = {}

    def read(tensor: StoredTensor) -> torch.Tensor:
        if tensor.file not in files:
            files[tensor.file] = safe_open(tensor.file, "pt")
        return files[tensor.file].get_tensor(tensor.name)

    weights: dict[str, Any] = {}
    problems = []
    for name, tensor in stored.items():
        weights[name] = values = read(tensor)
        if tensor.scale is None:
            extremes = torch.stack(values.aminmax())  # NaN if any value is NaN
        else:
            weights[name] = Quantized(values, read(tensor.scale).float())
            extremes = torch.stack(weights[name].scale.aminmax()) * FP8_MAX
            if ((values.view(torch.uint8) & FP8_NAN) == FP8_NAN).any():
                extremes *= torch.nan
        if not extremes.isfinite().all():
            problems.append(f"{name} contains NaN or infinite values; use another checkpoint")
        elif not extremes.to(dtype).isfinite().all():
            problems.append(
                f"{name} contains values up to {float(extremes.abs().max()):g}, which are too large for {dtype}; set "
                "precision.compute to bf16 or, if bf16 is also too small, to fp32"
            )
    _refuse(folder, problems)
    if config.tie_word_embeddings and not (weights.get(HEAD, weights[EMBEDDING]) == weights[EMBEDDING]).all():
        raise WeightsError(
            f"{folder}: config.json sets tie_word_embeddings to true, but {HEAD} differs from {EMBEDDING}; "
            "set tie_word_embeddings to false",
            key=HEAD,
        )
    return {name: weights[name] for name in weight_shapes(config)}


def stored_compute(weights: Mapping[str, StoredTensor]) -> str:
    """Return the value of precision.compute (bf16, fp16 or fp32) that can represent all unquantized weights in
    `weights`.
    """
    kinds = {COMPUTE[tensor.dtype] for tensor in weights.values() if tensor.dtype != FP8}
    return kinds.pop() if len(kinds) == 1 else "fp32"


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of each tensor in a safetensors file, keyed by tensor name.

    Raises WeightsError if the file is unreadable or truncated.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no dict)
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"{file} cannot be read as a safetensors file ({error}). If it is a Git LFS pointer, run git lfs "
            "pull in its folder. Otherwise, copy or download the file again",
            code="not_safetensors",
            key=str(file),
        ) from error


def read_quantization_config(folder: str | Path) -> dict[str, Any]:
    """Return the quantization_config of a Hugging Face folder, or {} if the weights are not quantized."""
    text = (Path(folder) / "config.json").read_text(encoding="utf-8-sig")
    return json.loads(text).get("quantization_config") or {}


def _weight_files(folder: Path) -> list[Path]:
    """Return the paths of the safetensors files in a Hugging Face folder.

    Raises WeightsError if the folder has no such files, or its index is damaged.
    """
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        raise WeightsError(
            f"{folder} contains neither model.safetensors nor {index.name}. Pass a Hugging Face folder with "
            "safetensors weights, such as a run's hf folder. Other weight formats are not supported",
            code="no_weights",
            key=str(folder),
        )
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{index} is damaged: {error!r}. Copy or download the file again",
            code="unreadable",
            key=str(index),
        ) from error
    return [folder / name for name in sorted(names)]


def _scale_suffix(folder: Path) -> str | None:
    """Return the suffix of scale names in a Hugging Face folder, or None if the weights are not quantized.

    Raises WeightsError if the quantization format is not supported.
    """
    config = read_quantization_config(folder)
    if not config:
        return None
    if FP8_BLOCKS.items() <= config.items() and config.get("scale_fmt") in (None, "float"):
        return BLOCK_SCALE
    weights = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
    is_by_row = weights and all(FP8_ROW_WEIGHTS.items() <= each.items() for each in weights)
    if FP8_ROWS.items() <= config.items() and is_by_row:
        return ROW_SCALE
    given = {
        key: config[key] for key in (*FP8_BLOCKS, "scale_fmt", "format", "config_groups") if key in config
    }
    raise WeightsError(
        f"{folder}: the weight quantization {given} is not supported. Use a format that train/export.py --format "
        f"hf-fp8 writes: compressed-tensors in FP8 with one scale per channel, or quant_method fp8 with blocks of "
        f"{BLOCK} x {BLOCK}",
        code="quantized",
        key="quantization_config",
    )


def _refuse(folder: str | Path, problems: list[str]) -> None:
    """Raise WeightsError with the first five messages of `problems`, if there are any."""
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise WeightsError(
            f"the weights in {folder} cannot be used: {'; '.join(problems[:5])}{more}",
            key=problems[0].partition(" ")[0],
        )
