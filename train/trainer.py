"""Train one phase of a run: run the optimizer steps, and log, evaluate and save as configured.

The optimizer step waits for the gradient norm on the GPU. Otherwise, a step waits for the GPU only for logging, FP8
health checks, evaluation and saving. It waits for a background save only if the next save is due. All ranks must call
the methods at the same points.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from model.checks.gemm_counts import Gemms, count_gemms
from model.checks.health import HealthCheck, check_due, has_health_checks
from model.checks.startup import check_attention
from model.config import GIB, flops_per_token
from model.errors import UserError
from model.fp8.modules import uses_transformer_engine
from model.fp8.precision import Precision
from model.fp8.state import fp8_state, snapshot_fp8_state
from train.checkpoint.files import RunState, checkpoint_name
from train.checkpoint.load import roll_back
from train.checkpoint.resume import resume_option
from train.checkpoint.save import Ranks, SaveError, Saver
from train.config.schedule import phase_at
from train.data.order import next_position
from train.data.stream import NO_LABEL, MicroBatches, SampleStream, held_out_batches
from train.engine.optimizer import learning_rate_at
from train.engine.step import SkipDecision
from train.monitor.fp8_alarms import find_fallbacks
from train.monitor.replicas import check_replicas
from train.monitor.signals import Stopped, StopVote
from train.monitor.spikes import Health, ranks_without_finite_loss, samples_record, samples_text
from train.monitor.watchdog import Watchdog
from train.phase import Phase, Run
from train.record.fp8_health import FP8_HEALTH, health_record
from train.record.history import typical_speed
from train.record.metrics import MetricsLogger, mfu, peak_tflops
from train.record.profiles import make_profiler

logger = logging.getLogger(__name__)

FP8_ADVICE = (
    "Resume from an earlier checkpoint (--resume_from_checkpoint) with a lower learning_rate or another "
    "precision.recipe, and allow the change (--allow_changes_on_resume)"
)


class TrainingError(UserError):
    """An error raised if the training cannot continue. The message names the step and a remedy."""

    code = "training"


@dataclass(frozen=True)
class Step:
    """Result of an optimizer step. Reading a tensor of the result waits for the GPU."""

    loss: torch.Tensor  # mean over the micro-batches of this rank; float32 scalar on the device
    share: torch.Tensor | None  # fraction of the tokens that have a label; None if all tokens have one
    skipped: bool  # whether the step was skipped, so that no weight changed on any rank
    gemms: Gemms | None  # counts of the FP8 GEMMs that ran, if the step is logged
    health_check: HealthCheck | None  # FP8 health check, if one was due


class Trainer:
    """Trainer for one phase of a run. Trains until the precision changes or the run ends.

    Collective: all ranks must build a Trainer and call its methods at the same points.

    Args:
        state: The run state, which the Trainer updates in place.
        metrics: Logger for the metrics of the whole run.
        stop_vote: Vote by which all ranks agree on whether to stop.
        save_ranks: Collective operations for saves.
    """

    def __init__(
        self,
        run: Run,
        phase: Phase,
        state: RunState,
        metrics: MetricsLogger,
        stop_vote: StopVote,
        save_ranks: Ranks,
    ):
        args = run.args
        self.run, self.args, self.phase, self.state = run, args, phase, state
        self.model, self.precision, self.engine = phase.model, phase.precision, phase.engine
        self.metrics, self.stop_vote = metrics, stop_vote
        self.accumulation = args.gradient_accumulation_steps or 1
        self.samples = args.per_device_train_batch_size * self.accumulation * dist.get_world_size()
        self.tokens = self.samples * args.max_seq_length
        self.flops = flops_per_token(self.model.config, args.max_seq_length)
        self.peak = peak_tflops(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
        self.speeds: list[float] = []  # tokens/s over all ranks in each logged interval
        self.watchdog = Watchdog(args.hang_timeout_s, run.folder.hang)
        self.saver = Saver(
            self.engine,
            run.folder.checkpoints,
            self.precision,
            save_ranks,
            args.save_total_limit,
            args.keep_every_steps,
        )
        self.skip_decision = SkipDecision(self.engine, self.precision)
        self.health = Health(args.spike_window, args.spike_threshold)
        self.health.load_state_dict(state.health)
        self.batches = MicroBatches(
            run.train, args.per_device_train_batch_size, dist.get_rank(), dist.get_world_size()
        )
        self.last_save = time.monotonic()
        self._start_clock()

    def fit(self) -> Path | None:
        """Train until the precision changes or the run ends.

        After an error, a background save that is in progress is completed before the error is raised.

        Returns:
            The checkpoint of the last step, or None if save_strategy is "no".

        Raises:
            Stopped: A signal requested a stop. The current step and its checkpoint are complete.
            TrainingError: max_skipped_steps consecutive steps were skipped, the loss of a step is not finite although
                the step was not skipped, or GEMMs no longer run in FP8.
            ReplicaError: The weights differ between ranks.
            SaveError: A save failed, and on_save_failure is "stop" or the failed save was the last one.
        """
        # Without a terminal, disable=None disables the bar, and the log lines show the progress.
        bar = tqdm(
            total=self.args.max_steps,
            initial=self.state.step,
            unit="step",
            file=sys.stdout,
            leave=False,
            disable=None if dist.get_rank() == 0 else True,
        )
        profiler = make_profiler(self.args.profile_steps, self.state.step, self.run.folder.profile)
        with (
            self.watchdog,
            bar,
            contextlib.closing(self.batches),
            profiler or contextlib.nullcontext(),
        ):
            self._evaluate_first()
            self.engine.train()
            try:
                while not self._is_over():
                    self._run_step()
                    if profiler is not None:
                        profiler.step()
                    bar.update(self.state.step - bar.n)  # negative after a rollback
            except Exception:
                # The save belongs to an earlier step, and its threads do not need the main thread. So the save is
                # committed even if only this rank has failed. The watchdog limits the wait.
                try:
                    self._finish_save()
                except Exception as error:  # the original exception decides the exit status
                    logger.warning(f"the background save of an earlier step also failed: {error}")
                raise
        return self.checkpoint

    @property
    def checkpoint(self) -> Path | None:
        """Return the path of the checkpoint of the current step, or None if this step has no checkpoint."""
        if self.state.step == self.phase.first_step:
            return self.phase.first_checkpoint
        return (
            None
            if self.args.save_strategy == "no"
            else self.run.folder.checkpoints / checkpoint_name(self.state.step)
        )

    # ---------------------------------------------------------------- a step

    def _run_step(self) -> None:
        """Run one optimizer step, then check, log, evaluate and save as configured."""
        args, state, record = self.args, self.state, dict[str, Any]()
        step = self.take_step()
        number = state.step
        if number == self.phase.first_step + 1:
            check_attention(self.model, self.precision, self.phase.report.attention)
        if step.skipped:
            self._report_skip(step, record)
        stop, save_by_time = self._vote()
        if _is_due(number, args.replica_check_steps):
            check_replicas(self.engine, self.precision, number)

        ends = self._is_over()
        logs = ends or _is_due(number, args.logging_steps)
        evaluates = number == args.max_steps or _is_due(number, args.eval_steps)
        saves = ends or save_by_time or _is_due(number, args.save_steps)
        judges = step.health_check is not None and self.precision.config.on_trouble == "escalate"
        if logs or evaluates or saves or stop or judges:  # these wait for the GPU
            if self._roll_back(record):
                return
            loss = self._mean_loss(step)
            if logs:
                self._log(step, loss, record, ends_phase=ends)
        if self._check_fp8(step, record):  # modules fall back, which begins a new phase
            ends = saves = True
        if evaluates:  # if a stop is requested, this step is evaluated when the run resumes
            stop = state.evaluation_due = stop or not self._evaluate(record)
        if record:
            self._write_metrics(record)
        if (saves or stop) and args.save_strategy != "no":
            self._save(is_last=ends or stop)
        if stop:
            raise Stopped(number, self.checkpoint, resume_option(args))

    def take_step(self) -> Step:
        """Run the forward and backward passes of all micro-batches and the optimizer step."""
        args, state, engine, stream = self.args, self.state, self.engine, self.run.train
        learning_rate = learning_rate_at(state.step, args)
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)  # see parameter_groups
        first_sample = next_position(state.consumed_samples, self.samples, state.skipped_samples)
        if skipped_samples := first_sample - state.consumed_samples:
            logger.info(f"step {state.step + 1} skips {skipped_samples} samples because of a rollback")
        loss_sum, share_sum = torch.zeros(2, device=engine.device)
        self.skip_decision.keep_fp8_state()
        # GEMMs in torchao's compiled layers cannot be counted. The startup check has verified these layers.
        logs = state.step + 1 == args.max_steps or _is_due(state.step + 1, args.logging_steps)
        counts = logs and uses_transformer_engine(self.model)
        check = check_due(self.model, self.precision, state.step + 1, self.health.fp8_alarms.check_again)
        with count_gemms(self.model, self.precision) if counts else contextlib.nullcontext() as gemms:
            for index in range(self.accumulation):
                self.watchdog.set_position(
                    f"step {state.step + 1}, micro-batch {index + 1} of {self.accumulation}"
                )
                batch = self.batches.get(first_sample, index).to(engine.device)
                with check.collecting() if check and index == 0 else contextlib.nullcontext():
                    loss_sum += self.phase.micro_step(batch, index)
                if batch.documents is not None:
                    share_sum += batch.labelled()
        loss = loss_sum / self.accumulation
        share = share_sum / self.accumulation if args.data.document_mask else None
        state.step += 1
        state.consumed_samples = first_sample + self.samples
        state.consumed_tokens += self.tokens
        skipped = self.skip_decision.is_skipped(state.step)
        if skipped:
            self.health.skipped_in_a_row += 1
        else:
            weights = stream.weights_at(state.consumed_samples - 1)
            norm = engine.get_global_grad_norm()
            self.health.record(state.step, first_sample, weights, loss, share, norm)
        return Step(loss, share, skipped, gemms, check)

    def _is_over(self) -> bool:
        """Return whether this Trainer has finished.

        This is the case if the run has no more steps or the next step needs a different precision.
        """
        state = self.state
        return (
            state.step >= self.args.max_steps
            or state.fallbacks != self.precision.fallbacks
            or phase_at(self.args, state.step, state.consumed_tokens) != self.phase.number
        )

    def _report_skip(self, step: Step, record: dict[str, Any]) -> None:
        """Log a skipped step, and add the reason to `record`.

        Raises:
            TrainingError: max_skipped_steps consecutive steps were skipped.
        """
        number, most = self.state.step, self.args.max_skipped_steps
        found = samples_record(self.run.train, self.state.consumed_samples - self.samples, self.samples)
        losses = ranks_without_finite_loss(step.loss)
        reason = (
            f"non-finite losses by rank: {losses}" if losses else "the loss is finite, but a gradient is not"
        )
        logger.info(
            f"step {number} was skipped on all ranks without changing weights: {reason}. The step used "
            f"{samples_text(found)}"
        )
        record["skipped"] = {**found, "ranks": list(losses)}
        if self.health.skipped_in_a_row >= most:
            self._write_metrics(record)
            raise TrainingError(
                f"the last {most} steps, up to step {number}, were skipped because their gradients were not "
                f"finite. {FP8_ADVICE}"
            )

    def _vote(self) -> tuple[bool, bool]:
        """Return whether to stop and whether a save is due after save_minutes, with the same result on all ranks.

        Only rank 0 checks the time, because clocks differ. Rank 0 requests no save while a background save is in
        progress, because the step would have to wait for that save.
        """
        minutes = self.args.save_minutes if self.args.save_strategy != "no" else 0
        is_late = bool(minutes) and time.monotonic() - self.last_save >= 60 * minutes
        due = is_late and dist.get_rank() == 0 and not self.saver.pending
        stop, saving, save_by_time = self.stop_vote.ask(self.saver.busy, due)
        self.watchdog.renew(f"step {self.state.step} is done", after_step=True)
        if self.saver.pending and not saving:
            self._finish_save()
        return stop, save_by_time

    def _roll_back(self, record: dict[str, Any]) -> bool:
        """Log recent spikes of the loss and gradient norm, and roll the run back if on_spike is "rollback".

        The call waits for the GPU.

        Returns:
            Whether the run was rolled back to a checkpoint before the spikes.
        """
        spikes = self.health.find_spikes(self.tokens)
        for spike in spikes:
            samples = samples_record(self.run.train, spike.first_sample, self.samples)
            logger.info(f"spike at step {spike.step}: {spike}. The step used {samples_text(samples)}")
            value = {spike.what: spike.value, "threshold": spike.threshold}
            record.setdefault("spikes_found", []).append({"step": spike.step, **value, **samples})
        if not spikes or self.args.on_spike != "rollback":
            return False
        began = time.perf_counter()
        self._finish_save()  # the rollback may need this checkpoint
        rolls_back = roll_back(
            spikes,
            self.samples,
            root=self.run.folder.checkpoints,
            engine=self.engine,
            precision=self.precision,
            state=self.state,
            health=self.health,
            metrics=self.metrics,
            stream=self.run.train,
        )
        self.watchdog.renew(f"finished the spike check; continuing after step {self.state.step}")
        if rolls_back:
            self._start_clock()
        else:  # exclude this pause from the speed of the current interval
            self.clock += time.perf_counter() - began
        return rolls_back

    def _mean_loss(self, step: Step) -> float:
        """Return the mean loss of a step over all ranks.

        Collective: all ranks must call this method. The call waits for the GPU.

        Raises:
            TrainingError: The loss is not finite although the step was not skipped, or GEMMs did not run in FP8.
        """
        loss = _mean_over_ranks(step.loss)
        if step.share is not None:
            loss /= _mean_over_ranks(step.share)
        if not (step.skipped or math.isfinite(loss)):
            raise TrainingError(
                f"the loss of step {self.state.step} is {loss}, but the step was not skipped. {FP8_ADVICE}"
            )
        if step.gemms is not None and (problem := step.gemms.problem(self.accumulation)):
            raise TrainingError(f"step {self.state.step}: {problem}")
        return loss

    # ---------------------------------------------------------------- after a step

    def _log(self, step: Step, loss: float, record: dict[str, Any], ends_phase: bool) -> None:
        rate = (self.state.step - self.clock_step) * self.tokens / (time.perf_counter() - self.clock)
        self.speeds.append(rate)
        norm = self.engine.get_global_grad_norm()
        record |= {
            "loss": self.health.interval_loss(),
            "step_loss": loss,
            "grad_norm": None if norm is None else float(norm),
            "learning_rate": learning_rate_at(self.state.step - 1, self.args),
            "tokens_per_second": rate,
            "mfu": mfu(rate / dist.get_world_size(), self.flops, self.peak),
            "memory_gib": torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None,
            "skipped_steps": self.engine.skipped_steps,
            "spikes": self.health.spikes,
        }
        if ends_phase and self.args.precision.schedule:
            record["precision_stage"] = {
                "number": self.phase.number + 1,
                "tokens_per_second": typical_speed(self.speeds),
                "compute": self.precision.config.compute,
                "recipe": self.precision.config.recipe,
            }
        self._start_clock()

    def _check_fp8(self, step: Step, record: dict[str, Any]) -> bool:
        """Evaluate the FP8 health check of a step, if one was due.

        Return whether modules must fall back to a safer recipe.
        """
        number, alarms = self.state.step, self.health.fp8_alarms
        if step.health_check is None:
            # end the alarms of an earlier precision that had health checks
            if alarms.active and not has_health_checks(self.model, self.precision):
                record |= alarms.judge(number, {})
            return False
        # waits for the GPU
        found = record[FP8_HEALTH] = health_record(step.health_check, self.model.config.num_hidden_layers)
        if step.skipped:  # the statistics contain the inf or NaN that caused the skip
            return False
        record |= alarms.judge(number, found)
        fallbacks = find_fallbacks(number, found, alarms, self.model, self.precision)
        if fallbacks:
            self.state.escalations += fallbacks  # in place: run.json refers to this list
            record["fp8_escalations"] = {"changes": fallbacks, "count": len(self.state.escalations)}
        return bool(fallbacks)

    def _evaluate_first(self) -> None:
        """Evaluate before the first step, if necessary.

        An evaluation that a stopped run did not complete is repeated. The weights of model.init_from are evaluated as
        step 0.

        Raises:
            Stopped: A stop was requested during a repeated evaluation. During the evaluation of step 0, a stop request
                takes effect only after the first step.
        """
        state, losses = self.state, dict[str, Any]()
        if not (state.evaluation_due or (state.step == 0 and self.args.model.init_from)):
            return
        if self._evaluate(losses):
            state.evaluation_due = False
            self._write_metrics(losses)
        elif state.evaluation_due:
            raise Stopped(state.step, self.checkpoint, resume_option(self.args))

    def _evaluate(self, record: dict[str, Any]) -> bool:
        """Add the losses on the evaluation data, and the loss of a unigram model, to `record`.

        Returns:
            Whether the evaluation was completed. All ranks return False if a stop is requested during the evaluation.
        """

        def should_stop() -> bool:
            stop, _, _ = self.stop_vote.ask()
            self.watchdog.renew(f"evaluating step {self.state.step}")
            return stop

        losses = held_out_losses(
            self.engine,
            self.precision,
            self.run.held_out,
            self.args.per_device_eval_batch_size or self.args.per_device_train_batch_size,
            should_stop,
        )
        if losses is not None:
            record |= losses | {"unigram_loss": self.run.unigram_loss}
        self._start_clock()
        return losses is not None

    def _save(self, is_last: bool) -> None:
        """Save a checkpoint. With save_async, all saves except the last one of this Trainer run in the background.

        Raises:
            SaveError: See `_finish_save`.
        """
        self.state.health = self.health.state_dict()
        self.state.sources = self.state.sources | self.run.train.drawn_at(self.state.consumed_samples)
        self.watchdog.renew(f"saving step {self.state.step}")
        self._finish_save()
        background = self.args.save_async and not is_last
        self.last_save = time.monotonic()
        self.saver.begin(self.state, background)
        if not background:
            self._finish_save(is_last)
        self.watchdog.renew(
            f"continuing after step {self.state.step}; the checkpoint is saved or still being written in the background"
        )
        self._start_clock()

    def _finish_save(self, is_last: bool = False) -> None:
        """Wait for the pending save, if there is one, and log its result.

        Collective: all ranks must call this method, except after an error.

        Args:
            is_last: Whether this is the last save.

        Raises:
            SaveError: The save failed, and on_save_failure is "stop" or this is the last save.
        """
        if not self.saver.pending:
            return
        self.watchdog.set_position("waiting for the background save")
        try:
            saved = self.saver.finish()
            assert saved is not None
            logger.info(
                f"saved {saved.path} in {saved.seconds:.1f} s (training waited {saved.waited_s:.1f} s)"
            )
        except SaveError as error:
            logger.warning(f"{error} (on_save_failure: {self.args.on_save_failure})")
            if is_last or self.args.on_save_failure == "stop":
                raise
        finally:  # all ranks agree on the result
            self.watchdog.renew("the save has ended")

    def _write_metrics(self, values: dict[str, Any]) -> None:
        self.metrics.log({"step": self.state.step, "tokens": self.state.consumed_tokens, **values})

    def _start_clock(self) -> None:
        """Restart the throughput measurement at the current step."""
        self.clock, self.clock_step = time.perf_counter(), self.state.step


def _is_due(number: int, every: int) -> bool:
    return bool(every) and number % every == 0


def _mean_over_ranks(value: torch.Tensor) -> float:
    """Return the mean of a scalar over all ranks.

    Collective: all ranks must call this function.

    All ranks have the same number of tokens, so this is also the mean over tokens.
    """
    value = value.clone()
    dist.all_reduce(value)
    return float(value / dist.get_world_size())


# ---------------------------------------------------------------- evaluation


@torch.no_grad()
def held_out_losses(
    engine: Any,
    precision: Precision,
    streams: Mapping[str, SampleStream],
    batch_size: int,
    should_stop: Callable[[], bool],
) -> dict[str, float] | None:
    """Return the mean loss of each held-out set in nats per token, keyed by loss name.

    The loss of a set with several sources is the mean over the tokens of all sources. For such a set, the mean
    over the tokens of each source is added as NAME/SOURCE.

    Collective: all ranks must call this function.

    FP8 scales and amax histories are restored after each set, so the evaluation affects neither the training nor the
    other sets.

    Args:
        streams: Held-out sets, keyed by loss name.
        batch_size: Number of samples per batch on each rank.
        should_stop: Function that is called after each batch and returns whether to cancel the evaluation. It must
            return the same value on every rank.

    Returns:
        The losses, or None if the evaluation was cancelled.
    """
    before, losses = snapshot_fp8_state(engine.module, precision), dict[str, float]()
    engine.eval()
    for name, stream in streams.items():
        totals = _sum_losses(engine, stream, batch_size, should_stop)
        for key, tensor in fp8_state(engine.module, precision).items():
            tensor.copy_(before[key])
        if totals is None:
            engine.train()
            return None
        means = {name: sum(totals.values())}
        if len(totals) > 1:
            means |= {f"{name}/{source}": total for source, total in totals.items()}
        losses |= {key: float(total[0] / total[1]) for key, total in means.items()}
    engine.train()
    return losses


def _sum_losses(
    engine: Any, stream: SampleStream, batch_size: int, should_stop: Callable[[], bool]
) -> dict[str, torch.Tensor] | None:
    """Return the sum of the losses and the number of tokens of each source, or None if the evaluation was cancelled."""
    totals, ranks = dict[str, torch.Tensor](), (dist.get_rank(), dist.get_world_size())
    for source, samples in stream.parts.items():
        total = totals[source] = torch.zeros(2, dtype=torch.float64, device=engine.device)
        for *_, batch in held_out_batches(stream, batch_size, *ranks, samples):
            tokens = int((batch.labels != NO_LABEL).sum())
            input_ids, labels, documents = batch.to(engine.device)
            loss = engine(input_ids, labels=labels, documents=documents).loss
            total += torch.stack([loss.double() * tokens, loss.new_tensor(tokens, dtype=torch.float64)])
            if should_stop():
                return None
        dist.all_reduce(total)
    return totals
