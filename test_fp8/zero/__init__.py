"""zero_matrix.py: which cells there are, which of them a run refuses, and how far two of their trainings are apart
(cells), and the ranks that train them, one cell after another, with train/train.py (ranks).

May import: model, test_fp8/common, train but its entry script, which ranks.py runs as a program.
"""
