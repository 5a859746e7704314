"""Ranks of several nodes meet, or say within the time who did not come and why; here they are threads."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import numbers, refused
from train import train
from train.engine.launchers import LauncherError
from train.engine.meeting import _listen, _reach_oneself, meet
from train.launch import free_port


def rank(number: int, port: int, ranks: int = 4, here: int = 2, **more: str) -> dict[str, str]:
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODES_TIMEOUT_S": "20",
    } | more


def all_meet(*environments: dict[str, str]) -> list[Exception | None]:
    """What each raised."""

    def one(environment: dict[str, str]) -> Exception | None:
        try:
            meet(environment)
        except (ValueError, OSError) as error:
            return error
        return None

    with ThreadPoolExecutor(len(environments)) as pool:
        return list(pool.map(one, environments))


def test_those_who_come_meet_in_any_order() -> None:
    port = free_port()
    assert all_meet(*(rank(number, port) for number in (3, 1, 2, 0))) == [None] * 4
    with socket.create_server(("", port)):  # free again, for torch
        pass


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_who_was_started_again_is_not_there_twice(order: tuple[int, int]) -> None:
    """Nodes that are started by hand: a mistake on one of them, while the others wait."""
    port = free_port()

    def stopped() -> None:
        told = {"rank": 1, "ranks": 3, "on its node": 1, "host": "b"}
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), 1) as connection:
                    connection.sendall(json.dumps(told).encode() + b"\n")
                    connection.settimeout(0.3)
                    if connection.recv(1):
                        return
            except TimeoutError:
                return
            except OSError:
                time.sleep(0.01)

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(all_meet, rank(0, port, 3, 1))
        stopped()
        first = pool.submit(all_meet, rank(order[0], port, 3, 1))
        time.sleep(0.2)
        assert all_meet(rank(order[1], port, 3, 1)) == [None] == first.result() == waiting.result()


def test_rank_0_finds_itself_among_hundreds_that_came_first() -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(port, 300))
        for number in range(300):
            other = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            other.sendall(json.dumps({"rank": number}).encode() + b"\n")
        _reach_oneself(("127.0.0.1", port), server, "token", "here")


def test_strangers_are_passed_over() -> None:
    port = free_port()

    def stranger() -> None:
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), 1) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    return
            except OSError:
                time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(stranger)
        both = ThreadPoolExecutor(2)
        first = both.submit(all_meet, rank(0, port, 2, 1))
        done.result()
        assert all_meet(rank(1, port, 2, 1)) == first.result() == [None]
        both.shutdown()


def test_ranks_that_do_not_come_are_named_to_all_others() -> None:
    port, hasty = free_port(), {"NODES_TIMEOUT_S": "1"}
    started = time.monotonic()
    errors = all_meet(*(rank(number, port, 6, **hasty) for number in (0, 1, 4)))
    assert time.monotonic() - started < 10
    for error in errors:
        assert isinstance(error, ConnectionError), "another start may help"
        assert numbers(error)[:5] == [6, 2, 3, 5, 1]  # ranks, those that did not come, seconds


@pytest.mark.parametrize(("number", "ranks", "here"), [(4, 8, 4), (3, 4, 1)])
def test_unequal_numbers_of_ranks_are_named_on_both_nodes(number: int, ranks: int, here: int) -> None:
    """Also where they are as many in all."""
    port = free_port()
    errors = all_meet(rank(0, port, 4, 2), rank(number, port, ranks, here))
    for error in errors:
        assert isinstance(error, LauncherError) and error.code == "ranks_differ"
        assert numbers(error)[:6] == [number, ranks, here, 0, 4, 2]


def test_two_nodes_of_one_number_are_named() -> None:
    port = free_port()
    hasty = {"NODES_TIMEOUT_S": "2"}
    errors = all_meet(rank(0, port, **hasty), rank(1, port, **hasty), rank(1, port, **hasty))
    assert (
        isinstance(errors[0], LauncherError)
        and errors[0].code == "ranks_differ"
        and numbers(errors[0])[0] == 1
    )


def test_a_port_in_use_and_a_master_addr_of_another_host_are_named_at_once() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (error,) = all_meet(rank(0, port))
    assert isinstance(error, LauncherError) and error.code == "port_in_use" and numbers(error) == [port]
    started = time.monotonic()
    (error,) = all_meet(rank(0, free_port(), MASTER_ADDR="no.such.host.invalid"))
    assert isinstance(error, LauncherError) and error.code == "master_addr_elsewhere"
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("address", ["127.0.0.1", "no.such.host.invalid"])
def test_a_rank_that_finds_nobody_says_where_it_looked(address: str) -> None:
    port = free_port()
    (error,) = all_meet(rank(2, port, MASTER_ADDR=address, NODES_TIMEOUT_S="0.5"))
    assert isinstance(error, ConnectionError) and f"MASTER_ADDR={address}, MASTER_PORT={port}" in str(error)


def test_what_answers_and_is_not_rank_0_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0\r\n")

        answered = pool.submit(answer)
        (error,) = all_meet(rank(2, server.getsockname()[1], NODES_TIMEOUT_S="0.05"))
        answered.result()
    assert isinstance(error, ConnectionError)


def test_nobody_waits_on_one_node_nor_where_an_agent_has_met() -> None:
    meet({})
    meet(rank(1, 1, ranks=2, here=2))
    meet(rank(1, 1, TORCHELASTIC_USE_AGENT_STORE="True"))
    with refused(LauncherError, key="NODES_TIMEOUT_S"):
        meet(rank(1, 1, NODES_TIMEOUT_S="soon"))


def test_a_run_meets_before_it_imports(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings))
    for key, value in rank(0, 1, 2, 1).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(train, "leave", lambda status: status)
    monkeypatch.setattr("train.engine.distributed.init_distributed", lambda: pytest.fail("it went on"))

    def nobody() -> None:
        raise ConnectionError("nobody came")

    monkeypatch.setattr(train, "meet", nobody)
    assert train.main([str(config)]) == train.CRASHED
