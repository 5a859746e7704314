"""The room of how a run is to be: what it will need and how fast it will be (`setting`, `memory`, `rates`, `recommend`,
`plan`; none imports torch), and precision.auto, which measures instead (`autotune`).

May import train.config, train.checkpoint and what these may, and model. The one account of GPU memory: preflight, the
tables of docs/hardware.md, train/plan.py and a run's own lines use it.
"""
