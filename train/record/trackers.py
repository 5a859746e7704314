"""Send metrics to wandb and TensorBoard (report_to). Used only on rank 0.

A resumed run continues its run in the tracker. A new run in the same folder starts a new one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from model import install_command
from model.errors import UserError
from train.record.fp8_health import FP8_HEALTH, scalars
from train.record.history import is_number
from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)
FLUSH_S = 30  # maximum delay until TensorBoard sees a line


class TrackerError(UserError, ValueError):
    """A tracker in report_to cannot be used."""

    code = "tracker_not_installed"


def names(report_to: str | Sequence[str]) -> list[str]:
    """Return the names of the trackers in the key report_to."""
    asked = [report_to] if isinstance(report_to, str) else report_to
    return [name for name in dict.fromkeys(asked) if name != "none"]


def check_installed(report_to: str | Sequence[str]) -> None:
    """Check that the packages of the trackers are installed.

    Raises:
        TrackerError: A package cannot be imported.
    """
    for name in names(report_to):
        spec = importlib.util.find_spec(name)
        # without an origin it is only a folder of that name, such as the one wandb creates in the working directory
        if spec is None or spec.origin is None:
            raise TrackerError(
                f"report_to {json.dumps(name)} needs the package {name}, which is not installed. Install it with "
                f'{install_command(name)}, or set report_to to "none"',
                key="report_to",
            )


class Trackers:
    """All configured trackers. The first failure of a tracker is logged, and the run continues.

    Args:
        folder: The folder of the run.
        config: TrainingArguments.to_dict().
        start_step: Number of completed steps, 0 for a new run.
        goes_back: The trackers have lines of steps after start_step, which are no longer valid.
    """

    def __init__(self, folder: RunFolder, config: dict[str, Any], start_step: int, goes_back: bool = False):
        self._failed: set[str] = set()
        self._open: dict[str, Wandb | TensorBoard] = {}
        for name in names(config["report_to"]):
            with self._logs_failure(name):
                self._open[name] = TRACKERS[name](folder, config, start_step, goes_back)

    def log(self, metrics: dict[str, Any]) -> None:
        if FP8_HEALTH in metrics:
            others = {key: value for key, value in metrics.items() if key != FP8_HEALTH}
            metrics = others | scalars(metrics[FP8_HEALTH])
        self._call("log", metrics)

    def rewind(self, step: int) -> None:
        self._call("rewind", step)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        for name, tracker in self._open.items():
            with self._logs_failure(name):
                getattr(tracker, method)(*arguments)

    @contextlib.contextmanager
    def _logs_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                logger.warning(
                    f"{name}: {type(error).__name__}: {error}; the run continues, and metrics.jsonl has all lines"
                )


class Wandb:
    """The wandb tracker. Online with a key (WANDB_API_KEY or netrc), offline without one.

    wandb cannot delete lines. After a rollback, or if a resume starts before the last logged step, a new wandb run in
    the same group starts. So no wandb run has a step twice, and the newest has the valid steps. The ids are ID, ID-2,
    ID-3, ... in the group ID.
    """

    def __init__(self, folder: RunFolder, config: dict[str, Any], start_step: int, goes_back: bool):
        self.folder, self.config = folder, config
        run_id = read_wandb_id(folder) if start_step else ""
        if run_id and goes_back:
            run_id = following(run_id)
        self._open(run_id or secrets.token_hex(4))

    def _open(self, run_id: str) -> None:
        import wandb  # slow to import

        self.id = run_id
        self.folder.wandb_run_id.write_text(run_id + "\n", encoding="utf-8")
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline")
        group, _, number = run_id.partition("-")
        name = self.config["run_name"]
        self.run = wandb.init(
            project=self.config["wandb_project"],
            name=f"{name or group}-{number}" if number else name,
            id=run_id,
            group=group,
            resume="allow" if mode == "online" else None,
            dir=str(self.folder.path),
            config=self.config,
            mode=mode,
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        if mode == "offline":
            logger.info(f"wandb: no API key, logging offline; to upload, run: wandb sync {self.run.dir}/..")

    def log(self, metrics: dict[str, Any]) -> None:
        # no step= argument: wandb merges lines of the same step and drops lines that are not newer than its last step
        self.run.log(metrics)

    def rewind(self, step: int) -> None:
        self.run.finish()
        self._open(following(self.id))

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """The TensorBoard tracker. Writes to tensorboard/ of the run; `tensorboard --logdir output` shows all runs."""

    def __init__(self, folder: RunFolder, config: dict[str, Any], start_step: int, goes_back: bool):
        self.folder = str(folder.tensorboard)
        self._open(start_step)
        if start_step == 0:
            self.writer.add_text("configuration", f"```json\n{json.dumps(config, indent=1)}\n```", 0)

    def _open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        # TensorBoard hides later steps of older event files; a new run may write a step 0
        self.writer = SummaryWriter(self.folder, purge_step=step + 1 if step else 0, flush_secs=FLUSH_S)

    def log(self, metrics: dict[str, Any]) -> None:
        # for example fp8_alarms, an object with counts
        inner = {f"{k}/{name}": n for k, v in metrics.items() if isinstance(v, dict) for name, n in v.items()}
        for key, value in (metrics | inner).items():
            if key not in ("step", "time") and is_number(value):
                self.writer.add_scalar(key, value, metrics["step"])

    def rewind(self, step: int) -> None:
        self.writer.close()
        self._open(step)

    def close(self) -> None:
        self.writer.close()


TRACKERS: dict[str, type[Wandb] | type[TensorBoard]] = {"wandb": Wandb, "tensorboard": TensorBoard}


def following(run_id: str) -> str:
    """Return the id of the next wandb run in the group."""
    group, _, number = run_id.partition("-")
    return f"{group}-{int(number or 1) + 1}"


def read_wandb_id(folder: RunFolder) -> str:
    """Return the wandb run id stored in the folder, or ""."""
    try:
        return folder.wandb_run_id.read_text(encoding="utf-8").partition("\n")[0].strip()
    except OSError:
        return ""


def has_wandb_key() -> bool:
    from requests.utils import get_netrc_auth  # installed with wandb, which also reads netrc

    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(url))
