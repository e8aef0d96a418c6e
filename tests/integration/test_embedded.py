"""The embedded server, with real processes that are killed, and clusters that are damaged."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from planroom import embedded
from planroom.errors import DatabaseUnusable
from support.folder import reachable_folder

START = (
    "import sys; from pathlib import Path; from planroom import embedded\n"
    "print(embedded.start(Path(sys.argv[1])), flush=True)\n"
)
AND_WAIT = START + "sys.stdin.read()\n"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another user")


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A home with a cluster in it that was shut down; what writes less carefully is faster."""
    folder = reachable_folder()
    embedded.start(folder)
    embedded.stop(folder)
    with (folder / "postgres" / "data" / "postgresql.conf").open("a") as settings:
        settings.write("fsync = off\n")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def home(made: Path) -> Iterator[Path]:
    """A home with a cluster of its own, not running; what runs is stopped at the end."""
    folder = reachable_folder()
    subprocess.run(["cp", "-a", made / "postgres", folder], check=True)
    yield folder
    embedded.stop(folder)
    shutil.rmtree(folder)


@pytest.fixture
def empty_home() -> Iterator[Path]:
    """A home with nothing in it; what runs is stopped at the end."""
    folder = reachable_folder()
    yield folder
    embedded.stop(folder)
    shutil.rmtree(folder)


def ask(url: str, question: str = "select 1") -> object:
    with psycopg.connect(url, autocommit=True) as conn:
        row = conn.execute(question.encode()).fetchone()
        return row[0] if row else None


def keep_seven(url: str) -> None:
    with psycopg.connect(url) as conn:
        conn.execute("create table kept as select 7 as n")


def pid_of(home: Path) -> int:
    pid = embedded.status(home).pid
    assert pid is not None
    return pid


def kill_server(home: Path) -> None:
    os.kill(pid_of(home), signal.SIGKILL)
    wait_until(lambda: not embedded.status(home).running)


def wait_until(condition: Callable[[], bool]) -> None:
    """Look again and again; half a minute is for ever."""
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it never happened")


def test_it_starts_by_itself_with_a_database_and_the_extension(empty_home: Path) -> None:
    assert not embedded.status(empty_home).running

    url = embedded.start(empty_home)

    assert ask(url, "select extname from pg_extension where extname = 'vector'") == "vector"
    assert ask(url, "select current_database()") == "planroom"
    assert embedded.status(empty_home) == embedded.ServerStatus(
        running=True,
        pid=pid_of(empty_home),
        url=url,
        version="18",
        data=empty_home / "postgres" / "data",
        log=empty_home / "postgres" / "log",
    )


def test_its_settings_are_those_of_the_design(empty_home: Path) -> None:
    url = embedded.start(empty_home)

    with psycopg.connect(url, autocommit=True) as conn:
        shown = {name: conn.execute(f"show {name}".encode()).fetchone() for name in SETTINGS}
    assert shown == {name: (value,) for name, value in SETTINGS.items()}
    assert (
        ask(url, "select lower('É') || (select min(x) from (values ('b'), ('É'), ('Z')) v(x))")
        == "éZ"
    )


SETTINGS = {
    "listen_addresses": "",
    "fsync": "on",
    "data_checksums": "on",
    "timezone": "UTC",
    "server_encoding": "UTF8",
    "max_connections": "100",
    "shared_buffers": "128MB",
    "log_rotation_age": "1d",
    "log_truncate_on_rotation": "on",
}


def test_the_next_command_finds_it_and_its_data(home: Path) -> None:
    keep_seven(embedded.start(home))
    pid = pid_of(home)

    for _ in range(2):
        url = subprocess.check_output([sys.executable, "-c", START, home], text=True).strip()
        assert ask(url, "select n from kept") == 7
    assert pid_of(home) == pid

    assert embedded.stop(home)
    assert not embedded.stop(home)
    assert not embedded.status(home).running
    assert ask(embedded.start(home), "select n from kept") == 7


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_it_outlives_the_command_that_started_it(home: Path, sent: signal.Signals) -> None:
    """SIGKILL of the command, and Ctrl-C, which a terminal sends to the whole group."""
    with subprocess.Popen(
        [sys.executable, "-c", AND_WAIT, home],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as command:
        assert command.stdout is not None
        url = command.stdout.readline().strip()
        pid = pid_of(home)
        os.killpg(command.pid, sent)
        command.wait(timeout=30)

    assert ask(url) == 1
    assert os.getsid(pid) not in {command.pid, os.getsid(0)}
    assert pid_of(home) == pid


def test_it_inherits_no_open_file(home: Path) -> None:
    with (home / "open").open("w") as stream:
        os.set_inheritable(stream.fileno(), True)
        embedded.start(home)

    folder = Path(f"/proc/{pid_of(home)}/fd")
    held = {str(link.readlink()) for link in folder.iterdir()}
    assert not {name for name in held if name.endswith(("/open", "postgres.lock"))}


def test_ten_commands_at_once_share_one_server(empty_home: Path) -> None:
    command = [
        sys.executable,
        "-c",
        START + "print(embedded.status(Path(sys.argv[1])).pid)",
        empty_home,
    ]

    with ThreadPoolExecutor(10) as pool:
        started = [pool.submit(subprocess.check_output, command) for _ in range(10)]

    assert len({future.result() for future in started}) == 1


def test_a_server_that_was_killed_is_started_again(home: Path) -> None:
    keep_seven(embedded.start(home))
    kill_server(home)

    assert ask(embedded.start(home), "select n from kept") == 7


def test_a_server_whose_child_still_works_is_waited_for(home: Path) -> None:
    """A killed server's busy child holds the data a moment longer; a second one must not start."""
    url = embedded.start(home)
    with psycopg.connect(url, autocommit=True) as conn, ThreadPoolExecutor(1) as pool:
        busy = pool.submit(conn.execute, b"select count(*) from generate_series(1, 30000000)")
        wait_until(
            lambda: (
                ask(
                    url,
                    "select count(*) from pg_stat_activity where query like "
                    "'select count(*) from gen%' and state = 'active'",
                )
                == 1
            )
        )
        kill_server(home)

        assert ask(embedded.start(home)) == 1
        busy.exception(timeout=60)


@pytest.mark.parametrize("content", ["", "1\n", "{own}\n{data}\n", "nonsense\n"])
def test_a_pid_file_left_by_a_crash_is_no_obstacle(home: Path, content: str) -> None:
    """Empty, or naming a process that is somebody else's now, of the server's own user too."""
    embedded.start(home)
    data = embedded.status(home).data
    owner = data.stat()
    embedded.stop(home)
    identity = {"user": owner.st_uid, "group": owner.st_gid} if os.geteuid() == 0 else {}
    with subprocess.Popen(["sleep", "600"], **identity) as stranger:  # pyright: ignore[reportCallIssue, reportArgumentType]
        try:
            for file in (data / "postmaster.pid", home / "postgres/run/.s.PGSQL.5432.lock"):
                file.write_text(content.format(own=stranger.pid, data=data))
                os.chown(file, owner.st_uid, owner.st_gid)

            assert not embedded.status(home).running
            assert not embedded.stop(home)
            assert ask(embedded.start(home)) == 1
        finally:
            stranger.kill()


def test_a_kill_within_initdb_leaves_nothing_to_trip_over(empty_home: Path) -> None:
    making = empty_home / "postgres"
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", START, empty_home],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        ) as command:
            wait_until(lambda: any(making.glob("data.new.*/base/1")) or command.poll() is not None)
            command.kill()
        assert not (making / "data").exists()

    assert ask(embedded.start(empty_home)) == 1
    assert [path.name for path in making.glob("data*")] == ["data"]


def test_a_deep_home_with_a_blank_gets_a_short_socket(home: Path) -> None:
    deep = home / ("d" * 120) / "with a blank, and 'quotes'"
    deep.mkdir(parents=True)

    url = embedded.start(deep)
    try:
        assert ask(url) == 1
        folder = Path(str(conninfo_to_dict(url)["host"]))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        kill_server(deep)
        assert embedded.start(deep) == url, "whoever knows the URL can reconnect"
        assert ask(url) == 1
    finally:
        embedded.stop(deep)
    assert not folder.exists()


def test_everything_is_private(home: Path) -> None:
    embedded.start(home)

    for path in (home / "postgres", *(home / "postgres").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert stat.S_IMODE((home / "postgres.lock").stat().st_mode) == 0o600


def test_a_cluster_of_another_version_is_refused(home: Path) -> None:
    embedded.start(home)
    embedded.stop(home)
    version = home / "postgres" / "data" / "PG_VERSION"
    version.write_text("15\n")

    with pytest.raises(DatabaseUnusable, match="is of Postgres 15; this planroom") as caught:
        embedded.start(home)

    assert caught.value.code == "database_version"
    version.write_text("18\n")


def test_the_other_version_in_the_wheel_can_be_started(empty_home: Path) -> None:
    url = embedded.start(empty_home, major=16)

    assert str(ask(url, "show server_version")).startswith("16.")
    with pytest.raises(DatabaseUnusable, match="is of Postgres 16"):
        embedded.start(empty_home)


def test_a_server_that_cannot_start_shows_the_end_of_its_log(home: Path) -> None:
    embedded.start(home)
    embedded.stop(home)
    settings = home / "postgres" / "data" / "postgresql.conf"
    with settings.open("a") as stream:
        stream.write("shared_buffers = nonsense\n")

    with pytest.raises(DatabaseUnusable, match="did not start") as caught:
        embedded.start(home)

    assert 'invalid value for parameter "shared_buffers"' in str(caught.value.hint)
    assert str(home / "postgres" / "log") in str(caught.value.hint)


def test_a_home_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(DatabaseUnusable, match="cannot be used") as caught:
        embedded.start(tmp_path / "file" / "home")

    assert "PLANROOM_HOME" in str(caught.value.hint)


@as_root
def test_root_s_server_runs_as_a_system_user_who_owns_the_data(empty_home: Path) -> None:
    embedded.start(empty_home)

    user = pwd.getpwnam("planroom")
    assert Path(f"/proc/{pid_of(empty_home)}").stat().st_uid == user.pw_uid
    assert (empty_home / "postgres").stat().st_uid == user.pw_uid
    assert empty_home.stat().st_uid == 0


@as_root
def test_root_s_private_folders_stay_closed(home: Path) -> None:
    private = home / "private"
    private.mkdir(mode=0o700)

    with pytest.raises(
        DatabaseUnusable, match=r"user planroom, who cannot pass .*private"
    ) as caught:
        embedded.start(private / "home")

    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert "/var/lib/planroom" in str(caught.value.hint)


@as_root
def test_programs_in_root_s_private_folders_are_copied_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = embedded._installed_programs(18).parents[1]  # pyright: ignore[reportPrivateUsage]
    private = home / "private"
    private.mkdir(mode=0o700)
    for folder in (wheel, wheel.with_name(f"{wheel.name}.libs")):
        (private / folder.name).symlink_to(folder)
    programs = private / wheel.name / "pginstall18" / "bin"

    def in_private(major: int) -> Path:
        return programs

    monkeypatch.setattr(embedded, "_installed_programs", in_private)

    assert ask(embedded.start(home)) == 1
    copies = home / "postgres-programs"
    copied = {path: path.stat().st_mtime_ns for path in copies.rglob("*")}
    assert len(list(copies.iterdir())) == 1
    embedded.stop(home)
    embedded.start(home)

    assert {path: path.stat().st_mtime_ns for path in copies.rglob("*")} == copied


AS_NOBODY = """
import os, sys, psycopg
os.setgroups([]), os.setgid(65534), os.setuid(65534)
try:
    psycopg.connect(sys.argv[1])
except psycopg.OperationalError as error:
    print("refused:", error)
"""


@as_root
@pytest.mark.parametrize("opened", [False, True])
def test_nobody_else_can_connect(home: Path, opened: bool) -> None:
    """Not through the closed folder, and, were it opened by mistake, not as somebody else."""
    url = embedded.start(home)
    if opened:
        for folder in (home, home / "postgres", home / "postgres" / "run"):
            folder.chmod(0o755)
        (home / "postgres" / "run" / ".s.PGSQL.5432").chmod(0o777)

    said = subprocess.check_output([sys.executable, "-c", AS_NOBODY, url], text=True)

    assert said.startswith("refused:")
    assert ("Peer authentication failed" if opened else "Permission denied") in said


AS_USER = """
import os, sys
from pathlib import Path
import psycopg
from planroom import embedded
os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
url = embedded.start(Path(sys.argv[1]))
with psycopg.connect(url) as conn:
    print(conn.execute("select current_user").fetchone()[0], os.geteuid())
"""


@as_root
def test_two_users_with_homes_of_their_own_do_not_meet(home: Path) -> None:
    """And root in a user's home runs the server as that user, and leaves it usable to them."""
    home.chmod(0o755)
    people = {"one": pwd.getpwnam("daemon").pw_uid, "two": pwd.getpwnam("games").pw_uid}
    for name, uid in people.items():
        (home / name).mkdir(mode=0o700)
        os.chown(home / name, uid, uid)
    embedded.start(home / "two")
    embedded.stop(home / "two")
    try:
        for name, uid in people.items():
            command = [sys.executable, "-c", AS_USER, str(home / name), str(uid)]
            assert subprocess.check_output(command, text=True) == f"planroom {uid}\n"
            assert Path(f"/proc/{pid_of(home / name)}").stat().st_uid == uid
            assert ask(embedded.start(home / name)) == 1, "root may connect too"
    finally:
        for name in people:
            embedded.stop(home / name)
