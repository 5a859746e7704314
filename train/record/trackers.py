"""Where metrics go besides metrics.jsonl (report_to): wandb, TensorBoard. Only the main rank has any.

A resumed run goes on with its tracker's run; one that begins anew in the same folder begins a new one. What a tracker
raises is told once, and training goes on: metrics.jsonl has every line.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from model import install_command
from model.errors import UserError
from train.record.fp8_health import FP8_HEALTH, scalars
from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)
FLUSH_S = 30  # until TensorBoard sees a line


class TrackerError(UserError, ValueError):
    """A tracker that report_to asks for cannot be used."""

    code = "tracker_not_installed"


class Tracker(Protocol):
    """What one service does with a line of metrics. Whatever it raises is caught by `Trackers`."""

    def log(self, metrics: dict[str, Any]) -> None: ...

    def rewind(self, step: int) -> None:
        """The lines after `step` no longer count."""

    def close(self) -> None: ...


def names(report_to: str | Sequence[str]) -> list[str]:
    """The trackers that the key report_to asks for."""
    asked = [report_to] if isinstance(report_to, str) else report_to
    return [name for name in dict.fromkeys(asked) if name != "none"]


def check_installed(report_to: str | Sequence[str]) -> None:
    """Raises TrackerError: a package that report_to needs cannot be imported."""
    for name in names(report_to):
        spec = importlib.util.find_spec(name)
        # without an origin it is a mere folder of that name, such as wandb leaves in a working directory
        if spec is None or spec.origin is None:
            raise TrackerError(
                f"report_to {json.dumps(name)} needs the package {name}, which is not installed. Install it with "
                f'{install_command(name)}, or set report_to to "none"',
                key="report_to",
            )


class Trackers:
    """All that `config` (TrainingArguments.to_dict) asks for.

    Args:
        start_step: steps that are already done, 0 of a run that begins.
        goes_back: the trackers have lines of steps after start_step, which no longer count.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: dict[str, Any],
        start_step: int,
        goes_back: bool = False,
    ):
        self._failed: set[str] = set()
        self._open: dict[str, Tracker] = {}
        for name in names(config["report_to"]):
            tracker = self._try(name, partial(TRACKERS[name], folder, config, start_step, goes_back))
            if tracker is not None:
                self._open[name] = tracker

    def log(self, metrics: dict[str, Any]) -> None:
        if FP8_HEALTH in metrics:
            others = {key: value for key, value in metrics.items() if key != FP8_HEALTH}
            metrics = others | scalars(metrics[FP8_HEALTH])
        for name, tracker in self._open.items():
            self._try(name, partial(tracker.log, metrics))

    def rewind(self, step: int) -> None:
        for name, tracker in self._open.items():
            self._try(name, partial(tracker.rewind, step))

    def close(self) -> None:
        for name, tracker in self._open.items():
            self._try(name, tracker.close)

    def _try(self, name: str, call: Callable[[], Any]) -> Any:
        """What `call` returns, None if it fails; that is told once of each tracker."""
        try:
            return call()
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                logger.warning(
                    f"{name}: {type(error).__name__}: {error}; the run goes on, {name} may lack what "
                    "metrics.jsonl has"
                )


class Wandb:
    """Online with a key (WANDB_API_KEY or netrc), offline without one.

    wandb cannot take lines back. After a rollback, and when a resume starts before the last logged step, a new wandb
    run of the same group begins: none has a step twice, and the newest has what counts. Their ids are ID, ID-2, ID-3,
    ... of the group ID.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: dict[str, Any],
        start_step: int,
        goes_back: bool,
    ):
        self.folder, self.config = folder, config
        own, of = wandb_run_of(folder) if start_step else ("", "")
        if own and is_copied(folder, own, of):
            logger.info(
                f"wandb: {folder.path} is a copy of {of}, whose run is {own}: here a run of its own begins"
            )
            own = ""
        if own and goes_back:
            own = following(own)
        self._open(own or secrets.token_hex(4))

    def _open(self, own: str) -> None:
        import wandb  # slow to import

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline")
        group, _, number = own.partition("-")
        name = self.config["run_name"]
        self.id = own
        self.folder.wandb_run_id.write_text(f"{own}\n{self.folder.path.resolve()}\n", encoding="utf-8")
        self.run = wandb.init(
            project=self.config["wandb_project"],
            name=f"{name or group}-{number}" if number else name,
            id=own,
            group=group,
            resume="allow" if mode == "online" else None,
            dir=str(self.folder.path),
            config=self.config,
            mode=mode,
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        if mode == "offline":
            logger.info(
                f"wandb: no API key, so the run is recorded offline; later: wandb sync {self.run.dir}/.."
            )

    def log(self, metrics: dict[str, Any]) -> None:
        # no step= argument: wandb merges lines of one step, and drops what is not newer than its last step
        self.run.log(metrics)

    def rewind(self, step: int) -> None:
        self.run.finish()
        self._open(following(self.id))

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Event files in tensorboard/ of the run's folder: `tensorboard --logdir output` shows all runs there."""

    def __init__(
        self,
        folder: RunFolder,
        config: dict[str, Any],
        start_step: int,
        goes_back: bool,
    ):
        self.folder = str(folder.tensorboard)
        self._start(start_step)
        if start_step == 0:
            self.writer.add_text("configuration", f"```json\n{json.dumps(config, indent=1)}\n```", 0)

    def _start(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        # what older event files have of later steps is not shown; a new run may write a step 0 itself
        self.writer = SummaryWriter(self.folder, purge_step=step + 1 if step else 0, flush_secs=FLUSH_S)

    def log(self, metrics: dict[str, Any]) -> None:
        # fp8_alarms and its like have counts beside what they name
        inner = {f"{k}/{name}": n for k, v in metrics.items() if isinstance(v, dict) for name, n in v.items()}
        for key, value in (metrics | inner).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and key not in ("step", "time") and math.isfinite(value):
                self.writer.add_scalar(key, value, metrics["step"])

    def rewind(self, step: int) -> None:
        self.writer.close()
        self._start(step)

    def close(self) -> None:
        self.writer.close()


TRACKERS: dict[str, Callable[..., Tracker]] = {"wandb": Wandb, "tensorboard": TensorBoard}


def following(own: str) -> str:
    """Return the id of the wandb run that follows `own` in its group."""
    group, _, number = own.partition("-")
    return f"{group}-{int(number or 1) + 1}"


def wandb_run_of(folder: RunFolder) -> tuple[str, str]:
    """(id of the folder's run in wandb, what the folder was called then); "" of what is not known."""
    try:
        own, _, of = folder.wandb_run_id.read_text(encoding="utf-8").strip().partition("\n")
    except OSError:
        return "", ""
    return own, of


def is_copied(folder: RunFolder, own: str, of: str) -> bool:
    """Whether the folder `of` is still there, another one than `folder`, and has the run `own` too. One that was
    renamed or moved is not."""
    there = RunFolder(of or folder.path)
    return there.path.resolve() != folder.path.resolve() and wandb_run_of(there)[0] == own


def has_wandb_key() -> bool:
    from requests.utils import get_netrc_auth  # installed with wandb, which reads netrc as well

    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(url))
