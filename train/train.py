#!/usr/bin/env python3
"""Train a Mistral model: load the arguments, open the data, train, export.

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
from typing import TYPE_CHECKING

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("training", "pydantic", "psutil", "torch", "deepspeed", "transformers")

from train.monitor import signals

if __name__ == "__main__":
    signals.install()  # before the imports, which take seconds

from model.errors import UserError
from train import launchers
from train.config.arguments import TrainingArguments
from train.config.load import load_arguments, resolve_arguments
from train.files import lasts, reason
from train.preflight.check import CHECKED, check
from train.preflight.machine import cuda_devices
from train.preflight.sizes import memory_ran_out
from train.record.log import configure_logging, open_log_file

if TYPE_CHECKING:
    from train.record.metrics import MetricsLogger
    from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)
# Exit status; train/monitor/signals.py defines the others.
CRASHED = 1
# How run.json names the end of a run. Every other exception is a failure.
ENDINGS: dict[type[BaseException], str] = {signals.Stopped: "stopped", signals.Interrupted: "interrupted"}


def main(argv: list[str]) -> int:
    """Run a training.

    Returns:
        The exit status.
        0: done.
        75 (signals.STOPPED): stopped on request, with a checkpoint.
        130 (signals.INTERRUPTED): stopped by Ctrl-C, without a checkpoint.
        2 (signals.NOT_AS_IT_IS): the user has to change something first, for example the configuration, a full or
            read-only disk, or a run whose numbers went wrong.
        1 (CRASHED): any other error, which a restart from the last checkpoint may fix.
    """
    arguments: TrainingArguments | None = None
    configure_logging()
    try:
        arguments = read_arguments(argv)
        configure_logging(arguments.log_level, launchers.rank())
        if launchers.rank() == 0 and not os.environ.get(CHECKED):
            world, local = launchers.world_size(), launchers.local_world_size()
            for remark in check(arguments, world, local, cuda_devices()):
                logger.info(remark)
        # Objects created by the imports are never freed. Searching them for garbage takes a third of the import time,
        # and the same time again at each collection that DeepSpeed requests.
        gc.disable()
        import torch.distributed as dist

        # Import everything the run needs up to its end, because the sources may be edited meanwhile.
        from train import export, trainer  # noqa: F401
        from train.engine.distributed import init_distributed
        from train.monitor.lock import held
        from train.monitor.watchdog import Watchdog
        from train.preflight.ranks import check_configured_alike
        from train.record.run_folder import RunFolder

        gc.freeze()
        gc.enable()
        init_distributed()
        with contextlib.ExitStack() as folder:
            with Watchdog(arguments.hang_timeout_s) as watchdog:
                watchdog.at("comparing the configurations of the ranks")
                arguments = resolve_arguments(arguments, dist.get_world_size())
                check_configured_alike(arguments)
                watchdog.phase("waiting for run.lock")
                if not arguments.dry_run:
                    folder.enter_context(held(RunFolder(arguments.output_dir)))
            run_training(arguments)
    except (ValueError, OSError, UserError) as error:
        # some errors may not occur again after a restart
        passes = not lasts(error) if isinstance(error, OSError) else getattr(error, "may_pass", False)
        if passes and isinstance(error, UserError) and launchers.rank():
            time.sleep(2)  # a failed save is the same on all ranks: rank 0 logs it and ends first
            return leave(CRASHED)
        status = CRASHED if passes else signals.NOT_AS_IT_IS
        return fail(f"{reason(error)}\n(FP8_TRACEBACK=1 shows where)", status)
    except signals.Stopped:
        dist.destroy_process_group()
        return signals.STOPPED
    except signals.Interrupted:
        return leave(signals.INTERRUPTED)
    except Exception as error:
        memory = None if arguments is None else memory_ran_out(error, arguments)
        return fail(memory or str(error), CRASHED, traceback=memory is None)
    dist.destroy_process_group()
    return 0


def read_arguments(argv: list[str]) -> TrainingArguments:
    """Load the arguments, then read this process's rank from the environment. `--help` works without a rank."""
    try:
        arguments = load_arguments(argv)
    except (ValueError, OSError, UserError):
        launchers.adopt()  # so that rank 0 alone logs the error
        raise
    launchers.adopt()
    return arguments


def fail(message: str, status: int, traceback: bool = False) -> int:
    """Log an error and end this rank without waiting for other ranks, which may hang in a collective.

    The launcher then ends the other ranks. Rank 0 logs first, so that an error of all ranks is shown once.

    Args:
        message: The error.
        status: The exit status.
        traceback: Show the traceback of the current exception on the console, as FP8_TRACEBACK=1 does.
    """
    rank = launchers.rank()
    if rank:
        # SIGTERM ends this rank at once: no step follows, and the exit status stays that of the error
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        time.sleep(2)
    host = f" ({socket.gethostname()})" if launchers.several_nodes() else ""
    message = f"rank {rank}{host}: {message}" if launchers.world_size() > 1 else message
    logger.error(message, exc_info=traceback or os.environ.get("FP8_TRACEBACK") == "1")
    return leave(status)


def leave(status: int) -> int:
    """Return `status` in a single-process run. With several ranks, exit at once: a normal exit waits for the others."""
    if launchers.world_size() > 1:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    return status


def run_training(args: TrainingArguments) -> None:
    """Run a training from its resolved arguments. Collective. Errors are logged to the file with their traceback."""
    import torch.distributed as dist

    configure_logging(args.log_level, dist.get_rank(), has_file=True)
    try:
        _run(args)
    except tuple(ENDINGS):
        raise
    except Exception:
        logger.debug("the run failed", exc_info=True)
        raise


def _run(args: TrainingArguments) -> None:
    """Train with one Trainer per precision, then export the model."""
    import torch.distributed as dist

    from train import setup
    from train.monitor.watchdog import Watchdog
    from train.preflight.gradients import check_gradients
    from train.preflight.ranks import is_on
    from train.record.provenance import RunRecord
    from train.record.run_folder import RunFolder
    from train.trainer import Trainer, build_next_trainer

    began, folder, rank = time.time(), RunFolder(args.output_dir), dist.get_rank()
    with Watchdog(args.hang_timeout_s) as watchdog:
        args = setup.check_ranks_and_choose_precision(args, watchdog)
        data = setup.open_data(args, watchdog)
        state, checkpoint = setup.find_start(args, data.train, watchdog)
        setup.describe_run(args, data, state)
        prediction = setup.predict(args, state)
        trainer = Trainer(args, data, state, checkpoint, watchdog)
        if is_on(args) and state.step < args.max_steps:
            watchdog.phase("checking the gradients of a step")
            check_gradients(args, trainer.engine, trainer.micro_step, trainer.precision, data.train, state)
        watchdog.phase("opening the output folder")
        if args.dry_run:
            return setup.rehearse(args, data, state)
        metrics = setup.open_run_folder(args, state, checkpoint)
        start = setup.describe_start(args, trainer.report, data.train, state, checkpoint)
        start |= {"time": round(began, 1), "plan": prediction and prediction.to_json()}
        open_log_file(folder.rank_log(rank) if rank else folder.log)
        stop_vote = signals.StopVote()
    record = None
    if rank == 0:
        record = RunRecord(folder, start, lambda: (state.step, state.consumed_tokens), ENDINGS)
    try:
        with contextlib.ExitStack() as end:
            with record or contextlib.nullcontext():
                with signals.taking_steps():
                    try:
                        checkpoint = trainer.fit(metrics, stop_vote)
                    finally:
                        if record and prediction:
                            setup.compare_with_prediction(prediction, trainer.speeds, record.start["plan"])
                    while state.step < args.max_steps:
                        trainer, change = build_next_trainer(trainer)
                        if record:
                            record.add_stage(change)
                        checkpoint = trainer.fit(metrics, stop_vote)
                watchdog = end.enter_context(Watchdog(args.hang_timeout_s))
                what = f"waiting for rank 0 to export {checkpoint}" if checkpoint else "ending"
                watchdog.phase(what, reads=setup.bytes_to_read(checkpoint))
                if record:
                    record.part = "export"
                    export_last(args, folder, metrics, checkpoint)
            watchdog.at("waiting for all ranks to end")
            metrics.close()
            dist.barrier()
    except signals.Stopped as stopped:
        with Watchdog(args.hang_timeout_s) as watchdog:
            watchdog.at("waiting for all ranks to stop")
            report_stop(folder, metrics, stopped)
            dist.barrier()
        raise


def report_stop(folder: RunFolder, metrics: MetricsLogger, stopped: signals.Stopped) -> None:
    """Write stopped.json to the run folder and close the metrics."""
    if metrics.is_main:
        try:
            signals.write_stopped(folder.path, stopped)
        except OSError as error:  # the checkpoint exists, and the exit status reports the stop
            logger.warning(
                f"{folder.stopped} cannot be written: {error}; a launcher that does not pass on the exit status, such "
                "as torchrun, takes this stop for a crash"
            )
    logger.info(str(stopped))
    metrics.close()


def export_last(
    args: TrainingArguments, folder: RunFolder, metrics: MetricsLogger, checkpoint: Path | None
) -> None:
    """Export the last checkpoint to hf/, unless that is done, and draw the plots. Called on rank 0 only.

    Raises the errors of `export`.
    """
    from train.checkpoint.files import identity
    from train.checkpoint.resume import resume_option
    from train.data.encoder import tokenizer_of
    from train.export import export

    if checkpoint is None:
        logger.info("save_strategy is no: the trained model was not saved")
    else:
        if not folder.is_exported(identity(checkpoint)):
            try:
                for line in export(checkpoint, folder.hf, tokenizer_of(args.data.sources)):
                    logger.info(line)
            except Exception:
                logger.error(
                    f"training is complete and {checkpoint} is saved, but its export to {folder.hf} failed. Fix the "
                    f"cause below, then run the same command{resume_option(args)} to export it without training"
                )
                raise
        logger.info(f"wrote {folder.hf}, a Hugging Face folder")
    metrics.draw_last()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
