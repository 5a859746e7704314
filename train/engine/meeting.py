"""Do all ranks of several nodes find each other? Asked before anything slow is imported, so that within a minute it is
said which do not, and why. torch's own meeting waits half an hour, and then names a socket.

Rank 0 listens at MASTER_PORT; each other rank says there who it is, and waits for the word that all have come. Needs no
torch. torchrun and accelerate, whose agents meet by themselves, are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from train.engine import launchers
from train.engine.launchers import LauncherError

TIMEOUT_S = 50.0  # with the start of Python, and on a slow file system, within a minute
SETTING = "NODES_TIMEOUT_S"
RETRY_S, ANSWER_S = 0.1, 5.0
STRANGER = "something answers there that is not rank 0 of this run"
LATE = (
    f"All nodes have to be started within that time; {SETTING}=600 gives more, to those who start them by hand. Else "
    "look whether its host is up, and whether it reaches"
)


def meet(environment: Mapping[str, str] = os.environ) -> None:
    """Return when all ranks have come; at once on one node. `environment`: as `launchers.adopt` left it.

    Raises LauncherError, on all ranks that were reached: nodes have unequal numbers of ranks, two are the same rank,
    MASTER_PORT is in use, MASTER_ADDR is another host. ConnectionError: ranks, or rank 0, did not come in time."""
    if not launchers.several_nodes(environment) or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    try:
        timeout_s = float(environment.get(SETTING) or TIMEOUT_S)
    except ValueError as error:
        raise LauncherError(
            f"{SETTING}={environment[SETTING]}: a number of seconds is expected",
            code="nodes_timeout",
            key=SETTING,
        ) from error
    at = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    me = {
        "rank": launchers.rank(environment),
        "ranks": launchers.world_size(environment),
        "on its node": launchers.local_world_size(environment),
        "host": socket.gethostname(),
    }
    if me["rank"]:
        _come(at, me, time.monotonic() + timeout_s, timeout_s)
    else:
        _receive(at, me, time.monotonic() + timeout_s, timeout_s)


# ---------------------------------------------------------------- rank 0


def _receive(at: tuple[str, int], me: dict[str, Any], deadline: float, timeout_s: float) -> None:
    came: dict[int, tuple[dict[str, Any], socket.socket]] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(at[1], me["ranks"]))
        token = secrets.token_hex()
        _reach_oneself(at, server, token, me["host"])
        problem, late = "", False
        while not problem:
            if len(came) == me["ranks"] - 1:
                # a node that was stopped meanwhile is going to be started again
                came = {rank: those for rank, those in came.items() if not _is_gone(those[1])}
                if len(came) == me["ranks"] - 1:
                    break
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, me["ranks"])) - set(came))
                problem, late = (
                    (
                        f"of {me['ranks']} ranks {_numbers(missing)} did not come within {timeout_s:g} s; rank 0 "
                        f"waits on {me['host']}, at {at[0]}:{at[1]}. {LATE} {at[0]}:{at[1]}"
                    ),
                    True,
                )
                break
            stack.callback(connection.close)
            its = _heard(connection)
            if its is not None and "rank" in its:
                if its["rank"] in came and _is_gone(came[its["rank"]][1]):
                    del came[its["rank"]]
                problem = _differs(its, me, came)
                came.setdefault(its["rank"], (its, connection))
        for _, connection in came.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps({"problem": problem, "late": late}).encode() + b"\n")
    _raise(problem, late)


def _listen(port: int, ranks: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            backlog=ranks,
            dualstack_ipv6=both,
        )
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise LauncherError(
            f"MASTER_PORT={port} is in use on this host by another process; give another port, the same to every rank",
            code="port_in_use",
            key="MASTER_PORT",
        ) from error


def _reach_oneself(at: tuple[str, int], server: socket.socket, token: str, host: str) -> None:
    """Raises LauncherError: MASTER_ADDR is not where rank 0 is."""
    try:
        with socket.create_connection(at, ANSWER_S) as own:
            own.sendall(json.dumps({"token": token}).encode() + b"\n")
            end = time.monotonic() + ANSWER_S
            while (left := end - time.monotonic()) > 0:  # others may have come first: they try again
                server.settimeout(left)
                connection, _ = server.accept()
                with connection:
                    if (_heard(connection) or {}).get("token") == token:
                        return
        why = "nothing came back"
    except OSError as error:
        why = str(error)
    raise LauncherError(
        f"MASTER_ADDR={at[0]} is not this host, {host}, on which rank 0 is ({why}); set it to a name or an address of "
        f"{host} that all nodes reach, or start rank 0 on {at[0]}",
        code="master_addr_elsewhere",
        key="MASTER_ADDR",
    )


def _heard(connection: socket.socket) -> dict[str, Any] | None:
    """What somebody says of himself; None of a stranger."""
    connection.settimeout(ANSWER_S)
    try:
        with connection.makefile("rb") as file:
            said = json.loads(file.readline(10_000))
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) and ("token" in said or isinstance(said.get("rank"), int)) else None


def _is_gone(connection: socket.socket) -> bool:
    """Whether who waits there for the word has ended."""
    connection.settimeout(0)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(ANSWER_S)


def _differs(its: dict[str, Any], me: dict[str, Any], came: dict[int, Any]) -> str:
    """Why a rank that came cannot be one of this run's; "" if it can."""
    for what in ("ranks", "on its node"):
        if its.get(what) != me[what]:
            return (
                f"rank {its['rank']} on {its.get('host')} was started as one of {its.get('ranks')} ranks, "
                f"{its.get('on its node')} on its node, and rank 0 on {me['host']} as one of {me['ranks']}, "
                f"{me['on its node']} on its node; start as many on each node (NPROC, --nproc, slots, "
                "--ntasks-per-node), and with the same number of nodes"
            )
    if its["rank"] in came or its["rank"] == 0:
        other = came[its["rank"]][0]["host"] if its["rank"] in came else me["host"]
        return (
            f"rank {its['rank']} is there twice, on {other} and on {its.get('host')}; each node needs a NODE_RANK of "
            "its own, and each run a MASTER_PORT"
        )
    return ""


# ---------------------------------------------------------------- the others


def _come(at: tuple[str, int], me: dict[str, Any], deadline: float, timeout_s: float) -> None:
    why = ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(
                at, min(ANSWER_S, max(0.1, deadline - time.monotonic()))
            ) as connection:
                connection.sendall(json.dumps(me).encode() + b"\n")
                # rank 0 may have begun to wait later
                connection.settimeout(timeout_s + ANSWER_S)
                with connection.makefile("rb") as file:
                    answer = json.loads(file.readline() or b"null")
        except OSError as error:
            why = str(error)
        except ValueError:  # no JSON
            why = STRANGER
        else:
            if isinstance(answer, dict) and "problem" in answer:
                return _raise(answer["problem"], answer["late"])
            why = STRANGER
        time.sleep(RETRY_S)
    raise ConnectionError(
        f"rank {me['rank']} on {me['host']} did not find rank 0 within {timeout_s:g} s at MASTER_ADDR={at[0]}, "
        f"MASTER_PORT={at[1]}: {why}. Is that the host of rank 0, and the port the same on all nodes? {LATE} it "
        f"(getent hosts {at[0]}; a firewall)"
    )


def _raise(problem: str, late: bool) -> None:
    if problem:
        raise ConnectionError(problem) if late else LauncherError(problem, code="ranks_differ", key="RANK")


def _numbers(ranks: list[int]) -> str:
    """[1, 2, 3, 7] -> "1 to 3, 7"."""
    groups: list[list[int]] = []
    for rank in ranks:
        if groups and rank == groups[-1][-1] + 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]} to {g[-1]}" for g in groups)
