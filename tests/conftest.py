"""Fixtures and helpers shared by all tests.

Modules that take seconds to import are imported inside functions. The pytest-xdist controller, which starts its workers
only after it has loaded this file, does not need them.
"""

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
    """Return a small two-layer model configuration whose sizes every FP8 recipe supports.

    The model is a Mistral, or a Llama with model_type="llama".
    """
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
    """Check that the `with` block raises an error of type `kind`.

    If `code` or `key` is given, the attribute of the error (model/errors.py) must have the same value.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error: Any = caught.value
    assert code in (None, error.code) and key in (None, error.key), (error.code, error.key, str(error))


def numbers(text: object) -> list[float]:
    """Return the numbers in a message. Digits that are part of a word are ignored."""
    return [
        float(number) for number in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]\d+)?(?![\w])", str(text))
    ]


@contextlib.contextmanager
def log_messages() -> Iterator[list[str]]:
    """Collect all messages of level INFO and above that are logged in the `with` block.

    Warnings start with "warning: ".
    """
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
    """Return the list of messages that the test has logged so far."""
    with log_messages() as messages:
        yield messages


@pytest.fixture(autouse=True)
def _nothing_of_other_tests() -> Iterator[None]:
    """Isolate each test from the models, attention backend and deterministic kernels of earlier tests.

    Tests use one thread, because sums depend on the number of threads.
    """
    import torch

    from model.fp8 import te_backend

    torch.set_num_threads(1)
    te_backend.release_models()
    if torch.cuda.is_available():
        te_backend.choose_attention_backend("auto")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch.compile run the traced graphs directly instead of generating code.

    The traced graphs are those of the forward and backward pass, decomposed into primitive operations. Generating code
    would take a minute per FP8 layer.
    """
    import torch

    compiled = torch.compile

    def compile(function: Any, *, fullgraph: bool, dynamic: bool, options: dict | None) -> Any:
        assert options is None or options == {"deterministic": True}  # options are those of code
        return compiled(function, fullgraph=fullgraph, dynamic=dynamic, backend="aot_eager_decomp_partition")

    monkeypatch.setattr(torch, "compile", compile)


@pytest.fixture(scope="session")
def only_process_group() -> Iterator[dict[str, str]]:
    """Create a process group with one rank, and yield the environment variables that describe it.

    All tests share this process group, because DeepSpeed keeps the first one. All runs share one gloo group, because
    the thread of each gloo group wakes up a hundred times per second.
    """
    import torch.distributed as dist

    from train.engine.process_group import init_distributed

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
    """Provide the process group, as if this process had been launched with it.

    The environment variables are removed after the test, because other tests start their own processes.
    """
    with pytest.MonkeyPatch.context() as patch:
        for key, value in only_process_group.items():
            patch.setenv(key, value)
        yield


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the child processes that the tested code starts with subprocess in this process (see tests/programs.py)."""
    monkeypatch.setattr(subprocess, "Popen", programs.Popen)


@pytest.hookimpl(trylast=True)  # without the deselected tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu or multi_gpu if the hardware is missing, and order the tests.

    The files with the longest tests run first, so that all workers finish at about the same time.
    """
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
    """Exclude all objects created by imports from garbage collection.

    DeepSpeed collects garbage six times per engine, and each collection would otherwise visit all these objects.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


# ---------------------------------------------------------------- the temporary folder of a test run


def pytest_configure(config: pytest.Config) -> None:
    """Create a temporary folder for all processes of this test run.

    The folder also contains the socket of the server in tests/programs.py.
    """
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
