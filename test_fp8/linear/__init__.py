"""Code of test_fp8.py, which measures single linear layers.

- `shapes` defines the shapes of the layers and does not import torch.
- `bench` measures a layer in each precision.

This package may import model and test_fp8/common.
"""
