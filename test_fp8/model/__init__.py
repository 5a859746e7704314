"""bench_model.py, and what else measures a whole model: rows with their configurations, a visit to a row, all visits
(bench), what they come to (results), what gives the rows of transformers' modules their best (baselines), the rows of
Megatron-Core (megatron); gradients of compare_gradients.py, saves of bench_save.py, decoding of
bench_decode.py.

May import: model, test_fp8/common, and of train setup, engine, data, config, checkpoint, planning. rows does without
torch.
"""
