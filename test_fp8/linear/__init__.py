"""test_fp8.py: the shapes of a Linear (shapes) and its measurement in each precision (bench).

May import: model, test_fp8/common. shapes does not import torch.
"""
