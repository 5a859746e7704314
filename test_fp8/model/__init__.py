"""bench_model.py: its cases, their measurements (bench), Megatron-Core's (megatron). And what compare_gradients.py
(gradients), bench_save.py (saves) and bench_decode.py (decoding) measure.

May import: model, fp8_inference_demo, test_fp8/common, and of train setup, engine, data, config, checkpoint. cases does
not import torch.
"""
