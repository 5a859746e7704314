"""The training loop in one precision.

A Trainer trains one phase of precision.schedule, or the rest of it after a fallback (precision.on_trouble). Its model,
engine and precision never change. If the next step needs another precision, `fit` saves and returns, and train.py
builds the next Trainer from that checkpoint.

A step waits for the GPU only for logging, FP8 health checks, evaluation and saving. It waits for a background save only
if the next save is due.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model.config import flops_per_token
from model.errors import UserError
from model.fp8.gemms import Gemms, count_gemms
from model.fp8.health import HealthCheck, check_due, has_health_checks
from model.fp8.modules import of_transformer_engine
from model.startup_check import check_attention
from train import setup
from train.checkpoint.files import RunState, committed, name_of
from train.checkpoint.resume import half_rate_options, resume_option, starting_precision
from train.checkpoint.rollback import roll_back
from train.checkpoint.save import SaveError, Saver
from train.config.arguments import TrainingArguments
from train.config.schedule import arguments_of_phase, describe_phase, phase_at
from train.data.order import next_position
from train.data.stream import MicroBatches
from train.engine.held_out import held_out_losses
from train.engine.optimizer import learning_rate_at
from train.engine.step import SkipDecision, free_memory, release
from train.monitor.fp8_alarms import find_fallbacks
from train.monitor.health import Health, ranks_without_finite_loss, samples_record, samples_text
from train.monitor.replicas import check_replicas, replicated_tensors
from train.monitor.signals import Stopped, StopVote
from train.monitor.slow_ranks import SlowRanks
from train.monitor.watchdog import Watchdog
from train.record.fp8_health import FP8_HEALTH, health_record
from train.record.history import typical_speed
from train.record.metrics import MetricsLogger, mfu, peak_tflops
from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)


class TrainingError(UserError):
    """The run cannot continue. The message names the step and what to do."""

    code = "training"


@dataclass(frozen=True)
class Step:
    """The result of an optimizer step. Reading a tensor waits for the GPU."""

    learning_rate: float
    loss: torch.Tensor  # mean over the micro-batches of this rank; float32 scalar on the device
    share: torch.Tensor | None  # share of tokens with a label; None: all tokens have one
    skipped: bool  # no weight changed, on any rank
    gemms: Gemms | None  # FP8 GEMMs that ran, if the step is logged
    health_check: HealthCheck | None  # FP8 health check, if one was due


class Trainer:
    """Trains a run up to the next change of precision, or to its end.

    Collective: every rank must build a Trainer and call its methods at the same points.

    Args:
        args: The resolved arguments of the whole run.
        data: The data of the run.
        state: The position of the run. The Trainer updates it in place.
        checkpoint: The checkpoint of this position. None: a new run.
        watchdog: Reports the startup phase that hangs.
    """

    def __init__(
        self,
        args: TrainingArguments,
        data: setup.RunData,
        state: RunState,
        checkpoint: Path | None,
        watchdog: Watchdog,
    ):
        self.args, self.data, self.state = args, data, state
        self.first_checkpoint, self.first_step = checkpoint, state.step
        self.folder = RunFolder(args.output_dir)
        self.phase, fallbacks = starting_precision(args, state)
        phase_args = arguments_of_phase(args, self.phase)
        read = setup.bytes_to_read(checkpoint or args.model.init_from)
        watchdog.phase("building the model", read)
        self.model, self.precision = setup.build_model_and_precision(phase_args, checkpoint, fallbacks)
        watchdog.phase("running the startup check")
        setup.check_later_phases(args, self.model, self.precision.device, state.levels)
        self.report = setup.run_startup_check(args, self.model, self.precision)
        watchdog.phase("building the engine", read)
        self.engine, self.micro_step = setup.build_engine_and_resume(
            phase_args, self.model, self.precision, data.train, state, checkpoint
        )
        state.precision = phase_args.to_dict()["precision"]
        self.world = dist.get_world_size()
        self.accumulation = args.gradient_accumulation_steps or 1
        self.samples = args.per_device_train_batch_size * self.accumulation * self.world  # per step
        self.tokens = self.samples * args.max_seq_length
        self.speeds: list[float] = []  # tokens/s over all ranks in each logged interval

    def fit(self, metrics: MetricsLogger, stop_vote: StopVote) -> Path | None:
        """Train until the precision changes or the run ends.

        If an error ends the run, a background save is completed first.

        Returns:
            The checkpoint of the last step, or None with save_strategy no.

        Raises:
            Stopped: A signal requested a stop. The step and its checkpoint are complete.
            TrainingError: max_skipped_steps steps in a row were skipped, the loss of a step that was not skipped is not
                finite, or FP8 stopped running.
            ReplicaError: The weights of ranks differ.
            SaveError: A save failed, and on_save_failure is stop or it was the last save.
        """
        self.metrics, self.stop_vote = metrics, stop_vote
        self.watchdog = Watchdog(self.args.hang_timeout_s)
        self.saver = Saver(self.engine, self.folder.checkpoints, self.precision, self.args.save_total_limit)
        with self.watchdog:
            self._evaluate_first()
            if self.state.step == self.args.max_steps:
                logger.info(f"max_steps is {self.args.max_steps}, and this run is already at that step")
                return self.first_checkpoint
            self._prepare_steps()
            try:
                while not self._is_over():
                    self._run_step()
            except Exception as error:
                # The save belongs to an earlier step, and its threads do not need the main thread. So it is committed
                # even if only this rank has failed. The watchdog limits the wait.
                try:
                    self._finish_save(after=error)
                except Exception as failure:
                    logger.warning(str(failure))
                raise
            finally:
                self.batches.close()
        return self.checkpoint

    def close(self) -> None:
        """Free the memory of the model, engine and optimizer. The Trainer cannot be used afterwards."""
        release(self.engine)
        vars(self).clear()
        free_memory()

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint of the current step, or None with save_strategy no."""
        if self.first_checkpoint is not None and self.state.step == self.first_step:
            return self.first_checkpoint
        if self.args.save_strategy == "no":
            return None
        return self.folder.checkpoints / name_of(self.state.step)

    # ---------------------------------------------------------------- a step

    def _prepare_steps(self) -> None:
        args, engine = self.args, self.engine
        self.batches = MicroBatches(
            self.data.train, args.per_device_train_batch_size, dist.get_rank(), self.world
        )
        self.skip_decision = SkipDecision(engine, self.precision)
        self.health = Health(args.spike_window, args.spike_threshold)
        self.health.load_state_dict(self.state.health)
        self.has_fp8_checks = has_health_checks(self.model, self.precision)
        if args.replica_check_steps:
            count = len(replicated_tensors(engine, self.precision)) if self.world > 1 else 0
            logger.info(f"replica check, every {args.replica_check_steps} steps: {count} tensors with copies")
        engine.train()
        self.flops = flops_per_token(self.model.config, args.max_seq_length)
        self.peak = peak_tflops(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
        self.last_save = time.monotonic()
        self._start_clock()
        self.slow_ranks = SlowRanks(engine, self.stop_vote.group, args.speed.cuda_graphs)

    def _run_step(self) -> None:
        """Take a step, then check, log, evaluate and save as configured."""
        args, state, record = self.args, self.state, dict[str, Any]()
        step = self.take_step()
        number = state.step
        if number == self.first_step + 1:
            check_attention(self.model, self.precision, self.report.attention)
        self._handle_skip(step, record)
        stop, save_by_time = self._vote()
        if args.replica_check_steps and number % args.replica_check_steps == 0:
            check_replicas(self.engine, self.precision, number)

        is_last = number == args.max_steps
        ends = not is_last and self._is_over()  # the next step has another precision
        log = ends or self._is_logged(number)
        save = is_last or ends or save_by_time or _is_due(number, args.save_steps)
        evaluate = is_last or _is_due(number, args.eval_steps)
        judge = step.health_check is not None and self.precision.config.on_trouble == "escalate"
        waits = log or save or evaluate or stop or judge  # wait for the GPU

        if waits and self._roll_back(record):
            return
        if waits:
            loss = self._mean_loss(step)
            if log:
                self._log(step, loss, record)
                if (is_last or ends) and args.precision.schedule:
                    self._log_phase(record)
        if self._check_fp8(step, record):
            save = ends = True
        if evaluate and not self._evaluate(stop, record):
            stop = True
        if record:
            self._write_metrics(record)
        if ends:
            state.precision_changes.append(number)
        if (save or stop) and args.save_strategy != "no":
            self._save(is_last=is_last or stop or ends)
        if stop:  # also in the last step: the resumed run then evaluates it
            raise Stopped(number, self.checkpoint, resume_option(args))

    def take_step(self) -> Step:
        """Run forward and backward of all micro-batches and the optimizer step. Does not wait for the GPU."""
        args, state, engine, stream = self.args, self.state, self.engine, self.data.train
        learning_rate = learning_rate_at(state.step, args)
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)  # Muon sets lr_scale
        state.consumed_samples = next_position(state.consumed_samples, self.samples, state.skipped_samples)
        first_sample = state.consumed_samples
        if phase := stream.phase_that_begins(first_sample, self.samples):
            logger.info(f"step {state.step + 1}: {phase}")
        loss_sum = torch.zeros((), device=engine.device)
        share_sum = torch.zeros((), device=engine.device)
        self.skip_decision.keep_fp8_state()
        # GEMMs in torchao's compiled layers cannot be counted; the startup check has fixed what they run
        counts = self._is_logged(state.step + 1) and of_transformer_engine(self.model)
        check = check_due(self.model, self.precision, state.step + 1, self.health.fp8_alarms.check_again)
        with count_gemms(self.model, self.precision) if counts else nullcontext() as gemms:
            for index in range(self.accumulation):
                self.watchdog.at(f"step {state.step + 1}, micro-batch {index + 1} of {self.accumulation}")
                self.slow_ranks.begin()
                batch = self.batches.get(first_sample, index).to(engine.device)
                with check.watching() if check and index == 0 else nullcontext():
                    loss_sum += self.micro_step(batch, index)
                if batch.documents is not None:
                    share_sum += batch.labelled()
        loss = loss_sum / self.accumulation
        share = share_sum / self.accumulation if args.data.document_mask else None
        state.step += 1
        state.consumed_samples += self.samples
        state.consumed_tokens += self.tokens
        skipped = self.skip_decision.is_skipped(state.step)
        if skipped:
            self.health.record_skipped()
        else:
            weights, norm = stream.weights_at(state.consumed_samples - 1), engine.get_global_grad_norm()
            self.health.record(state.step, first_sample, weights, loss, share, norm)
        return Step(learning_rate, loss, share, skipped, gemms, check)

    def _is_over(self) -> bool:
        """Return whether the run has no more steps or the next step has another precision."""
        state = self.state
        if state.step >= self.args.max_steps or state.levels != self.precision.levels:
            return True
        return phase_at(self.args, state.step, state.consumed_tokens) != self.phase

    def _is_logged(self, number: int) -> bool:
        return number == self.args.max_steps or number % self.args.logging_steps == 0

    def _handle_skip(self, step: Step, record: dict[str, Any]) -> None:
        """Report a skipped step.

        Raises:
            TrainingError: Too many steps in a row were skipped.
        """
        number, most = self.state.step, self.args.max_skipped_steps
        if step.skipped:
            found = samples_record(self.data.train, self.state.consumed_samples - self.samples, self.samples)
            losses = ranks_without_finite_loss(step.loss)
            where = ", ".join(f"{value} on rank {rank}" for rank, value in losses.items())
            why = f"the loss is {where}" if where else "the loss is finite, a gradient is not"
            logger.info(
                f"step {number} is skipped on all ranks, no weight changed: {why}; {samples_text(found)}"
            )
            record["skipped"] = {**found, "ranks": list(losses)}
        if self.health.skipped_in_a_row >= most:
            if record:
                self._write_metrics(record)
            raise TrainingError(
                f"the gradients of the last {most} steps, to step {number}, were not finite and no weight changed; "
                f"{self._advice()}"
            )

    def _vote(self) -> tuple[bool, bool]:
        """Agree with the other ranks whether to stop, and whether a save is due by time. Returns both."""
        stop, saving, save_by_time = self.stop_vote.ask(self.saver.busy, self._is_save_due_by_time())
        self.watchdog.renew(f"step {self.state.step} is done", after_step=True)
        if self.saver.pending and not saving:
            self._finish_save()
        self.slow_ranks.step(self.state.step)
        return stop, save_by_time

    def _is_save_due_by_time(self) -> bool:
        """Return whether save_minutes have passed. Only rank 0 decides, since clocks differ.

        Not before a background save is complete, so that no step waits for it.
        """
        minutes = self.args.save_minutes if self.args.save_strategy != "no" else 0
        if not minutes or dist.get_rank() != 0 or self.saver.pending:
            return False
        return time.monotonic() - self.last_save >= 60 * minutes

    def _roll_back(self, record: dict[str, Any]) -> bool:
        """Report spikes in the last steps. Return whether the run was rolled back to a checkpoint before them.

        Waits for the GPU.
        """
        spikes = self.health.find_spikes(self.tokens)
        if not spikes:
            return False
        record["spikes_found"] = []
        for spike in spikes:
            samples = samples_record(self.data.train, spike.first_sample, self.samples)
            logger.info(f"step {spike.step} is a spike: {spike}; {samples_text(samples)}")
            value = {spike.what: spike.value, "threshold": spike.threshold}
            record["spikes_found"].append({"step": spike.step, **value, **samples})
        self.watchdog.renew(f"checked the numbers up to step {self.state.step}")
        if self.args.on_spike != "rollback":
            return False
        self._finish_save()  # the rollback may need this checkpoint
        if not roll_back(
            spikes,
            self.samples,
            root=self.folder.checkpoints,
            engine=self.engine,
            precision=self.precision,
            state=self.state,
            health=self.health,
            metrics=self.metrics,
            stream=self.data.train,
        ):
            return False
        self.watchdog.renew(f"rolled back to step {self.state.step}")
        self._start_clock()
        return True

    def _mean_loss(self, step: Step) -> float:
        """Return the mean loss of the step over all ranks. Waits for the GPU.

        Raises:
            TrainingError: See `fit`.
        """
        loss = _mean_over_ranks(step.loss)
        if step.share is not None:
            loss /= _mean_over_ranks(step.share)
        number = self.state.step
        if not (step.skipped or math.isfinite(loss)):
            raise TrainingError(
                f"the loss of step {number} is {loss} and the step was not skipped; {self._advice()}"
            )
        if step.gemms is not None and (problem := step.gemms.problem(self.accumulation)):
            raise TrainingError(f"step {number}: {problem}")
        return loss

    # ---------------------------------------------------------------- after a step

    def _log(self, step: Step, loss: float, record: dict[str, Any]) -> None:
        rate = (self.state.step - self.clock_step) * self.tokens / (time.perf_counter() - self.clock)
        self.speeds.append(rate)
        norm = self.engine.get_global_grad_norm()
        record |= {
            "loss": self.health.interval_loss(),
            "step_loss": loss,
            "grad_norm": None if norm is None else float(norm),
            "learning_rate": step.learning_rate,
            "tokens_per_second": rate,
            "mfu": mfu(rate / self.world, self.flops, self.peak),
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
            "skipped_steps": self.engine.skipped_steps,
            "spikes": self.health.spikes,
        }
        self._start_clock()

    def _log_phase(self, record: dict[str, Any]) -> None:
        speed = typical_speed(self.speeds)
        phase = describe_phase(self.args.precision, self.phase)
        logger.info(f"step {self.state.step}: {phase} is over, at {speed:,.0f} tokens/s")
        how = {key: self.state.precision[key] for key in ("compute", "recipe")}
        record["precision_stage"] = {"number": self.phase + 1, "tokens_per_second": speed, **how}

    def _check_fp8(self, step: Step, record: dict[str, Any]) -> bool:
        """Evaluate the FP8 health check of the step, if there was one. Return whether modules fall back."""
        number, alarms = self.state.step, self.health.fp8_alarms
        if step.health_check is None:
            if alarms.active and not self.has_fp8_checks:
                logger.info(
                    f"step {number}: this precision has no FP8 health checks; its FP8 alarms are cleared"
                )
                record |= alarms.judge(number, {})
            return False
        found = health_record(step.health_check, self.model.config.num_hidden_layers)  # waits for the GPU
        record[FP8_HEALTH] = found
        if step.skipped:  # the statistics contain the inf or NaN that caused the skip
            return False
        record |= alarms.judge(number, found)
        fallbacks = find_fallbacks(number, found, alarms, self.model, self.precision)
        if fallbacks:
            self.state.escalations += fallbacks  # in place: run.json refers to this list
            record["fp8_escalations"] = {"changes": fallbacks, "count": len(self.state.escalations)}
        return bool(fallbacks)

    def _evaluate(self, stop: bool, record: dict[str, Any]) -> bool:
        """Evaluate. If a stop is requested meanwhile, return False; the resumed run then evaluates this step."""
        losses = None if stop else self.held_out_losses()
        if losses is None:
            self.state.evaluation_due = True
        else:
            record |= losses
        self._start_clock()
        return losses is not None

    def _evaluate_first(self) -> None:
        """Run an evaluation that a stopped run left undone, or evaluate the weights of model.init_from as step 0.

        Raises:
            Stopped: A stop was requested during an evaluation left by a stopped run. If it was requested during the
                evaluation of step 0, the run stops after its first step instead.
        """
        state = self.state
        if not (state.evaluation_due or (state.step == 0 and self.args.model.init_from)):
            return
        losses = self.held_out_losses()
        if losses is not None:
            state.evaluation_due = False
            self._write_metrics(losses)
        elif state.evaluation_due:
            raise Stopped(state.step, self.checkpoint, resume_option(self.args))

    def held_out_losses(self) -> dict[str, float] | None:
        """Return the losses of the evaluation data and of their unigram model.

        Returns None on every rank if a stop is requested meanwhile.
        """

        def asked_to_stop() -> bool:
            stop, _, _ = self.stop_vote.ask()
            self.watchdog.renew(f"evaluating step {self.state.step}")
            return stop

        size = self.args.per_device_eval_batch_size or self.args.per_device_train_batch_size
        losses = held_out_losses(self.engine, self.precision, self.data.held_out, size, asked_to_stop)
        return None if losses is None else losses | {"unigram_loss": self.data.unigram_loss}

    def _save(self, is_last: bool) -> None:
        """Save a checkpoint, in the background unless it is the last save of this Trainer.

        Raises:
            SaveError: See `_finish_save`.
        """
        self.state.health = self.health.state_dict()
        self.watchdog.renew(f"saving step {self.state.step}")
        self._finish_save()
        background = self.args.save_async and not is_last
        self.last_save = time.monotonic()
        self.saver.begin(self.state, background)
        if not background:
            self._finish_save(is_last)
        self.watchdog.renew(f"saved step {self.state.step}, or started to save it")
        self._start_clock()

    def _finish_save(self, is_last: bool = False, after: Exception | None = None) -> None:
        """Wait for a background save, if there is one, and log its result. Collective, except after an error.

        Args:
            is_last: No other save follows.
            after: The error that ends the run.

        Raises:
            SaveError: The save failed, and on_save_failure is stop or no other save follows.
        """
        if not self.saver.pending:
            return
        self.watchdog.at("waiting for the background save" + (f", after {after!r}" if after else ""))
        try:
            saved = self.saver.finish()
            assert saved is not None
            logger.info(
                f"saved {saved.path} in {saved.seconds:.1f} s (training waited {saved.waited_s:.1f} s)"
            )
        except SaveError as error:
            if is_last or self.args.on_save_failure == "stop":
                raise
            logger.warning(f"{error}. on_save_failure is continue: the run continues to its next save")
        finally:  # all ranks agree on the result
            self.watchdog.renew("the save is complete")

    def _write_metrics(self, values: dict[str, Any]) -> None:
        self.metrics.log({"step": self.state.step, "tokens": self.state.consumed_tokens, **values})

    def _start_clock(self) -> None:
        """Measure throughput from this step on."""
        self.clock, self.clock_step = time.perf_counter(), self.state.step

    def _advice(self) -> str:
        """Return advice for the user after a step with wrong numbers."""
        saved = committed(self.folder.checkpoints)
        if not (self.saver.pending or saved):
            return "this run has no checkpoint yet. Start again with a lower learning_rate or another precision.recipe"
        last = saved[-1] if saved else self.folder.checkpoints / "step-N"
        return (
            "the earlier checkpoints are intact. Resume from one with a lower learning_rate: run the same command with "
            f"{half_rate_options(last, self.args.learning_rate)}, or with another precision.recipe"
        )


def build_next_trainer(trainer: Trainer) -> tuple[Trainer, dict[str, Any]]:
    """Replace a Trainer by one with the precision of the next step, built from its last checkpoint.

    The memory of the old Trainer is freed before the new one is built.

    Returns:
        The new Trainer, and the entry in run.json that describes the change.
    """
    began, phase, fallbacks = time.monotonic(), trainer.phase, trainer.precision.levels
    args, data, state, checkpoint = trainer.args, trainer.data, trainer.state, trainer.checkpoint
    logger.info(f"step {state.step + 1} has another precision: rebuilding model and engine")
    with Watchdog(args.hang_timeout_s) as watchdog:
        watchdog.at("freeing model and engine")
        trainer.close()
        following = Trainer(args, data, state, checkpoint, watchdog)
    is_new_phase = following.phase != phase
    changes = [f"{describe_phase(args.precision, following.phase)} begins"] if is_new_phase else []
    moved = sum(fallbacks.get(name) != recipe for name, recipe in state.levels.items())
    if moved:
        changes.append(f"{moved} modules fall back (precision.on_trouble)")
    took_s = round(time.monotonic() - began, 2)
    logger.info(f"{'; '.join(changes)}; the change took {took_s:.1f} s")
    return following, {
        "step": state.step,
        "stage": "; ".join(changes),
        "new_stage": is_new_phase,
        "took_s": took_s,
        "fp8": following.report.fp8,
        "proof": following.report.lines,
    }


def _is_due(number: int, every: int) -> bool:
    return bool(every) and number % every == 0


def _mean_over_ranks(value: torch.Tensor) -> float:
    """Return the mean over ranks. Every rank has the same number of tokens, so it is also the mean over tokens."""
    value = value.clone()
    dist.all_reduce(value)
    return float(value / dist.get_world_size())
