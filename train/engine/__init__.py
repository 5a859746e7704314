"""The DeepSpeed engine, its optimizer and learning-rate schedule, the micro-batch step, and the process group.

May import model, train.data, train.config and train.files. `step`: build_engine, MicroStep and SkipDecision.
`optimizer`: learning_rate_at. `held_out`: losses of evaluation sets. `distributed`: init_distributed. Only `zero` uses
private attributes of DeepSpeed; checkpoint/reshard.py reads its checkpoint files.
"""

from model.fp8.machine import drop_log_messages

# DeepSpeed prints this line to standard output when it is imported without a GPU. Only this package imports DeepSpeed.
drop_log_messages("DeepSpeed", "Setting accelerator to CPU")
# Transformer Engine advises to install packages that FlashAttention-4 replaces.
drop_log_messages("DotProductAttention", "flash-attn v3 may provide", "flash-attn may provide")
