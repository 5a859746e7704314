"""Benchmark programs: one Linear (test_fp8.py), whole models, several GPUs, saves, decoding, convergence, gradients."""
