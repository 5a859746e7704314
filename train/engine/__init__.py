"""The DeepSpeed engine, its optimizer and learning-rate schedule, the micro-batch step, and the process group.

    step          build_engine, MicroStep, SkipDecision
    optimizer     AdamW and Muon, learning_rate_at
    packed_adamw  AdamW with less memory
    process_group  setup, determinism, calls on rank 0
    zero          private attributes of DeepSpeed; lists what to check before an update
    weight_gather  ZeRO 3 gathers FP8 weights in 8 bits

This package may import model, train.data, train.config, train.files and train.rank_env. train/checkpoint/reshard.py
reads DeepSpeed's checkpoint files.
"""

from model.fp8.machine import drop_log_messages

# DeepSpeed prints this line to standard output when it is imported without a GPU. Only this package imports DeepSpeed.
drop_log_messages("DeepSpeed", "Setting accelerator to CPU")
# Transformer Engine advises to install packages that FlashAttention-4 replaces.
drop_log_messages("DotProductAttention", "flash-attn v3 may provide", "flash-attn may provide")
# torchao warns about missing Triton when transformers imports it for an export on a machine without a GPU.
drop_log_messages("torchao.kernel.intmm", "Warning: Detected no triton")
