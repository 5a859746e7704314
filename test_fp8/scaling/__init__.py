"""bench_scaling.py: its rows and what a plan expects of them, the launches of bench_model.py that measure them
(launches), and what these come to (results).

May import: model, test_fp8/common, test_fp8/model, train but its entry script.
"""
