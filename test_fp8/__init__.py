"""Benchmarks for single linear layers, whole models, several GPUs, saves, decoding, convergence and gradients."""
