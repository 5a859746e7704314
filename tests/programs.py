"""Programs and ranks for tests, forked from one process that has imported everything: a start takes 0.1 s, not ten.

    from tests import programs
    done = programs.run([sys.executable, str(ROOT / "train/export.py"), *arguments], capture_output=True, text=True)

`run` and `Popen` are those of subprocess, with pids, signals, pipes and exit statuses that are real. What such a
program itself starts through subprocess (train/launch.py its ranks) is forked too; `python_at` makes a file that starts
programs so, for scripts. Commands that are forked are `[sys.executable, "-u"?, FILE.py, ...]`, the same with `-c CODE`
or `-m MODULE`; all others are started as ever, and so is everything where torch sees a GPU, which no fork can use, or
where there is no /proc. Whoever proves what a start imports, or what a real interpreter does, uses subprocess itself,
and the marker `interpreter` (tests/README.md).

This file is also the server: `python tests/programs.py SOCKET OWNER` imports, then forks what it is asked for until the
process OWNER or the file SOCKET is gone. All workers of a test run share one (`socket_path`); the first who needs it
starts it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import inspect
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
SOCKET = "TESTS_PROGRAMS_SOCKET"  # of the environment: "<path>:<pid of the owner>"
RealPopen = subprocess.Popen
SIGNATURE = inspect.signature(RealPopen._execute_child)  # type: ignore[attr-defined]

# What programs import, early or late. A module that is missing here is imported by each program for itself.
IMPORTS = """
    torch torch.distributed torch.utils.cpp_extension numpy deepspeed deepspeed.ops.op_builder.cpu deepspeed.comm.torch
    transformers transformers.models.mistral.modeling_mistral transformers.models.auto.modeling_auto safetensors.torch
    tokenizers pydantic matplotlib.pyplot datatrove.pipeline.tokens multiprocessing.managers concurrent.futures.process
    train.train train.export train.prepare_data train.train_tokenizer train.import_megatron train.inspect_data
    train.prepare.preparation train.prepare.tokenizer train.prepare.dedup
    train.inspect_checkpoint train.evaluate train.evaluation.evaluation train.evaluation.models model.te_reference
    tests.reliability.ranks
""".split()


# ---------------------------------------------------------------- in tests


class Popen(RealPopen):
    """subprocess.Popen, forked by the server if it is a program that can be."""

    connection: socket.socket | None = None

    def _execute_child(self, *values: Any) -> None:
        given = SIGNATURE.bind(self, *values).arguments
        if not can_fork() or _program(given) is None:
            return super()._execute_child(*values)  # type: ignore[misc]
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        streams = [own if fd == -1 else fd for own, fd in enumerate(streams)]
        request = {
            "args": [os.fspath(a) for a in given["args"]],
            "cwd": os.path.abspath(given["cwd"] or "."),
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "new_session": bool(given["start_new_session"]),
        }
        self.connection = _connect()
        content = json.dumps(request).encode()
        socket.send_fds(self.connection, [len(content).to_bytes(8, "big")], streams)
        self.connection.sendall(content)
        self.pid = int.from_bytes(_receive(self.connection, 8), "big")
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]

    def _internal_poll(self, *values: Any, **options: Any) -> int | None:
        if self.connection is None:
            return super()._internal_poll(*values, **options)  # type: ignore[misc]
        if self.returncode is None and self.connection.fileno() == -1:
            # nobody waited, and this object and its connection were garbage together: subprocess asks once more before
            # its next start, and the server has killed whom nobody asks for
            self.returncode = -signal.SIGKILL
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid == self.pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self.connection is None:
            return super()._try_wait(flags)  # type: ignore[misc]
        if flags & os.WNOHANG:
            with selectors.DefaultSelector() as selector:
                selector.register(self.connection, selectors.EVENT_READ)
                if not selector.select(0):
                    return 0, 0
        status = int.from_bytes(_receive(self.connection, 8), "big")
        self.connection.close()
        return self.pid, status


# subprocess.run, by this Popen
run = types.FunctionType(
    subprocess.run.__code__, vars(subprocess) | {"Popen": Popen}, "run", subprocess.run.__defaults__
)
run.__kwdefaults__ = subprocess.run.__kwdefaults__


def can_fork() -> bool:
    """Where there is no GPU, on Linux."""
    import torch

    return sys.platform == "linux" and not torch.cuda.is_available()


def python_at(path: Path, *before: str) -> None:
    """Make an executable that is Python to who starts it, forked if it can be; `before` comes before its arguments."""
    command = [sys.executable, *(["-S", __file__, "--as"] if can_fork() else []), *before]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/bash\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)


def stop() -> None:
    """End the server if there is one, and all that it started."""
    path = Path(os.environ[SOCKET].rsplit(":", 1)[0])
    if path.exists():
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            path.unlink()
            connection.shutdown(socket.SHUT_WR)  # a request that is none: the server looks for its socket
            # it has ended; reset: it saw that its socket is gone before it took this connection
            with contextlib.suppress(ConnectionResetError):
                connection.recv(1)


def _program(given: dict[str, Any]) -> list[str] | None:
    """The command line of a Python program without its interpreter; None if it is something else."""
    args = given["args"]
    if isinstance(args, str | bytes | os.PathLike) or given["shell"] or os.fspath(args[0]) != sys.executable:
        return None
    args = [os.fspath(a) for a in args[1:]]
    if args[:1] == ["-u"]:
        args = args[1:]
    return args if args and (args[0] in ("-c", "-m") or args[0].endswith(".py")) else None


def _connect() -> socket.socket:
    """To the server, started by the first who needs it; it answers when it has imported."""
    path, owner = os.environ[SOCKET].rsplit(":", 1)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            environment = {
                k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
            }
            with open(f"{path}.log", "w") as log:
                RealPopen(
                    [sys.executable, __file__, path, owner],
                    env=environment | {"OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            while not os.path.exists(path):
                time.sleep(0.01)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


def _receive(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        if not (part := connection.recv(count - len(content))):
            path = os.environ[SOCKET].rsplit(":", 1)[0]
            raise RuntimeError("the server of programs has ended: " + Path(f"{path}.log").read_text()[-3000:])
        content += part
    return content


def _stand_in(arguments: list[str]) -> NoReturn:
    """Be `python arguments...` in the eyes of who started this process: its fork gets the signals that come here."""
    global can_fork
    can_fork = lambda: True  # noqa: E731  (who made this executable knew)
    process = Popen([sys.executable, *arguments])

    def pass_on(number: int, _: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, pass_on)
    status = process.wait()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


# ---------------------------------------------------------------- in programs


class NestedPopen(RealPopen):
    """subprocess.Popen in a forked program: a fork of it, if it is a program that can be."""

    def _execute_child(self, *values: Any) -> None:
        given = SIGNATURE.bind(self, *values).arguments
        if _program(given) is None:
            return super()._execute_child(*values)  # type: ignore[misc]
        sys.stdout.flush(), sys.stderr.flush()
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        env = dict(os.environ if given["env"] is None else given["env"])
        self.pid = os.fork()
        if self.pid == 0:
            _become(
                given["args"],
                given["cwd"] or ".",
                env,
                streams,
                given["start_new_session"],
                given["preexec_fn"],
            )
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]


def _become(
    args: list[str],
    cwd: str,
    env: dict[str, str],
    streams: list[int],
    new_session: bool = False,
    before: Callable[[], None] | None = None,
) -> NoReturn:
    """In a fork: be what `python args...` is; streams: the descriptors to have as 0, 1, 2, where not -1."""
    status = 1
    try:
        for number in signal.valid_signals():  # as an exec does
            if callable(signal.getsignal(number)):
                signal.signal(
                    number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                )
        if new_session:
            os.setsid()
        for own, fd in enumerate(streams):
            if fd >= 0:
                os.dup2(fd, own)
        os.closerange(3, 256)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        if before is not None:
            before()
        status = _run(args)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(status)


def _run(args: list[str]) -> int:
    """The program in this process to its end; its exit status."""
    args = [os.fspath(a) for a in args[1:]]
    unbuffered = args[0] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    args = args[args[0] == "-u" :]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.stdout.reconfigure(write_through=unbuffered)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if args[0] == "-m":
        runs = f"import runpy; runpy.run_module({args[1]!r}, run_name='__main__', alter_sys=True)"
        args = ["-c", runs, *args[2:]]
    if args[0] == "-c":
        code, folder, sys.argv = compile(args[1], "<string>", "exec"), "", ["-c", *args[2:]]
    else:
        file = os.path.abspath(args[0])
        main.__file__, folder, sys.argv = file, os.path.dirname(file), args
        code = compile(Path(file).read_bytes(), file, "exec")
    more = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path[1:]]
    sys.path[:] = [folder, *more, *sys.path[1:]]
    status = 0
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        status = _status(end)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.stdout.flush(), sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status


def _status(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


# ---------------------------------------------------------------- the server


def serve(path: str, owner: int) -> None:
    """Fork what comes over the socket; tell its pid, and in the end its status as os.waitpid has it."""
    import psutil  # a stand-in of `python_at` starts without site-packages

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path + ".new")
    listening.listen(64)
    os.rename(path + ".new", path)
    sys.path[0] = str(ROOT)
    gc.disable()  # a quarter of the time of the imports
    subprocess.Popen = NestedPopen  # type: ignore[misc]
    for name in IMPORTS:
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()  # whoever needs it says so
    gc.collect()
    gc.freeze()
    gc.enable()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork may hang"
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    children: dict[
        int, tuple[int, socket.socket]
    ] = {}  # descriptor of the process -> its pid, who asked for it
    while os.path.exists(path) and psutil.pid_exists(owner):
        for key, _ in selector.select(1.0):
            if key.fileobj is listening:
                connection = listening.accept()[0]
                if not (pid := _fork(connection)):
                    continue
                children[ended := os.pidfd_open(pid)] = pid, connection
                selector.register(ended, selectors.EVENT_READ)
                selector.register(connection, selectors.EVENT_READ, pid)
            elif key.data:  # who asked for it is gone
                with contextlib.suppress(ProcessLookupError):
                    os.kill(key.data, signal.SIGKILL)
                selector.unregister(key.fileobj)
            else:
                pid, connection = children.pop(key.fd)
                status = os.waitpid(pid, 0)[1]
                selector.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(KeyError):
                    selector.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(status.to_bytes(8, "big"))
                connection.close()
    for pid, _ in children.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


LAST: list[socket.socket] = []  # closed by the end of this process


def _fork(connection: socket.socket) -> int:
    """The pid of what was asked for; 0 if `stop` asks."""
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    if not head:
        LAST.append(connection)
        return 0
    request = json.loads(_receive(connection, int.from_bytes(head, "big")))
    if (pid := os.fork()) == 0:
        _become(request["args"], request["cwd"], request["env"], streams, request["new_session"])
    for fd in streams:
        os.close(fd)
    connection.sendall(pid.to_bytes(8, "big"))
    return pid


if __name__ == "__main__":
    if sys.argv[1] == "--as":
        _stand_in(sys.argv[2:])
    serve(sys.argv[1], int(sys.argv[2]))
