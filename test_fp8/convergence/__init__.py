"""compare_convergence.py: what the metrics of its trainings say (evidence). convergence_data.py: texts out of wheels
(packages).

May import: test_fp8/common, train.files, train.record. Nothing here imports torch.
"""
