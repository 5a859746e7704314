"""Profile the steps of profile_steps: write a trace for Perfetto and a table of the longest kernels."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList
from torch.profiler import profile, schedule

logger = logging.getLogger(__name__)
KERNELS = 10  # rows of the table


def make_profiler(steps: list[int] | None, done: int, folder: Path) -> profile | None:
    """Return a profiler that writes to `folder` after the last step to profile, or earlier if training ends before it.

    Use the profiler as a context manager, and call its method `step` after each training step.

    Args:
        steps: The first and the last step to profile.
        done: Number of completed steps.

    Returns:
        The profiler, or None if `steps` is None, if all these steps are complete, or on ranks other than 0.
    """
    if steps is None or done >= steps[1] or dist.get_rank() != 0:
        return None
    first = max(steps[0], done + 1)
    before = first - 1 - done
    # the step before the first one warms up the profiler
    warmup = min(before, 1)
    return profile(
        schedule=schedule(wait=before - warmup, warmup=warmup, active=steps[1] - first + 1, repeat=1),
        on_trace_ready=functools.partial(_write, folder / f"steps-{first}-{steps[1]}"),
    )


def _write(path: Path, profiler: profile) -> None:
    """Write the trace to PATH.json.gz, and the table to PATH.txt. If this fails, log a warning.

    The table shows the kernels with the longest total time. Without a GPU, it shows operations of the CPU.
    """
    is_gpu = torch.cuda.is_available()
    device = DeviceType.CUDA if is_gpu else DeviceType.CPU
    time = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    try:
        kernels = [
            event
            for event in profiler.key_averages()
            if event.device_type == device and not event.is_user_annotation
        ]
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(f"{path}.json.gz")
        table = EventList(kernels).table(sort_by=time, row_limit=KERNELS, max_name_column_width=100)
        Path(f"{path}.txt").write_text(table)
        logger.info(
            f"profile_steps: wrote {path}.json.gz (open it at https://ui.perfetto.dev) and {path}.txt"
        )
    except Exception as error:  # a failed profile must not stop the training
        logger.warning(f"profile_steps: the profile could not be written: {error}")
