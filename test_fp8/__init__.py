"""What is measured, in programs: one Linear (test_fp8.py), whole models, data, saves, convergence, gradients."""
