"""The room of what is known before a run begins: all that can refuse it.

May import model, train.config, train.data, train.engine, train.guard, train.checkpoint, train.planning and what these
may. Without a model and torch: `check`, what keeps a run from starting, in one message; `sizes`: what it needs of GPU
memory and disk; `machine`: which CUDA devices there are, and whether memory ran out; `accelerate`: what accelerate's
launcher was told otherwise. train/launch.py asks these before it starts ranks, train/train.py where another launcher
did. By all ranks, with the key "preflight": `together`, and of that `ranks`, whether they are alike, and their links;
`devices`: how fast and how well a GPU is; `gradients`: whether they are reduced right, in steps that leave all
`as_before`.
"""
