"""compare_convergence.py: rows and their trainings, which are runs of train/train.py in processes of their own (rows),
how far these are apart, table and plot (results).

May import: model, test_fp8/common, train.config, train.data. Nothing here needs torch but the fingerprint of the data.
"""
