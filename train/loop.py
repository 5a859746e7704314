"""The training loop: data -> forward and backward -> step -> log -> evaluate -> save, top to bottom.

A `Run` arrives built (train.py). Nothing here waits for the GPU outside logging, evaluation and saving,
nor for a save that is under way before the next one is due.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model.config import flops_per_token
from model.errors import UserError
from model.fp8.gemms import Gemms, count_gemms
from model.fp8.health import HealthCheck, check_due
from model.fp8.modules import of_transformer_engine
from model.fp8.precision import Precision
from model.startup_check import check_attention
from train.checkpoint.files import RunState, committed, name_of
from train.checkpoint.resume import at_half_the_rate, to_go_on
from train.checkpoint.rollback import roll_back
from train.checkpoint.save import SaveError, Saver
from train.config.arguments import TrainingArguments
from train.config.schedule import stage_at, stage_text
from train.data.order import next_position
from train.data.stream import MicroBatches, SampleStream
from train.engine.held_out import held_out_losses
from train.engine.optimizer import learning_rate_at
from train.engine.step import MicroStep
from train.guard.escalation import escalations, take_all_out
from train.guard.health import Health, ranks_without_finite_loss, samples_record, samples_text
from train.guard.replicas import check_replicas, scope
from train.guard.signals import Stopped, StopVote
from train.guard.slow_ranks import SlowRanks
from train.guard.watchdog import Watchdog
from train.record.fp8_health import FP8_HEALTH, health_record
from train.record.history import typical_speed
from train.record.metrics import MetricsLogger, mfu, peak_tflops
from train.record.run_folder import RunFolder


class TrainingError(UserError):
    """The run cannot go on; the message says at which step and what to do."""

    code = "training"


@dataclass
class Run:
    """A training run, from its resolved arguments to its last step."""

    arguments: TrainingArguments  # resolved
    folder: RunFolder
    engine: Any  # deepspeed.DeepSpeedEngine
    micro_step: MicroStep
    precision: Precision
    stage: int  # of precision.schedule
    attention: str  # that was proven
    train_stream: SampleStream
    eval_streams: dict[str, SampleStream]  # by the name of the loss
    unigram_loss: float  # of the samples of eval_loss, nats per token
    metrics: MetricsLogger
    state: RunState
    resumed_from: Path | None
    first_step: int  # taken before this start
    saver: Saver
    stop_vote: StopVote
    watchdog: Watchdog
    # tokens/s of all ranks, of each interval that was logged
    speeds: list[float] = field(default_factory=list)
    before_stage: int = 0  # how many of them are of the stages before this one

    def log(self, values: dict[str, Any]) -> None:
        """Metrics of this step."""
        self.metrics.log({"step": self.state.step, "tokens": self.state.consumed_tokens, **values})

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint of this step, None with save_strategy no."""
        if self.resumed_from is not None and self.state.step == self.first_step:
            return self.resumed_from
        if self.arguments.save_strategy == "no":
            return None
        return self.folder.checkpoints / name_of(self.state.step)


def train(run: Run) -> Path | None:
    """Train from `run.state.step` to max_steps, if there are steps left, or to the end of its stage of
    precision.schedule, or until modules go a level up (precision.on_trouble); returns the checkpoint of the last step,
    None with save_strategy no.

    Raises Stopped: by a signal, after the step and its checkpoint. TrainingError: max_skipped_steps skipped in a row, a
    loss that is not finite in a step that was not skipped, or FP8 stopped running. ReplicaError: ranks whose weights
    differ. SaveError: a save failed, and on_save_failure is stop or no other save follows. Whatever error ends the
    run, a save under way is completed first.
    """
    with run.watchdog:
        if run.state.evaluation_due:
            evaluate_late(run)
        elif run.state.step == 0 and run.arguments.model.init_from:
            evaluate_loaded_weights(run)
        if run.state.step == run.arguments.max_steps:
            run.metrics.message(f"this run has its {run.arguments.max_steps} steps already; nothing to train")
            return run.resumed_from
        try:
            return Loop(run).to_the_end()
        except Exception as error:
            # A save under way is of an earlier step. Its threads need no main thread: it is committed also if this
            # rank alone has failed. The watchdog bounds the wait.
            try:
                settle(run, after=error)
            except Exception as failure:
                run.metrics.message(f"warning: {failure}")
            raise


@dataclass
class Step:
    """An optimizer step: what came of it, and what is to follow it."""

    learning_rate: float
    loss: torch.Tensor  # of this rank, the mean over its micro-batches; float32 scalar on the device
    share: torch.Tensor | None  # of tokens with a label, where not all have one
    skipped: bool
    gemms: Gemms | None  # FP8 GEMMs that ran, where the step is logged
    check: HealthCheck | None = None  # of FP8, where one was due
    record: dict[str, Any] = field(default_factory=dict)  # for the metrics
    last: bool = False
    ends_stage: bool = False  # the next one has another precision
    judges: bool = False  # by what the check saw modules may go a level up
    stops: bool = False
    logs: bool = False
    saves: bool = False
    evaluates: bool = False

    @property
    def due(self) -> bool:
        """Something follows for which the loop waits for the GPU."""
        return self.logs or self.saves or self.evaluates or self.stops or self.judges


class Loop:
    """The steps of a run. `to_the_end` is their order; every rank calls all of it alike."""

    def __init__(self, run: Run):
        args, engine, state = run.arguments, run.engine, run.state
        rank, self.world = dist.get_rank(), dist.get_world_size()
        self.run, self.args, self.engine, self.state = run, args, engine, state
        self.accumulation = args.gradient_accumulation_steps or 1
        self.samples = args.per_device_train_batch_size * self.accumulation * self.world  # of a step
        self.tokens = self.samples * args.max_seq_length
        self.flops = flops_per_token(engine.module.config, args.max_seq_length)
        self.batches = MicroBatches(run.train_stream, args.per_device_train_batch_size, rank, self.world)
        self.peak = peak_tflops(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
        self.health = Health(engine, run.precision, args.spike_window, args.spike_threshold)
        self.health.load_state_dict(state.health)
        if steps := args.replica_check_steps:
            run.metrics.message(f"replica check, every {steps} steps: {scope(engine, run.precision)}")
        engine.train()
        self.last_save = time.monotonic()  # or the begin of this loop
        self._start_clock()
        self.slow_ranks = SlowRanks(engine, run.stop_vote.group, args.speed.cuda_graphs)

    def to_the_end(self) -> Path | None:
        run, state = self.run, self.state
        first = state.step + 1
        while state.step < self.args.max_steps and not self._changes_precision():
            step = self._take_step()
            if state.step == first:
                check_attention(self.engine.module, run.precision, run.attention)
            self._judge_skip(step)
            self._meet(step)
            if self._goes_back(step):
                continue
            if step.due:
                loss = self._mean_loss(step)
                if step.logs:
                    self._log(step, loss)
            if step.check is not None:
                self._look_at_fp8(step, step.check)
            else:
                step.record |= self.health.end_alarms(state.step)
            if step.evaluates:
                self._evaluate(step)
            if step.record:
                run.log(step.record)
            if (step.saves or step.stops) and self.args.save_strategy != "no":
                self._save(step)
            if step.stops:  # also in the last step, whose evaluation is left then
                self.batches.close()
                raise Stopped(state.step, run.checkpoint, to_go_on(self.args))
        self.batches.close()
        return run.checkpoint

    def _changes_precision(self) -> bool:
        """The next step has another precision than the engine: that of another stage, or modules at other levels."""
        stage = stage_at(self.args, self.state.step, self.state.consumed_tokens)
        return stage != self.run.stage or self.state.levels != self.run.precision.levels

    def _logs(self, number: int) -> bool:
        return number == self.args.max_steps or number % self.args.logging_steps == 0

    def _take_step(self) -> Step:
        """Forward and backward of all micro-batches, and the optimizer; nothing waits for the GPU."""
        run, state, engine = self.run, self.state, self.engine
        learning_rate = learning_rate_at(state.step, self.args)
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)  # Muon's
        state.consumed_samples = next_position(state.consumed_samples, self.samples, state.skipped_samples)
        if stage := run.train_stream.stage_that_begins(state.consumed_samples, self.samples):
            run.metrics.message(f"step {state.step + 1}: {stage}")
        loss_sum = torch.zeros((), device=engine.device)
        share_sum = torch.zeros((), device=engine.device)
        self.health.before_step()
        # torchao's compiled layers cannot be counted: what they run was fixed when they were proven
        counts = self._logs(state.step + 1) and of_transformer_engine(engine.module)
        check = check_due(engine.module, run.precision, state.step + 1, self.health.fp8_alarms.look_again)
        with count_gemms(engine.module, run.precision) if counts else nullcontext() as gemms:
            for index in range(self.accumulation):
                run.watchdog.doing(f"step {state.step + 1}, micro-batch {index + 1} of {self.accumulation}")
                self.slow_ranks.begin()
                batch = self.batches.get(state.consumed_samples, index).to(engine.device)
                with check.watching() if check and index == 0 else nullcontext():
                    loss_sum += run.micro_step(batch, index)
                if batch.documents is not None:
                    share_sum += batch.labelled()
        first_sample, loss = state.consumed_samples, loss_sum / self.accumulation
        share = share_sum / self.accumulation if self.args.data.document_mask else None
        state.step += 1
        state.consumed_samples += self.samples
        state.consumed_tokens += self.tokens
        weights = run.train_stream.weights_at(first_sample + self.samples - 1)
        skipped = self.health.after_step(state.step, first_sample, weights, loss, share)
        return Step(learning_rate, loss, share, skipped, gemms, check)

    def _judge_skip(self, step: Step) -> None:
        """Tell of a step that was skipped. Raises TrainingError: it was the last that may be."""
        run, state, most = self.run, self.state, self.args.max_skipped_steps
        if step.skipped:
            found = samples_record(run.train_stream, state.consumed_samples - self.samples, self.samples)
            losses = ranks_without_finite_loss(step.loss)
            where = ", ".join(f"{value} on rank {rank}" for rank, value in losses.items())
            why = f"the loss is {where}" if where else "the loss is finite, a gradient is not"
            run.metrics.message(
                f"step {state.step} is skipped on all ranks, no weight changed: {why}; {samples_text(found)}"
            )
            step.record["skipped"] = {**found, "ranks": list(losses)}
        if self.health.skipped_in_a_row >= most:
            if step.record:
                run.log(step.record)
            raise TrainingError(
                f"the gradients of the last {most} steps, to step {state.step}, were not finite and no weight changed; "
                f"{_advice(run)}"
            )

    def _meet(self, step: Step) -> None:
        """What the ranks tell each other after each step: whether to stop, whether a save is over or due by time, who
        is slow, at times whether they still have the same weights; and what is due now."""
        run, args, number = self.run, self.args, self.state.step
        step.stops, saving, by_time = run.stop_vote.ask(run.saver.busy, self._save_is_due())
        run.watchdog.met(f"step {number} is done", after_step=True)
        if run.saver.pending and not saving:
            settle(run)
        self.slow_ranks.step(number)
        step.last, step.logs = number == args.max_steps, self._logs(number)
        step.ends_stage = not step.last and self._changes_precision()
        step.saves, step.evaluates = (
            step.last or bool(n and number % n == 0) for n in (args.save_steps, args.eval_steps)
        )
        step.saves |= by_time or step.ends_stage
        step.judges = step.check is not None and run.precision.config.on_trouble == "escalate"
        step.logs |= step.ends_stage
        if args.replica_check_steps and number % args.replica_check_steps == 0:
            check_replicas(self.engine, run.precision, number)

    def _save_is_due(self) -> bool:
        """By the time: rank 0 decides, as clocks differ. Not before the save under way is over, so that none waits."""
        minutes = self.args.save_minutes if self.args.save_strategy != "no" else 0
        if not minutes or dist.get_rank() != 0 or self.run.saver.pending:
            return False
        return time.monotonic() - self.last_save >= 60 * minutes

    def _goes_back(self, step: Step) -> bool:
        """Look at the numbers of the last steps, when something is due or there are many; tell of spikes, and go back
        if so configured."""
        run, found = self.run, []
        if not ((step.due or self.health.full()) and (spikes := self.health.look(self.tokens))):  # waits
            return False
        for spike in spikes:
            record = samples_record(run.train_stream, spike.first_sample, self.samples)
            run.metrics.message(f"step {spike.step} is a spike: {spike}; {samples_text(record)}")
            value = {spike.what: spike.value, "threshold": spike.threshold}
            found.append({"step": spike.step, **value, **record})
        step.record["spikes_found"] = found
        run.watchdog.met(f"looked at the numbers to step {self.state.step}")
        if self.args.on_spike != "rollback":
            return False
        settle(run)
        if not roll_back(
            spikes,
            self.samples,
            root=run.folder.checkpoints,
            engine=self.engine,
            precision=run.precision,
            state=self.state,
            health=self.health,
            metrics=run.metrics,
            stream=run.train_stream,
        ):
            return False
        run.watchdog.met(f"is back at step {self.state.step}")
        self._start_clock()
        return True

    def _mean_loss(self, step: Step) -> float:
        """The loss of the step over all ranks; waits for the GPU. Raises TrainingError: see `train`."""
        loss = _mean_over_ranks(step.loss)
        if step.share is not None:
            loss /= _mean_over_ranks(step.share)
        run, number = self.run, self.state.step
        if not (step.skipped or math.isfinite(loss)):
            told = f"the loss of step {number} is {loss} and the step was not skipped"
            raise TrainingError(f"{told}; {_advice(run)}")
        if step.gemms is not None and (problem := step.gemms.problem(self.accumulation)):
            raise TrainingError(f"step {number}: {problem}")
        return loss

    def _log(self, step: Step, loss: float) -> None:
        run, state, health, record = self.run, self.state, self.health, step.record
        rate = (state.step - self.clock_step) * self.tokens / (time.perf_counter() - self.clock)
        norm = self.engine.get_global_grad_norm()  # DeepSpeed computes none at ZeRO 0 in float32
        record["loss"], record["step_loss"] = health.interval_loss(), loss
        record["grad_norm"] = None if norm is None else float(norm)
        record["learning_rate"], record["tokens_per_second"] = step.learning_rate, rate
        run.speeds.append(rate)
        record["mfu"] = mfu(rate / self.world, self.flops, self.peak)
        record["memory_gib"] = (
            torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        )
        record["skipped_steps"], record["spikes"] = health.skipped, health.spikes
        if bad := health.mended():
            run.metrics.message(
                f"step {state.step}: {bad} amaxes in the histories of delayed scaling were not finite; they were "
                "taken out, for their scales could not have moved while they are in"
            )
        if (step.last or step.ends_stage) and self.args.precision.schedule:
            what = stage_text(self.args.precision, run.stage)
            speed = typical_speed(run.speeds[run.before_stage :])
            run.metrics.message(f"step {state.step}: {what} is over, at {speed:,.0f} tokens/s")
            how = {key: state.precision[key] for key in ("compute", "recipe")}
            record["precision_stage"] = {"number": run.stage + 1, "tokens_per_second": speed, **how}
        self._start_clock()

    def _look_at_fp8(self, step: Step, check: HealthCheck) -> None:
        """The health of FP8; modules that go a level up end the loop with this step."""
        run, state, model = self.run, self.state, self.engine.module
        found = step.record[FP8_HEALTH] = health_record(check, model.config.num_hidden_layers)  # waits
        if step.skipped:  # by an inf, whatever it came from: that says nothing about scales
            return
        alarms = self.health.fp8_alarms
        step.record |= alarms.judge(state.step, found, check.not_fp8, check.blocks)
        if changes := escalations(state.step, found, alarms, model, run.precision):
            state.escalations += changes  # in place: run.json has this list
            step.record["fp8_escalations"] = {"changes": changes, "count": len(state.escalations)}
            step.saves = step.ends_stage = True
            if take_all_out(changes, model, run.precision):
                step.record |= alarms.end(state.step, step.record["fp8_alarms"])

    def _evaluate(self, step: Step) -> None:
        run = self.run
        losses = None if step.stops else evaluate(run)
        if losses is None:  # the resumed run makes up for it
            step.stops = self.state.evaluation_due = True
        else:
            step.record |= losses | {"unigram_loss": run.unigram_loss}
        self._start_clock()

    def _save(self, step: Step) -> None:
        """In the background, unless it is the last save of this engine. Raises SaveError as `settle`."""
        run, last = self.run, step.last or step.stops or step.ends_stage
        self.state.health = self.health.state_dict()
        if step.ends_stage:
            self.state.precision_changes.append(self.state.step)
        run.watchdog.met(f"saves step {self.state.step}")
        settle(run)
        background = self.args.save_async and not last
        self.last_save = time.monotonic()
        run.saver.begin(self.state, background)
        if not background:
            settle(run, last)
        run.watchdog.met(f"step {self.state.step} is saved, or under way")
        self._start_clock()

    def _start_clock(self) -> None:
        """Throughput is that of the steps from here on."""
        self.clock, self.clock_step = time.perf_counter(), self.state.step


def evaluate(run: Run) -> dict[str, float] | None:
    """held_out_losses of the run's sets; None, on every rank: the run was asked to stop meanwhile."""
    args = run.arguments

    def asked_to_stop() -> bool:
        stops, _, _ = run.stop_vote.ask()
        run.watchdog.met(f"evaluates step {run.state.step}")
        return stops

    size = args.per_device_eval_batch_size or args.per_device_train_batch_size
    return held_out_losses(run.engine, run.precision, run.eval_streams, size, asked_to_stop)


def evaluate_late(run: Run) -> None:
    """Make up for the evaluation that the run was stopped in. Raises Stopped: it is stopped again meanwhile."""
    state = run.state
    losses = evaluate(run)
    if losses is None:
        raise Stopped(state.step, run.checkpoint, to_go_on(run.arguments))
    state.evaluation_due = False
    run.log({**losses, "unigram_loss": run.unigram_loss})


def evaluate_loaded_weights(run: Run) -> None:
    """Evaluate the weights that a run starts from, as step 0. A run that is asked to stop meanwhile skips this and
    stops after its first step."""
    if losses := evaluate(run):
        run.log({**losses, "unigram_loss": run.unigram_loss})


def settle(run: Run, last: bool = False, after: Exception | None = None) -> None:
    """Wait for the save under way, if there is one, and log the result. Collective, but for its wait `after` an error.

    Raises SaveError: it failed, and the run is not to go on to its next save; after the `last` there is none.
    """
    if not run.saver.pending:
        return
    run.watchdog.doing("waits for the save under way" + (f", after {after!r}" if after else ""))
    try:
        saved = run.saver.finish()
        assert saved is not None
        message = f"saved {saved.path} in {saved.seconds:.1f} s (training waited {saved.waited_s:.1f} s)"
    except SaveError as error:
        if last or run.arguments.on_save_failure == "stop":
            raise
        message = f"warning: {error}. on_save_failure is continue: the run goes on to its next save"
    finally:  # the ranks agree how it ended
        run.watchdog.met("the save is over")
    run.metrics.message(message)


def _mean_over_ranks(value: torch.Tensor) -> float:
    """Every rank has the same number of tokens, so the mean over ranks is the mean over tokens."""
    value = value.clone()
    dist.all_reduce(value)
    return float(value / dist.get_world_size())


def _advice(run: Run) -> str:
    """What to do after a step that went wrong; a run may have saved nothing yet, or with save_strategy no at all."""
    saved = committed(run.folder.checkpoints)
    if not (run.saver.pending or saved):
        return "this run has saved no checkpoint. Start anew with a lower learning_rate or another precision.recipe"
    last = saved[-1] if saved else run.folder.checkpoints / "step-N"
    return (
        "the checkpoints before it are intact. Go on from one of them with a lower learning_rate, by the same command "
        f"with {at_half_the_rate(last, run.arguments.learning_rate)}, or with another precision.recipe"
    )
