"""Measurements of whole models.

bench_model.py uses cases, bench and megatron; compare_gradients.py gradients; bench_save.py saves; bench_decode.py
decoding.

May import: model, fp8_inference_demo, test_fp8/common, and of train trainer, engine, data, config, checkpoint. cases
does not import torch.
"""
