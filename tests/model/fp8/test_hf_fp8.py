"""model/fp8/hf_fp8.py: weights -> FP8 codes with a scale a row; test_hf_folder.py has how they are read."""

from __future__ import annotations

import pytest
import torch

from model.fp8.hf_fp8 import quantize_rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_type_get_the_codes_of_float32(dtype: torch.dtype) -> None:
    weight = torch.cat(
        (torch.randn(7, 32, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 32))
    ).to(dtype)
    found, expected = quantize_rows(weight), quantize_rows(weight.float())
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.scale, expected.scale) and found.scale.dtype == torch.float32
