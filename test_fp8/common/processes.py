"""The processes that programs of test_fp8/ start: what they see of this one's environment, and of its GPUs; that they
end with what started them; and the requests to stop that come meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

# What a launcher set for this process is not for the ones that it starts.
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Starts(Protocol):
    """What has a process at times."""

    process: subprocess.Popen | None


@contextmanager
def none_left(every: Sequence[Starts]) -> Iterator[None]:
    """However the block ends, none of their processes is left."""
    try:
        yield
    finally:
        for one in every:
            if one.process:
                one.process.terminate()
                one.process.wait()


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """SIGTERM and SIGINT that come in the block, to be looked at: a handler that raised would be lost where it runs
    while a process is started."""
    found: list[int] = []
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, lambda which, _: found.append(which)))
        yield found


def own_environment(places: Sequence[int] | None = None) -> dict[str, str]:
    """This process's, without what describes a rank; with the GPUs alone that have these `places` among its own."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    if places is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        mine = visible.split(",") if visible else list(map(str, range(max(places, default=-1) + 1)))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine[place] for place in places)
    return environment
