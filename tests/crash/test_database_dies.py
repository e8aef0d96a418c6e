"""The database goes away under a fleet at work, in every way it can, and comes back.

Nothing may be lost and nothing done twice beyond a batch a worker and outage; each worker goes on
in the same process, or lets its job go within a lease. The servers here are the tests' own.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from conftest import reachable_folder
from planroom import embedded
from planroom.migrate import migrate_database
from support.embedding_server import EmbeddingServer
from support.fleet import (
    ALIVE_SECONDS,
    BATCH_UNITS,
    PAGE_GROUP,
    SEED,
    Calm,
    Fleet,
    Process,
    await_true,
    make_document,
)
from support.tcp_proxy import Proxy, proxied

LEASE_SECONDS = 6.0
LATENCY_SECONDS = 0.1
TEAM = 2


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A document of about 400 units: long enough for an outage to fall into it."""
    return make_document(tmp_path_factory.mktemp("document") / "set.pdf", pages=30, lines=25)


@pytest.fixture
def home() -> Generator[Path]:
    """A place for a server of the test's own."""
    folder = reachable_folder()
    try:
        yield folder
    finally:
        embedded.stop(folder)
        shutil.rmtree(folder)


@pytest.fixture
def own_fleet(home: Path, tmp_path: Path, server: EmbeddingServer) -> Generator[Fleet]:
    """A fleet on a server of its own."""
    url = embedded.start(home)
    with psycopg.connect(url) as conn:
        migrate_database(conn)
    with Fleet(url, tmp_path, server) as fleet:
        yield fleet


def start_team(fleet: Fleet, document: Path, url: str | None = None) -> list[Process]:
    """Workers at work on the document, with so short a lease that an outage may outlast it."""
    fleet.take_in(document)
    fleet.server.latency_seconds = LATENCY_SECONDS
    team = [
        fleet.worker(lease_seconds=LEASE_SECONDS, database_url=url or fleet.database_url)
        for _ in range(TEAM)
    ]
    await_true(lambda: fleet.processed_units() > 0, "they never began", ALIVE_SECONDS)
    return team


def check(fleet: Fleet, team: list[Process], calm: Calm, outages: int) -> None:
    """All end by themselves, and what they made is what an undisturbed worker makes."""
    for process in team:
        assert process.wait() == 0, process.said()
    fleet.check_invariants()
    assert fleet.outcomes() == {"set.pdf": calm.outcome}
    assert fleet.server.embedded <= calm.embedded + outages * TEAM * BATCH_UNITS
    again = sum(fleet.pages_read().values()) - calm.pages
    assert again <= outages * TEAM * PAGE_GROUP


def crash_server(home: Path) -> None:
    """What `pg_ctl stop -m immediate` does: no checkpoint, recovery at the next start."""
    pid = embedded.status(home).pid
    assert pid is not None
    os.kill(pid, signal.SIGQUIT)
    await_true(lambda: not embedded.status(home).running, "the server did not die", ALIVE_SECONDS)


@pytest.mark.parametrize("times", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_q16_a_server_that_crashes_again_and_again_is_outlived(
    own_fleet: Fleet, home: Path, document: Path, calm_run: Callable[[Path], Calm], times: int
) -> None:
    print(f"\nseed {SEED}")
    rng = random.Random(SEED)
    calm = calm_run(document)
    team = start_team(own_fleet, document)
    crashes = 0
    for _ in range(times):
        if own_fleet.is_over():
            break
        threading.Event().wait(rng.uniform(0.0, 0.8))
        crash_server(home)
        crashes += 1
        embedded.start(home)
        before = own_fleet.processed_units()
        await_true(
            lambda b=before: own_fleet.is_over() or own_fleet.processed_units() > b,
            "nobody goes on",
            ALIVE_SECONDS,
        )
    check(own_fleet, team, calm, crashes)


@pytest.mark.slow
def test_q16_a_server_that_is_away_for_longer_than_a_lease_is_waited_for(
    own_fleet: Fleet, home: Path, document: Path, calm_run: Callable[[Path], Calm]
) -> None:
    calm = calm_run(document)
    team = start_team(own_fleet, document)
    crash_server(home)
    await_true(
        lambda: any(": lost" in process.said() for process in team),
        "the holder did not let go",
        LEASE_SECONDS + 10,
    )
    assert all(process.is_alive for process in team)
    embedded.start(home)
    check(own_fleet, team, calm, 1)


@pytest.mark.parametrize("times", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_backends_that_are_terminated_again_and_again_are_replaced(
    fleet: Fleet, document: Path, calm_run: Callable[[Path], Calm], times: int
) -> None:
    print(f"\nseed {SEED}")
    rng = random.Random(SEED)
    calm = calm_run(document)
    team = start_team(fleet, document)
    outages = 0
    while outages < times and not fleet.is_over():
        threading.Event().wait(rng.uniform(0.0, 0.5))
        fleet.terminate_backends()
        outages += 1
        fleet.check_invariants()
    check(fleet, team, calm, outages)


def reset(proxy: Proxy) -> None:
    """Both ends learn of it at once, and nobody gets through for a while."""
    proxy.cut()
    proxy.refuse()


def silence(proxy: Proxy) -> None:
    """Neither end learns of anything, and nobody gets through for a while."""
    proxy.freeze()
    proxy.refuse()


def deafness(proxy: Proxy) -> None:
    """What the workers ask gets lost, and new connections are as good as ever."""
    proxy.freeze(answering=False)


def muteness(proxy: Proxy) -> None:
    """What they ask is done, commits too, and the answers get lost."""
    proxy.freeze(asking=False)


@pytest.mark.slow
@pytest.mark.parametrize("break_it", [reset, silence])
def test_q18_a_network_that_breaks_costs_a_batch_a_worker_and_nothing_else(
    fleet: Fleet,
    document: Path,
    calm_run: Callable[[Path], Calm],
    break_it: Callable[[Proxy], None],
) -> None:
    """Two workers are cut off in the middle of it; another, beside the proxy, takes over.

    What the proxy swallows it also acknowledges, as a pooler that hangs does, so the kernel gives
    up none of these connections. At last they break, and whoever waited on them changes nothing.
    """
    calm = calm_run(document)
    with proxied(fleet.database_url) as proxy:
        team = start_team(fleet, document, proxy.url)
        break_it(proxy)
        team.append(fleet.worker(lease_seconds=LEASE_SECONDS))
        await_true(fleet.is_over, "nobody takes over", ALIVE_SECONDS)
        before = fleet.snapshot()
        proxy.cut()
        proxy.refuse()
        proxy.accept()
        check(fleet, team, calm, 1)
        assert fleet.snapshot() == before


@pytest.mark.slow
@pytest.mark.parametrize("break_it", [deafness, muteness])
def test_q18_a_job_whose_connection_is_alive_and_silent_is_given_up(
    fleet: Fleet,
    document: Path,
    calm_run: Callable[[Path], Calm],
    break_it: Callable[[Proxy], None],
) -> None:
    """As behind a balancer that has lost its server and keeps its clients."""
    calm = calm_run(document)
    with proxied(fleet.database_url) as proxy:
        team = start_team(fleet, document, proxy.url)
        break_it(proxy)
        team.append(fleet.worker(lease_seconds=LEASE_SECONDS))
        await_true(fleet.is_over, "nobody takes over", ALIVE_SECONDS)
        check(fleet, team, calm, 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A disk of 24 MB; only root may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Write to the disk until nothing fits; what to remove to have room again."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(b"\\0" * 65536)
        except OSError:
            return filler


@pytest.fixture
def fleet_on_small_disk(
    server_url: str,
    template: str,
    admin: psycopg.Connection,
    small_disk: Path,
    tmp_path: Path,
    server: EmbeddingServer,
) -> Generator[Fleet]:
    """A fleet whose database lies on the small disk, with the log of writes elsewhere."""
    row = admin.execute("show data_directory").fetchone()
    assert row is not None
    owner = Path(row[0])
    if not owner.exists():
        pytest.skip("the server is on another machine")
    folder = small_disk / "space"
    folder.mkdir()
    os.chown(folder, owner.stat().st_uid, owner.stat().st_gid)
    for parent in (small_disk, *small_disk.parents):
        if parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o011)
    name = f"small_{tmp_path.stat().st_ino}"
    names = {
        "name": sql.Identifier(name),
        "template": sql.Identifier(template),
        "at": sql.Literal(str(folder)),
    }
    space = "create tablespace {name} location {at}"
    database = "create database {name} template {template} tablespace {name}"
    admin.execute(sql.SQL(space).format(**names))
    admin.execute(sql.SQL(database).format(**names))
    try:
        with Fleet(make_conninfo(server_url, dbname=name), tmp_path, server) as fleet:
            yield fleet
    finally:
        admin.execute(sql.SQL("drop database {name} with (force)").format(**names))
        admin.execute(sql.SQL("drop tablespace {name}").format(**names))


@pytest.mark.slow
def test_a_full_disk_under_the_database_is_waited_out(
    fleet_on_small_disk: Fleet,
    small_disk: Path,
    document: Path,
    calm_run: Callable[[Path], Calm],
) -> None:
    fleet, calm = fleet_on_small_disk, calm_run(document)
    fleet.take_in(document)
    fleet.server.latency_seconds = LATENCY_SECONDS
    worker = fleet.worker()
    await_true(lambda: fleet.processed_units() > 0, "it never began", ALIVE_SECONDS)
    filler = fill(small_disk)
    await_true(
        lambda: fleet.waits_for("database_unavailable"), "it met no full disk", ALIVE_SECONDS
    )
    fleet.check_invariants()
    filler.unlink()
    fleet.hurry()
    assert worker.wait() == 0, worker.said()
    check(fleet, [worker], calm, 1)


@pytest.mark.slow
def test_a_full_disk_at_intake_is_refused_and_leaves_nothing(
    fleet: Fleet, small_disk: Path, document: Path
) -> None:
    home = small_disk / "home"
    home.mkdir()
    filler = fill(small_disk)
    refused = fleet.add(document, home=home)
    assert refused.wait() == 1
    assert "was not taken in: No space left on device" in refused.said()
    assert fleet.outcomes() == {}
    assert [p for p in home.rglob("*") if p.is_file() and p.stat().st_size] == []
    filler.unlink()
    fleet.take_in(document, home=home)
    fleet.finish(home=home)
    assert fleet.outcomes()["set.pdf"].status == "ready"
