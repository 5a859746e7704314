#!/usr/bin/env python3
"""Train a Mistral: arguments -> data -> resume -> model -> engine -> loop -> export.

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
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("training", "pydantic", "psutil", "torch", "deepspeed", "transformers")

from train.guard import signals

if __name__ == "__main__":
    signals.install()  # the imports take seconds

from model.config import GIB
from model.errors import UserError
from train.config.arguments import TrainingArguments
from train.config.load import load_arguments, resolve_arguments
from train.engine import launchers
from train.files import lasts, reason
from train.preflight.check import CHECKED, check
from train.preflight.machine import cuda_devices
from train.preflight.sizes import memory_ran_out
from train.record.log import configure_logging, link_log_file, open_log_file

if TYPE_CHECKING:
    from train.guard.watchdog import Watchdog
    from train.loop import Run
    from train.planning.plan import Prediction
    from train.record.provenance import RunRecord
    from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)
# Exit status; signals has the others.
CRASHED = 1
# Of a run, as run.json has them; whatever else it ends by is a failure.
ENDINGS: dict[type[BaseException], str] = {signals.Stopped: "stopped", signals.Interrupted: "interrupted"}


def main(argv: list[str]) -> int:
    """Exit status: 0 done; signals.STOPPED (75) on request, with a checkpoint; INTERRUPTED (130) by Ctrl-C without one;
    NOT_AS_IT_IS (2): what was asked for cannot be done, as on a full or read-only disk, or the numbers went wrong;
    CRASHED (1): all else, worth another start from the last checkpoint."""
    arguments: TrainingArguments | None = None
    configure_logging()
    try:
        arguments = arguments_of(argv)
        configure_logging(arguments.log_level, launchers.rank())
        if launchers.rank() == 0 and not os.environ.get(CHECKED):
            world, local = launchers.world_size(), launchers.local_world_size()
            for remark in check(arguments, world, local, cuda_devices()):
                logger.info(remark)
        # What the imports make stays: to search it for garbage takes a third of their time, and as much again whenever
        # DeepSpeed asks for a collection.
        gc.disable()
        import torch.distributed as dist

        # all that a run needs to its end: its sources may be edited meanwhile
        from train import export, setup  # noqa: F401
        from train.engine.distributed import init_distributed
        from train.guard.lock import held
        from train.guard.watchdog import NO_START, Watchdog
        from train.preflight.ranks import check_configured_alike
        from train.record.run_folder import RunFolder

        gc.freeze()
        gc.enable()
        init_distributed()
        with contextlib.ExitStack() as folder:
            with Watchdog(arguments.hang_timeout_s, NO_START) as watchdog:
                watchdog.doing("compares its configuration with those of the others")
                arguments = resolve_arguments(arguments, dist.get_world_size())
                check_configured_alike(arguments)
                watchdog.meet("waits for run.lock")
                if not arguments.dry_run:
                    folder.enter_context(held(RunFolder(arguments.output_dir)))
            run_training(arguments)
    except (ValueError, OSError, UserError) as error:
        # as the system is, it may let another start succeed
        passes = not lasts(error) if isinstance(error, OSError) else getattr(error, "may_pass", False)
        if passes and isinstance(error, UserError) and launchers.rank():
            time.sleep(2)  # a save's, which all ranks have alike: rank 0 tells it, and ends first
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


def arguments_of(argv: list[str]) -> TrainingArguments:
    """Those of a rank, which knows from here on which one it is. For `--help` it need not be one."""
    try:
        arguments = load_arguments(argv)
    except (ValueError, OSError, UserError):
        launchers.adopt()  # rank 0 tells it
        raise
    launchers.adopt()
    return arguments


def fail(message: str, status: int, traceback: bool = False) -> int:
    """Log why this rank ends, and end it without waiting for ranks that may hang in a collective; the launcher then
    ends those. Rank 0 logs first, so that what every rank finds is shown once.

    Args:
        traceback: show the one of the current exception on the console, as FP8_TRACEBACK=1 does.
    """
    rank = launchers.rank()
    if rank:
        # no step is left that a stop would have to wait for, and it does not change why this rank ends
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        time.sleep(2)
    host = f" ({socket.gethostname()})" if launchers.several_nodes() else ""
    message = f"rank {rank}{host}: {message}" if launchers.world_size() > 1 else message
    logger.error(message, exc_info=traceback or os.environ.get("FP8_TRACEBACK") == "1")
    return leave(status)


def leave(status: int) -> int:
    """End this rank at once, which of several would wait for the others; one alone ends by returning `status`."""
    if launchers.world_size() > 1:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    return status


def run_training(args: TrainingArguments) -> None:
    """One run from its resolved arguments; every rank calls it. An error is in the log file with its traceback."""
    import torch.distributed as dist

    from train.record.run_folder import RunFolder

    configure_logging(args.log_level, dist.get_rank(), has_file=True)
    try:
        _run(args, RunFolder(args.output_dir))
    except tuple(ENDINGS):
        raise
    except Exception:
        logger.debug("the run ends with an error", exc_info=True)
        raise


def _run(args: TrainingArguments, folder: RunFolder) -> None:
    import torch.distributed as dist

    from train.config.schedule import stage_at
    from train.guard.watchdog import NO_END, NO_START, Watchdog
    from train.loop import train

    with Watchdog(args.hang_timeout_s, NO_START) as watchdog:
        begun = _begin(args, folder, watchdog)
    if begun is None:
        return
    run, record, planned, ds_config = begun
    del begun  # has the engine, which a change of the precision takes apart
    main, args, state, first = dist.get_rank() == 0, run.arguments, run.state, run.stage
    try:
        with contextlib.ExitStack() as end:
            with record if main else contextlib.nullcontext():
                # what was planned is the first stage's
                with signals.taking_steps(), contextlib.ExitStack() as first_stage:
                    if planned:
                        first_stage.enter_context(beside_the_plan(run, planned, record.start["plan"]))
                    last = train(run)
                    while state.step < args.max_steps:
                        if stage_at(args, state.step, state.consumed_tokens) != first:
                            first_stage.close()
                        stage_record = change_precision(run, ds_config)
                        if main:
                            record.add_stage(stage_record)
                        last = train(run)
                watchdog = end.enter_context(Watchdog(args.hang_timeout_s, NO_END))
                ends = f"exports {last}, which rank 0 does" if last else "ends"
                watchdog.meet(ends, reads=_to_read(last))
                if main:
                    record.part = "export"
                    export_last(run, last)
            watchdog.doing("waits for the end of all")
            run.metrics.close()
            dist.barrier()
    except signals.Stopped as stopped:
        with Watchdog(args.hang_timeout_s, NO_END) as watchdog:
            watchdog.doing("waits for the end of all, which were asked to stop")
            if main:
                try:
                    signals.write_stopped(folder.path, stopped)
                except OSError as error:  # it is saved: the status says that it was a stop
                    run.metrics.message(
                        f"warning: {folder.stopped} cannot be written: {error}; a launcher that passes no status "
                        "on, as torchrun, does not tell this stop from a crash"
                    )
            run.metrics.message(str(stopped))
            run.metrics.close()
            dist.barrier()
        raise


def _begin(
    args: TrainingArguments, folder: RunFolder, watchdog: Watchdog
) -> tuple[Run, RunRecord, Prediction | None, dict[str, Any]] | None:
    """What a run consists of, built in the order of train/setup.py, the record of this start, what is planned of it,
    and DeepSpeed's configuration; None with dry_run, which ends here. The ranks meet between its parts, so that one
    that hangs in a part is known by the time of that part."""
    import torch.distributed as dist

    from model.config import load_config
    from train import setup
    from train.checkpoint.resume import begins_as
    from train.checkpoint.save import Saver
    from train.config.ds_config import resolve_ds_config
    from train.config.schedule import at_stage
    from train.data.stream import unigram_loss_of
    from train.guard.watchdog import Watchdog
    from train.loop import Run
    from train.planning.autotune import resolve_auto
    from train.preflight.gradients import check_gradients
    from train.preflight.ranks import check_alike, is_on
    from train.record.provenance import RunRecord

    begun, rank, world = time.time(), dist.get_rank(), dist.get_world_size()
    setup.say(f"output: {os.path.abspath(folder.path)}")
    if is_on(args):
        watchdog.meet("compares itself with the others, and measures their links")
        check_alike(args)
    setup.seed(args)
    watchdog.meet("waits for what precision.auto measures" if args.precision.auto else "opens the data")
    args = resolve_auto(args, world)
    config = load_config(args.model.config)
    train_stream, eval_streams = setup.streams_for(args, config)
    unigram_loss = unigram_loss_of(train_stream, eval_streams["eval_loss"])
    if args.data.verify:
        streams = train_stream, *eval_streams.values()
        watchdog.meet("verifies its share of the data", reads=sum(stream.num_bytes for stream in streams))
        setup.verify_data(*streams)
    ds_config = resolve_ds_config(args, world)
    given = args.resume_from_checkpoint
    candidates = [folder.checkpoints] if given in ("auto", "never") else [folder.checkpoints, Path(given)]
    watchdog.meet(
        "waits for rank 0, which verifies the checkpoint to go on from", reads=_to_read(*candidates)
    )
    state, resume_from = setup.starting_point(args, ds_config, config, train_stream)
    stage, levels = begins_as(args, state)
    staged = at_stage(args, stage)
    read = _to_read(resume_from or args.model.init_from)
    watchdog.meet("builds the model", read)
    model, precision = setup.model_for(staged, resume_from, levels)
    watchdog.meet("proves what runs")
    proven = setup.announce(args, model, precision, train_stream, unigram_loss, state)
    planned = setup.planned_for(staged, ds_config, config, bool(eval_streams))
    watchdog.meet("builds the engine", read)
    engine, micro_step = setup.engine_for(
        staged, model, precision, train_stream, ds_config, state, resume_from
    )
    state.precision = staged.to_dict()["precision"]
    if is_on(args) and state.step < args.max_steps:
        watchdog.meet("checks the gradients of a step")
        check_gradients(staged, engine, micro_step, precision, train_stream, state)
    watchdog.meet("opens its folder")
    if args.dry_run:
        setup.rehearse(args, train_stream, eval_streams, ds_config, state)
        return None
    metrics = setup.open_folder(args, ds_config, state, resume_from)
    start = setup.start_of(args, model, proven, train_stream, state, resume_from)
    open_log_file(folder.rank_log(rank) if rank else folder.log)
    if world > 1 and rank == 0:
        link_log_file(folder.rank_log(0), folder.log)
    run = Run(
        arguments=args,
        folder=folder,
        engine=engine,
        micro_step=micro_step,
        precision=precision,
        stage=stage,
        attention=proven.attention,
        train_stream=train_stream,
        eval_streams=eval_streams,
        unigram_loss=unigram_loss,
        metrics=metrics,
        state=state,
        resumed_from=resume_from,
        first_step=state.step,
        saver=Saver(engine, folder.checkpoints, precision, args.save_total_limit),
        stop_vote=signals.StopVote(),
        watchdog=Watchdog(args.hang_timeout_s),
    )
    start["time"] = round(begun, 1)
    start["plan"] = planned and planned.to_json()
    start["escalations"] = state.escalations  # which grows while it runs
    return (
        run,
        RunRecord(folder, start, lambda: (state.step, state.consumed_tokens), ENDINGS),
        planned,
        ds_config,
    )


def _to_read(*places: Path | str | None) -> int:
    """Bytes of the files in these folders, counted by rank 0 alone: of many ranks a shared file system would be asked
    for each file of a checkpoint by each."""
    from train.engine.distributed import from_rank_0
    from train.files import bytes_of

    return from_rank_0(lambda: bytes_of(*(Path(place) for place in places if place)))


def change_precision(run: Run, ds_config: dict[str, Any]) -> dict[str, Any]:
    """Change to the precision of the stage of precision.schedule that begins, and to the levels that on_trouble has
    taken modules to, as a stop would and a start from the checkpoint of this step with the changed keys; what run.json
    says of it."""
    from train import setup
    from train.config.schedule import at_stage, stage_at, stage_text
    from train.engine.step import release
    from train.guard.watchdog import Watchdog

    began, state = time.monotonic(), run.state
    number, before = stage_at(run.arguments, state.step, state.consumed_tokens), run.precision.levels
    new_stage = number != run.stage
    begins = [f"{stage_text(run.arguments.precision, number)} begins"] if new_stage else []
    if new_stage:
        run.before_stage = len(run.speeds)
    moved = sum(before.get(name) != level for name, level in state.levels.items())
    modules = f"{moved} module{'s' if moved > 1 else ''} at another level by precision.on_trouble"
    begins += [modules] if moved else []
    run.stage, args, what = number, at_stage(run.arguments, number), "; ".join(begins)
    run.metrics.message(f"step {state.step + 1}: {what}; model and engine are built anew")
    with Watchdog(args.hang_timeout_s) as watchdog:  # that of the loop has ended with its last step
        watchdog.doing("takes model and engine apart")
        release(run.engine)
        del run.engine, run.micro_step, run.saver.engine
        setup.clear_memory()
        watchdog.doing("builds the model anew and proves it")
        model, run.precision = setup.model_for(args, run.checkpoint, state.levels)
        proven = setup.prove_all(args, model, run.precision)
        watchdog.doing(f"builds the engine anew, from {run.checkpoint}")
        of_run = run.train_stream, ds_config, state, run.checkpoint
        run.engine, run.micro_step = setup.engine_for(args, model, run.precision, *of_run)
    run.attention, state.precision = proven.attention, args.to_dict()["precision"]
    run.saver.engine, run.saver.precision = run.engine, run.precision
    run.watchdog = Watchdog(args.hang_timeout_s)
    took_s = round(time.monotonic() - began, 2)
    run.metrics.message(f"the change took {took_s:.1f} s")
    of_proof = {"fp8": proven.fp8, "proof": proven.lines}
    return {"step": state.step, "stage": what, "new_stage": new_stage, "took_s": took_s, **of_proof}


@contextlib.contextmanager
def beside_the_plan(run: Run, planned: Prediction, record: dict[str, Any]) -> Iterator[None]:
    """However the steps end, tell what was measured beside what was planned, and have it in `record`, that of run.json.
    A fault in it ends no run."""
    import torch

    from train.record.history import typical_speed

    try:
        yield
    finally:
        try:
            speed = typical_speed(run.speeds)
            peak = torch.cuda.max_memory_allocated() / GIB
            record["measured"] = {"peak_gib": peak, "tokens_per_second": speed}
            run.metrics.message(planned.compare(peak, speed))
        except Exception as error:
            run.metrics.message(f"warning: nothing measured beside the plan: {type(error).__name__}: {error}")


def export_last(run: Run, last: Path | None) -> None:
    """The loss plot and, of the checkpoint `last`, the Hugging Face folder, unless that is there. Raises what `export`
    does, when it is told what the run has all the same."""
    from train.checkpoint.files import identity
    from train.checkpoint.resume import to_go_on
    from train.data.encoder import tokenizer_of
    from train.export import export

    folder = run.folder
    if last is None:
        run.metrics.message("save_strategy is no: the trained model is not saved")
    else:
        if not folder.is_exported(identity(last)):
            try:
                for line in export(last, folder.hf, tokenizer_of(run.arguments.data.sources)):
                    run.metrics.message(line)
            except Exception:
                run.metrics.message(
                    f"the training is over and {last} is committed, but its export to {folder.hf} failed. When what is "
                    f"said below is mended, the same command{to_go_on(run.arguments)} exports it, without a step"
                )
                raise
        run.metrics.message(f"wrote {folder.hf}, a Hugging Face folder")
    run.metrics.draw_last()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
