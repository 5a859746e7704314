"""Benchmarks of single linear layers, whole models, several GPUs, decoding, convergence and gradients."""
