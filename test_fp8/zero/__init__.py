"""The cases of zero_matrix.py.

May import: model, test_fp8/common, train but its entry script.
"""
