#!/usr/bin/env python3
"""Train a Mistral, Llama or Qwen3 model. This file checks the arguments, and train/run.py runs the training.

    deepspeed train/train.py train_args/train_config_fp8.json [--learning_rate 3e-4] [--precision.recipe current]
    torchrun --nproc-per-node 8 train/train.py train_config_fp8.json
    srun --ntasks-per-node 8 --gpus-per-node 8 --cpus-per-task 8 --kill-on-bad-exit=1 \\
        python train/train.py train_config_fp8.json
    mpirun -n 8 python train/train.py train_config_fp8.json
    accelerate launch --config_file train_args/accelerate_fp8.yaml train/train.py train_config_fp8.json
    python train/train.py train_config_tiny.json          (one process)

`--help` lists every key of the configuration.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import require_packages

require_packages("training", "pydantic", "psutil", "torch", "deepspeed", "transformers")

from train.monitor import signals

if __name__ == "__main__":
    signals.install()  # before the imports, which take seconds

from model.errors import UserError
from train import rank_env
from train.config.arguments import TrainingArguments
from train.config.load import load_arguments
from train.files import describe_error, is_persistent
from train.preflight.check import CHECKED, check
from train.preflight.machine import cuda_devices
from train.preflight.sizes import completion, memory_ran_out
from train.record.log import configure_logging

logger = logging.getLogger(__name__)
CRASHED = 1  # exit status; train/monitor/signals.py defines the others
# Parts of the messages with which gloo, NCCL and torch's store report that another rank has exited.
LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "Broken pipe",
    "ncclRemoteError",
)


def main(argv: list[str]) -> int:
    """Check the arguments and train.

    Returns:
        The exit status.
        0: done.
        75 (signals.STOPPED): stopped on request, with a checkpoint or before the first step.
        130 (signals.INTERRUPTED): stopped by Ctrl-C, without a checkpoint.
        2 (signals.DO_NOT_RESTART): a restart would fail again until the user fixes the cause, for example an invalid
            configuration, a full or read-only disk, or wrong numerical results.
        1 (CRASHED): any other error, which a restart from the last checkpoint may fix.
    """
    arguments: TrainingArguments | None = None
    configure_logging()
    try:
        arguments = load_arguments(argv)  # `--help` works without a rank
        rank_env.export_torch_variables()
        configure_logging(arguments.log_level, rank_env.rank())
        if rank_env.rank() == 0 and not os.environ.get(CHECKED):
            for remark in check(
                arguments, rank_env.world_size(), rank_env.local_world_size(), cuda_devices()
            ):
                logger.info(remark)
        if complete := completion(arguments):
            logger.info(complete)  # rank 0 shows it
            return 0
        # Objects created by the imports are never freed. Searching them for garbage takes a third of the import time,
        # and the same time again at each collection that DeepSpeed requests.
        gc.disable()
        # The trainer imports everything that the run needs until its end, because the sources may be edited meanwhile.
        from train.run import run

        gc.freeze()
        gc.enable()
        return run(arguments)
    except signals.Interrupted as stop:
        return exit_rank(stop.status)
    except Exception as error:
        return end_after_error(error, arguments)


def end_after_error(error: Exception, arguments: TrainingArguments | None) -> int:
    """Log an error and exit this rank without waiting for the other ranks, which may hang in a collective.

    The launcher then terminates the other ranks. Rank 0 logs first, so that an error on all ranks is shown only once.

    Returns:
        The exit status. The function returns only in a single-process run.
    """
    with contextlib.suppress(UserError):
        rank_env.export_torch_variables()  # not called yet if the arguments are invalid
    is_expected = isinstance(error, ValueError | OSError | UserError)
    is_transient = (
        not is_persistent(error)
        if isinstance(error, OSError)
        else getattr(error, "is_transient", not is_expected)
    )
    status = CRASHED if is_transient else signals.DO_NOT_RESTART
    memory = None if is_expected or arguments is None else memory_ran_out(error, arguments)
    is_lost = not is_expected and any(part in str(error) for part in LOST_CONNECTION)
    shows_traceback = os.environ.get("FP8_TRACEBACK") == "1" or not (is_expected or memory or is_lost)
    logger.debug("the run failed", exc_info=True)  # the log file has the traceback
    rank = rank_env.rank()
    if rank:
        # SIGTERM ends this rank immediately with the status of the error, because no step follows
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        time.sleep(2)
    text = (
        f"{describe_error(error)}\n(set FP8_TRACEBACK=1 for a traceback)"
        if is_expected
        else "the connection to another rank was lost, so this rank exits. See the errors of the other ranks"
        if is_lost
        else memory or str(error)
    )
    where = f"rank {rank} ({socket.gethostname()}): " if rank_env.world_size() > 1 else ""
    logger.error(f"{where}{text}", exc_info=shows_traceback)
    return exit_rank(status)


def exit_rank(status: int) -> int:
    """Return `status` in a single-process run. With several ranks, exit the process immediately with this status.

    A normal exit would wait for the other ranks.
    """
    if rank_env.world_size() > 1:
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
