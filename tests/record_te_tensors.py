"""Record what Transformer Engine computes on a Hopper GPU, for the tests of the CPU reference.

    python tests/record_te_tensors.py tests/data/te_2_20_2_h200.npz

Writes one compressed npz: quantized bytes, scales, updates of delayed scaling and samples of what the layers
compute for the cases of tests/te_cases.py. "meta" is a JSON string with versions, device, command and date.
"""

from __future__ import annotations

import importlib
import json
import sys
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
from torch import Tensor

from model.fp8 import te_backend
from tests import te_cases as cases

DEVICE = "cuda"


class Recorder:
    """Calls into Transformer Engine's quantizers, which the namespace of te_backend does not have."""

    def __init__(self) -> None:
        self.te = te_backend.load("transformer_engine")
        self.pytorch: Any = importlib.import_module("transformer_engine.pytorch")
        self.extension: Any = importlib.import_module("transformer_engine_torch")

    def fp8_dtype(self, dtype: torch.dtype) -> Any:
        names = {torch.float8_e4m3fn: "kFloat8E4M3", torch.float8_e5m2: "kFloat8E5M2"}
        return getattr(self.pytorch.DType, names[dtype])

    def quantize(self, case: cases.QuantizationCase) -> dict[str, np.ndarray]:
        """Results in the layout of the reference's QuantizedMatrix: nothing transposed, no padding."""
        x, dtype, options = case.input(DEVICE), self.fp8_dtype(case.fp8_dtype), case.options
        if case.kind == "delayed":
            scale = torch.tensor([options["scale"]], dtype=torch.float32, device=DEVICE)
            amax = torch.zeros(1, dtype=torch.float32, device=DEVICE)
            out = self.pytorch.Float8Quantizer(scale[0], amax, dtype, rowwise=True, columnwise=False)(x)
            return {"rows": numpy(out._data), "scale_inv": numpy(out._scale_inv), "amax": numpy(amax)}
        settings = {
            "force_pow_2_scales": options["power_2_scale"],
            "amax_epsilon": options.get("amax_epsilon", 0.0),
        }
        if case.kind == "current":
            quantizer = self.pytorch.Float8CurrentScalingQuantizer(
                dtype, torch.device(DEVICE), rowwise=True, columnwise=False, **settings
            )
            out = quantizer(x)
            return {"rows": numpy(out._data), "scale_inv": numpy(out._scale_inv)}
        quantizer = self.pytorch.Float8BlockQuantizer(
            dtype,
            rowwise=True,
            columnwise=case.kind == "block1",
            block_scaling_dim=int(case.kind[-1]),
            **settings,
        )
        return self._block_results(quantizer(x), x.shape, case.kind)

    @staticmethod
    def _block_results(out: Any, shape: torch.Size, kind: str) -> dict[str, np.ndarray]:
        rows, columns = shape
        tiles = -(-rows // 128), -(-columns // 128)
        scale_inv = out._rowwise_scale_inv
        if kind == "block2":
            return {"rows": numpy(out._rowwise_data), "scale_inv": numpy(scale_inv[: tiles[0], : tiles[1]])}
        return {
            "rows": numpy(out._rowwise_data),
            "scale_inv": numpy(scale_inv.t()[:rows, : tiles[1]]),
            "columns": numpy(out._columnwise_data.reshape(columns, rows).t()),
            "columns_scale_inv": numpy(out._columnwise_scale_inv[: tiles[0], :columns]),
        }

    def quantizations(self) -> dict[str, np.ndarray]:
        return {
            f"{case.key}/{name}": array
            for case in cases.quantization_cases()
            for name, array in self.quantize(case).items()
        }

    def updates(self) -> dict[str, np.ndarray]:
        """Histories and scales after each step, updated the way FP8GlobalStateManager does."""
        results = {}
        for options in cases.UPDATE_OPTIONS:
            tensors = len(cases.AMAXES[0])
            history = torch.zeros(options["length"], tensors, device=DEVICE)
            scale = torch.ones(tensors, device=DEVICE)
            for step, amaxes in enumerate(cases.AMAXES):
                latest = torch.tensor(amaxes, dtype=torch.float32, device=DEVICE)
                history[0] = latest
                self.extension.fused_amax_and_scale_update_after_reduction(
                    latest.clone(),
                    [history],
                    [scale],
                    options["algorithm"],
                    self.fp8_dtype(options["fp8_dtype"]),
                    options["margin"],
                )
                key = f"{cases.update_key(options)}/{step}"
                results[f"{key}/amax_history"] = numpy(history)
                results[f"{key}/scale"] = numpy(scale)
        return results

    def layers(self) -> dict[str, np.ndarray]:
        results = {}
        for recipe_name, kind in product(cases.recipes(self.te), cases.LAYERS):
            recipe = cases.recipes(self.te)[recipe_name]
            steps = 3 if recipe.delayed() else 1
            for name, array in cases.run_layer(self.te, kind, recipe, DEVICE, steps=steps).items():
                results[f"layer/{recipe_name}/{kind}/{name}"] = array
        recipe = cases.recipes(self.te)["delayed"]
        recomputed = cases.run_layer(self.te, "TransformerLayer", recipe, DEVICE, recompute=True)
        return results | {f"recompute/{name}": array for name, array in recomputed.items()}

    def sequence(self) -> dict[str, np.ndarray]:
        return {f"sequence/{name}": array for name, array in cases.run_sequence(self.te, DEVICE).items()}


def numpy(tensor: Tensor) -> np.ndarray:
    """bytes and float32 tensors as they are."""
    tensor = tensor.detach().contiguous().cpu()
    return (tensor if tensor.dtype in (torch.uint8, torch.float32) else tensor.view(torch.uint8)).numpy()


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 2
    recorder = Recorder()
    arrays = recorder.quantizations() | recorder.updates() | recorder.sequence() | recorder.layers()
    meta = {
        "transformer_engine": recorder.te.version,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(),
        "attention": te_backend.attention_backend_in_use(recorder.te),
        "command": " ".join(["python", "tests/record_te_tensors.py", sys.argv[1]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    output = Path(sys.argv[1])
    output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(output, meta=np.array(json.dumps(meta)), **arrays)
    print(f"{output}: {len(arrays)} arrays, {output.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
