"""The DeepSpeed engine: DeepSpeed around a model, its optimizer and schedule, one micro-batch, the process group.

May import model, train.data, train.config and train.files. `step`: build_engine, MicroStep and SkipDecision;
`optimizer`: learning_rate_at; `held_out`: losses of evaluation sets; `distributed`: init_distributed. `zero` is the one
file with DeepSpeed's private attributes (checkpoint/reshard.py knows its checkpoint files).
"""

from model.fp8.machine import leave_out

# DeepSpeed prints this to standard output when it is imported without a GPU. Only files of this package import it.
leave_out("DeepSpeed", "Setting accelerator to CPU")
