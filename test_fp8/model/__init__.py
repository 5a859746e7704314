"""Measure whole models.

- `cases`, `bench` and `megatron` are used by bench_model.py.
- `gradients` is used by compare_gradients.py.
- `decoding` is used by bench_decode.py.
- `vllm_functions` is used by bench_decode.py and check_exports.py.

This package may import model, fp8_inference_demo, test_fp8/common, train.trainer, train.engine, train.data and
train.config. cases does not import torch.
"""
