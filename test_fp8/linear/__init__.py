"""test_fp8.py: which Linears (shapes), one in one precision taken apart (cases), all of a shape in turns (bench), the
GPU's own ceilings, and what the results say (summary).

May import: model, test_fp8/common. shapes and summary do without torch.
"""
