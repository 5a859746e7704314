"""compare_convergence.py: its rows (rows), their trainings, which are runs of train/train.py in processes of their own
(trainings), how long these take (durations), how far they are apart, table and plot (results), and what they say of
seeds, of time to equal loss and of the health of FP8 (evidence). convergence_data.py: texts out of wheels (packages).

May import: model, test_fp8/common, train.config, train.data, train.planning, train.record, train.guard.signals. Nothing
here needs torch but the fingerprint of the data.
"""
