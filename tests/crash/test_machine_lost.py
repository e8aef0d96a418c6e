"""A machine whose packets all get lost, as when a cable is pulled: nobody's kernel is told.

The machine is a network namespace with a cable of its own, which only root may lay. Unlike behind
the tests' proxy, nothing that is sent is acknowledged, and whoever connects hangs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from support.embedding_server import EmbeddingServer
from support.fleet import (
    ALIVE_SECONDS,
    BATCH_UNITS,
    DIMENSIONS,
    Calm,
    Fleet,
    await_true,
    make_document,
)
from support.tcp_proxy import proxied

LEASE_SECONDS = 6.0
LATENCY_SECONDS = 0.1
NOBODY = "02:00:00:00:00:01"


class Machine:
    """A network namespace that reaches this machine at `address`, until its packets get lost."""

    def __init__(self) -> None:
        subnet = f"10.213.{os.getpid() // 64 % 256}"
        first = 4 * (os.getpid() % 64)
        self.address, self._its_address = f"{subnet}.{first + 1}", f"{subnet}.{first + 2}"
        self._name = f"planroom-{os.getpid()}"
        self._here, self._there = f"prh{os.getpid()}", f"prt{os.getpid()}"
        self.enter = ["ip", "netns", "exec", self._name]

    def lay_cable(self) -> None:
        """Make it; CalledProcessError where that is not allowed."""
        _ip("netns", "add", self._name)
        _ip("link", "add", self._here, "type", "veth", "peer", "name", self._there)
        _ip("link", "set", self._there, "netns", self._name)
        for at, device, address in (
            ([], self._here, self.address),
            (["-n", self._name], self._there, self._its_address),
        ):
            _ip(*at, "address", "add", f"{address}/30", "dev", device)
            _ip(*at, "link", "set", device, "up")

    def lose(self) -> None:
        """Send what either end sends to a card that is not there."""
        self._neighbours("replace", "lladdr", NOBODY, "nud", "permanent")

    def find(self) -> None:
        """Let both ends look for each other again."""
        self._neighbours("del")

    def _neighbours(self, verb: str, *how: str) -> None:
        _ip("neigh", verb, self._its_address, *how, "dev", self._here)
        _ip("-n", self._name, "neigh", verb, self.address, *how, "dev", self._there)

    def remove(self) -> None:
        """End it, and with it the cable."""
        subprocess.run(["ip", "link", "del", self._here], capture_output=True)
        subprocess.run(["ip", "netns", "del", self._name], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machine() -> Generator[Machine]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("a network namespace needs root, and the ip command")
    machine = Machine()
    try:
        machine.lay_cable()
    except subprocess.CalledProcessError as error:
        machine.remove()
        pytest.skip(f"no network namespace may be made: {error.stderr.decode().strip()}")
    try:
        yield machine
    finally:
        machine.remove()


@pytest.mark.slow
def test_q18_a_machine_whose_packets_get_lost_is_replaced_and_changes_nothing_when_it_is_back(
    machine: Machine, database_url: str, tmp_path: Path, calm_run: Callable[[Path], Calm]
) -> None:
    document = make_document(tmp_path / "set.pdf", pages=30, lines=25)
    calm = calm_run(document)
    with (
        proxied(database_url, machine.address) as proxy,
        EmbeddingServer(DIMENSIONS, host=machine.address) as server,
        Fleet(database_url, tmp_path, server, {"lease_seconds": LEASE_SECONDS}) as fleet,
    ):
        fleet.take_in(document)
        server.latency_seconds = LATENCY_SECONDS
        command = [sys.executable, "-m", "support.worker_process", "work", "--until-idle"]
        there = fleet.start([*machine.enter, *command], fleet.environment(database_url=proxy.url))
        await_true(lambda: fleet.processed_units() > 0, there.said(), ALIVE_SECONDS)
        machine.lose()
        here = fleet.worker()
        await_true(fleet.is_over, "nobody takes over", ALIVE_SECONDS)
        before = fleet.snapshot()
        await_true(lambda: ": lost" in there.said(), "it did not let go", ALIVE_SECONDS)
        assert there.is_alive
        machine.find()
        for process in (here, there):
            assert process.wait() == 0, process.said()

        fleet.check_invariants()
        assert fleet.snapshot() == before
        assert fleet.outcomes() == {"set.pdf": calm.outcome}
        assert server.embedded <= calm.embedded + BATCH_UNITS
