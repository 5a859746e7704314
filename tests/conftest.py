"""Fixtures shared by all tests: small models, errors, the log, the process group, and a temporary folder.

What takes seconds to import is imported where it is used: the process that hands tests to workers, which start when it
has read this, needs none of it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import programs

if TYPE_CHECKING:
    import torch
    from transformers import MistralConfig


def small_config(**changes: object) -> MistralConfig:
    """A Mistral (or with model_type a Llama) of two layers whose sizes FP8 accepts with every recipe."""
    from model.config import make_config

    values = dict(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        sliding_window=None,
        # no default of Transformer Engine, transformers or the reference: a norm that is made without it shows
        rms_norm_eps=1e-4,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return make_config({**values, **changes})


def random_ids(config: MistralConfig, batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    import torch

    return torch.randint(config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def refused(
    kind: type[Exception], *, code: str | None = None, key: str | None = None
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Check that the block raises `kind` with this `code` and `key`, where they are given (model/errors.py)."""
    with pytest.raises(kind) as caught:
        yield caught
    error: Any = caught.value
    assert code in (None, error.code) and key in (None, error.key), (error.code, error.key, str(error))


def numbers(text: object) -> list[float]:
    """Return the numbers in a message, without those that are a part of a word."""
    return [
        float(number) for number in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]\d+)?(?![\w])", str(text))
    ]


@contextlib.contextmanager
def log_messages() -> Iterator[list[str]]:
    """Collect the messages of level info and above that the block logs, warnings with their prefix."""
    messages: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno == logging.WARNING else ""
        messages.append(prefix + record.getMessage())

    handler = logging.Handler(logging.INFO)
    handler.emit = emit  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("model", "train")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield messages
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
            logger.removeHandler(handler)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The messages that the test has logged so far."""
    with log_messages() as messages:
        yield messages


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_of_other_tests() -> Iterator[None]:
    """Neither their models, nor their attention backend, nor the deterministic kernels that a run turns on."""
    import torch

    from model.fp8 import te_backend

    te_backend.release_models()
    if torch.cuda.is_available():
        te_backend.choose_attention_backend("auto")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile does all that comes before it writes code, a minute for a layer in FP8, and runs what it has: the
    graphs of the forward and backward pass in the primitive operations that code would be written for."""
    import torch

    compiled = torch.compile

    def compile(function: Any, *, fullgraph: bool, dynamic: bool, options: dict | None) -> Any:
        assert options is None or options == {"deterministic": True}  # options are those of code
        return compiled(function, fullgraph=fullgraph, dynamic=dynamic, backend="aot_eager_decomp_partition")

    monkeypatch.setattr(torch, "compile", compile)


@pytest.fixture(scope="session")
def only_process_group() -> Iterator[dict[str, str]]:
    """A process group of one, and the environment that describes it. One for all tests: DeepSpeed keeps the first.

    All runs share one gloo group, because the thread of each wakes up a hundred times per second."""
    import torch.distributed as dist

    from train.engine.distributed import init_distributed

    before = dict(os.environ)
    init_distributed()
    described = {key: value for key, value in os.environ.items() if before.get(key) != value}
    os.environ.clear()
    os.environ.update(before)
    new_group, shared = dist.new_group, dist.new_group(backend="gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", lambda *args, **options: shared if options else new_group(*args))
        yield described
    dist.destroy_process_group()


@pytest.fixture
def process_group(only_process_group: dict[str, str]) -> Iterator[None]:
    """The process group, as if this process had been launched with it; other tests start processes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in only_process_group.items():
            patch.setenv(key, value)
        yield


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tested code starts through subprocess in this process is forked (tests.programs)."""
    monkeypatch.setattr(subprocess, "Popen", programs.Popen)


@pytest.hookimpl(trylast=True)  # without the deselected tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked gpu or multi_gpu skips where the hardware is missing, and says what is. The files with
    the most whole runs and programs come first, so that no worker ends long after the other."""
    import torch

    devices = torch.cuda.device_count()
    hopper = devices > 0 and torch.cuda.get_device_capability()[0] == 9
    for item, (marker, have, what) in itertools.product(
        items,
        [("gpu", hopper, "a Hopper GPU"), ("multi_gpu", hopper and devices > 1, "two Hopper GPUs")],
    ):
        if item.get_closest_marker(marker) and not have:
            item.add_marker(pytest.mark.skip(reason=f"needs {what}"))
    seconds: Counter[Path] = Counter()  # about what a test takes
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        longer = 15 * ("timeout" in marks) + 2 * bool(marks & {"process", "interpreter"})
        seconds[item.path] += longer + ("settings" in item.fixturenames)  # type: ignore[attr-defined]
    items.sort(key=lambda item: -seconds[item.path])


def pytest_collection_finish() -> None:
    """What the imports made stays: DeepSpeed collects garbage six times an engine, which would walk over all of it."""
    gc.collect()
    gc.freeze()
    gc.enable()


# ---------------------------------------------------------------- the temporary folder of a test run


def pytest_configure(config: pytest.Config) -> None:
    """A folder for the temporary files of this run and all that it starts; the server of programs listens there."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background; tests press Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        # what nohup does, but not for the programs that tests start
        signal.signal(signal.SIGHUP, lambda *_: None)
    worker = hasattr(config, "workerinput")
    if worker or not config.getoption("numprocesses", None):  # this process runs tests
        gc.disable()  # until they are collected: a quarter of the time of the imports
        config.pluginmanager.import_plugin("tests.fixtures")
    if worker:
        return
    os.environ.setdefault(
        "PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir()
    )  # where pytest keeps what failed tests left
    folder = tempfile.mkdtemp(prefix="tests-")
    (Path(folder) / "tmp").mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = f"{folder}/tmp"
    os.environ[programs.SOCKET] = f"{folder}/programs:{os.getpid()}"
    config.stash[RUN] = Path(folder)


RUN = pytest.StashKey[Path]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if RUN not in session.config.stash:
        return
    programs.stop()
    from train.files import remove_dead_buffers

    remove_dead_buffers()
    shutil.rmtree(session.config.stash[RUN], ignore_errors=True)
