"""The room of the engine: DeepSpeed around a model, its optimizer and schedule, one micro-batch, the process group.

May import model, train.data, train.config and train.files. `step` gives the others build_engine and MicroStep,
`optimizer` learning_rate_at, `held_out` the losses of evaluation sets, `distributed` init_distributed. `zero` is the
one place that knows how DeepSpeed looks inside (and checkpoint/reshard.py what its files hold).
"""

from model.fp8.machine import leave_out

# What DeepSpeed, where nothing names an accelerator, says when it is imported without a GPU, on standard output, where
# an answer belongs. Here, as only this room's files import it.
leave_out("DeepSpeed", "Setting accelerator to CPU")
