"""Send metrics to wandb and TensorBoard (report_to), on rank 0 only.

After a resume or a rollback, the existing tracker run is continued. A new run in the same folder starts a new tracker
run.
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
FLUSH_S = 30  # maximum delay in seconds until metrics appear in TensorBoard


class TrackerError(UserError, ValueError):
    """An error raised if the package for a tracker in report_to is not installed."""

    code = "tracker_not_installed"


def names(report_to: str | Sequence[str]) -> list[str]:
    """Return the tracker names in `report_to`, the value of the configuration key, without duplicates and "none"."""
    asked = [report_to] if isinstance(report_to, str) else report_to
    return [name for name in dict.fromkeys(asked) if name != "none"]


def check_installed(report_to: str | Sequence[str]) -> None:
    """Check that the packages required by the trackers are installed.

    Raises:
        TrackerError: A package cannot be imported.
    """
    for name in names(report_to):
        spec = importlib.util.find_spec(name)
        # a module without an origin is only a folder, such as the folder wandb/ that wandb creates
        if spec is None or spec.origin is None:
            raise TrackerError(
                f"report_to {json.dumps(name)} needs the package {name}, which is not installed. Install it with "
                f'{install_command(name)}, or set report_to to "none"',
                key="report_to",
            )


class Trackers:
    """Group of all trackers in the configuration key report_to.

    If a tracker raises an error, a warning is logged, and the run continues without this tracker.

    Args:
        folder: The folder of the run.
        config: The configuration as returned by TrainingArguments.to_dict().
        start_step: Number of completed steps, 0 for a new run.
    """

    def __init__(self, folder: RunFolder, config: dict[str, Any], start_step: int):
        self._open: dict[str, Wandb | TensorBoard] = {}
        for name in names(config["report_to"]):
            with self._drops_on_error(name):
                self._open[name] = TRACKERS[name](folder, config, start_step)

    def log(self, metrics: dict[str, Any]) -> None:
        if FP8_HEALTH in metrics:
            others = {key: value for key, value in metrics.items() if key != FP8_HEALTH}
            metrics = others | scalars(metrics[FP8_HEALTH])
        self._call("log", metrics)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        for name, tracker in list(self._open.items()):
            with self._drops_on_error(name):
                getattr(tracker, method)(*arguments)

    @contextlib.contextmanager
    def _drops_on_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            logger.warning(
                f"{name} failed with {type(error).__name__}: {error}. The run continues without this tracker. "
                "metrics.jsonl still receives all metrics"
            )


class Wandb:
    """Tracker that logs to wandb.

    The tracker logs offline if WANDB_MODE is "offline", or if WANDB_MODE is not set and there is no API key in
    WANDB_API_KEY or netrc.

    wandb cannot delete metrics. After a rollback or a resume from an earlier step, the wandb run contains the repeated
    steps twice, and only the later values are valid.
    """

    def __init__(self, folder: RunFolder, config: dict[str, Any], start_step: int):
        import wandb  # slow to import
        from requests.utils import get_netrc_auth  # installed with wandb, which also reads netrc

        if start_step == 0 or not folder.wandb_run_id.exists():
            folder.wandb_run_id.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        has_key = os.environ.get("WANDB_API_KEY") or get_netrc_auth(url)
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
        self.run = wandb.init(
            project=config["wandb_project"],
            name=config["run_name"],
            id=folder.wandb_run_id.read_text(encoding="utf-8").strip(),
            resume="allow" if mode == "online" else None,
            dir=str(folder.path),
            config=config,
            mode=mode,
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        if mode == "offline":
            logger.info(
                "wandb logs offline, because WANDB_MODE is offline or there is no API key. To upload the metrics, run: "
                f"wandb sync {self.run.dir}/.."
            )

    def log(self, metrics: dict[str, Any]) -> None:
        # no step= argument, because wandb merges calls with the same step and drops calls with earlier steps
        self.run.log(metrics)

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Tracker that logs to TensorBoard, in the run's tensorboard/ folder.

    `tensorboard --logdir output` shows all runs in the folder output.
    """

    def __init__(self, folder: RunFolder, config: dict[str, Any], start_step: int):
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        # TensorBoard hides steps from purge_step on in older event files. A new run may write step 0.
        purge_step = start_step + 1 if start_step else 0
        self.writer = SummaryWriter(str(folder.tensorboard), purge_step=purge_step, flush_secs=FLUSH_S)
        if start_step == 0:
            self.writer.add_text("configuration", f"```json\n{json.dumps(config, indent=1)}\n```", 0)

    def log(self, metrics: dict[str, Any]) -> None:
        # for example fp8_alarms, a dictionary with counts
        inner = {f"{k}/{name}": n for k, v in metrics.items() if isinstance(v, dict) for name, n in v.items()}
        for key, value in (metrics | inner).items():
            if key not in ("step", "time") and is_number(value):
                self.writer.add_scalar(key, value, metrics["step"])

    def close(self) -> None:
        self.writer.close()


TRACKERS: dict[str, type[Wandb] | type[TensorBoard]] = {"wandb": Wandb, "tensorboard": TensorBoard}
