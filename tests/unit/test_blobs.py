"""The blob store: what is refused at the door, what is kept, and what a kill leaves behind."""

from __future__ import annotations

import hashlib
import io
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from planroom.blobs import BlobStore, InputTooLarge
from planroom.errors import DocumentFailed, InputRefused

PDF = b"%PDF-1.7\n" + bytes(range(256)) * 20
CAP = 10_000_000


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "home" / "blobs")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "A-101.pdf"
    path.write_bytes(PDF)
    return path


def everything_in(store: BlobStore) -> list[Path]:
    return sorted(p for p in store.root.rglob("*") if p.is_file() and p.name != "lock")


def refusal(call: Callable[[], object]) -> InputRefused:
    with pytest.raises(InputRefused) as caught:
        call()
    return caught.value


def test_a_file_is_kept_under_the_hash_of_its_content(store: BlobStore, source: Path) -> None:
    blob = store.put(source, bytes_max=CAP)

    assert blob.sha256 == hashlib.sha256(PDF).digest()
    assert blob.size == len(PDF)
    assert store.find(blob.sha256).read_bytes() == PDF
    name = blob.sha256.hex()
    assert everything_in(store) == [store.root / name[:2] / name[2:4] / name]


def test_the_same_content_is_kept_once(store: BlobStore, source: Path, tmp_path: Path) -> None:
    other = tmp_path / "copy.pdf"
    other.write_bytes(PDF)
    first = store.put(source, bytes_max=CAP)
    inode = store.path(first.sha256).stat().st_ino

    assert store.put(other, bytes_max=CAP) == first
    assert store.path(first.sha256).stat().st_ino == inode
    assert len(everything_in(store)) == 1


def test_a_blob_of_the_wrong_size_is_replaced(store: BlobStore, source: Path) -> None:
    blob = store.put(source, bytes_max=CAP)
    store.path(blob.sha256).write_bytes(PDF[:100])

    store.put(source, bytes_max=CAP)

    assert store.verify(blob.sha256)


def test_blobs_are_private(store: BlobStore, source: Path) -> None:
    blob = store.put(source, bytes_max=CAP)

    path = store.path(blob.sha256)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (path.parent, path.parents[1], store.root, store.root / "tmp"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_link_to_a_file_is_followed(store: BlobStore, source: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.pdf"
    link.symlink_to(source)

    assert store.put(link, bytes_max=CAP).size == len(PDF)


def test_junk_before_the_mark_is_tolerated(store: BlobStore, source: Path) -> None:
    source.write_bytes(b"\r\n" * 500 + PDF)

    assert store.put(source, bytes_max=CAP).size == 1000 + len(PDF)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<!DOCTYPE html><html><body>%PDF</body>", "a web page (HTML)"),
        (b"  \n<html>", "a web page (HTML)"),
        (b"\xef\xbb\xbf<HTML>", "a web page (HTML)"),
        (b"PK\x03\x04rest", "a ZIP archive or an Office document"),
        (b"\x89PNG\r\n\x1a\n", "an image (PNG)"),
        (b"\xff\xd8\xff\xe0", "an image (JPEG)"),
        (b"AC1032\x00\x00", "a drawing (DWG)"),
        (b"Notes for the f\xc3\xbcnfth floor", "plain text"),
        (b"x" * 1023 + "é".encode(), "plain text"),
        (b"\0" * 4000, "nothing but zeros"),
        (b"\x93\x00\x81\xfe\xff", "something else"),
    ],
)
def test_what_is_no_pdf_is_refused_by_what_it_looks_like(
    store: BlobStore, source: Path, content: bytes, said: str
) -> None:
    source.write_bytes(content)

    error = refusal(lambda: store.put(source, bytes_max=CAP))

    assert error.code == "not_a_pdf"
    assert said in str(error)
    assert everything_in(store) == []


def test_an_empty_file_is_refused(store: BlobStore, source: Path) -> None:
    source.write_bytes(b"")

    assert refusal(lambda: store.put(source, bytes_max=CAP)).code == "empty_file"


@pytest.mark.parametrize("name", ["missing.pdf", "A-101.pdf/inside.pdf", "nul\0.pdf"])
def test_a_path_that_names_no_file_is_refused(
    store: BlobStore, source: Path, tmp_path: Path, name: str
) -> None:
    assert refusal(lambda: store.put(tmp_path / name, bytes_max=CAP)).code == "no_such_file"


def test_a_name_too_long_and_a_loop_of_links_are_refused(store: BlobStore, tmp_path: Path) -> None:
    loop = tmp_path / "loop.pdf"
    loop.symlink_to(loop)

    assert refusal(lambda: store.put(loop, bytes_max=CAP)).code == "not_readable"
    assert refusal(lambda: store.put(tmp_path / ("x" * 300), bytes_max=CAP)).code == "not_readable"


def test_a_folder_is_refused(store: BlobStore, tmp_path: Path) -> None:
    error = refusal(lambda: store.put(tmp_path, bytes_max=CAP))

    assert error.code == "not_a_file"
    assert "a folder" in str(error)


def test_a_pipe_is_refused_without_waiting_for_a_writer(store: BlobStore, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.pdf"
    os.mkfifo(pipe)

    assert "a pipe" in str(refusal(lambda: store.put(pipe, bytes_max=CAP)))


def test_a_socket_and_a_device_are_refused(store: BlobStore, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))

        assert "a socket" in str(refusal(lambda: store.put(path, bytes_max=CAP)))
    assert "a device" in str(refusal(lambda: store.put(Path("/dev/zero"), bytes_max=CAP)))


# Root may read everything, so there it is tried as the user 65534, in a child.
AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from planroom.blobs import BlobStore
from planroom.errors import InputRefused
if os.geteuid() == 0:
    os.setegid(65534), os.seteuid(65534)
try:
    BlobStore(Path(sys.argv[1])).put(Path(sys.argv[2]), bytes_max=100)
except InputRefused as error:
    print(error.code, error)
"""


def test_a_file_that_may_not_be_read_is_refused(store: BlobStore, source: Path) -> None:
    source.chmod(0)

    arguments = [sys.executable, "-c", AS_ANOTHER_USER, str(store.root), str(source)]
    said = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout

    assert said == f"not_readable {source} may not be read by this user.\n"


def test_a_file_over_the_cap_is_refused_unread_with_both_numbers(
    store: BlobStore, tmp_path: Path
) -> None:
    huge = tmp_path / "huge.pdf"
    with huge.open("wb") as stream:
        stream.write(b"%PDF-1.7\n")
        stream.truncate(1 << 40)

    with pytest.raises(
        InputTooLarge, match="1,099,511,627,776 bytes; at most 10,000,000"
    ) as caught:
        store.put(huge, bytes_max=CAP)

    assert (caught.value.size, caught.value.cap) == (1 << 40, CAP)
    assert caught.value.code == "too_many_bytes"
    assert "PLANROOM_FILE_BYTES_MAX" in str(caught.value.hint)
    assert not store.root.exists()


def test_a_stream_is_read_no_further_than_the_cap(store: BlobStore) -> None:
    stream = EndlessPdf()

    with pytest.raises(InputTooLarge):
        store.put_stream(stream, name="endless", bytes_max=5_000_000)

    assert stream.given < 8_000_000
    assert everything_in(store) == []


class EndlessPdf(io.RawIOBase):
    """A stream that never ends, and counts what it has given."""

    given = 0

    def read(self, size: int = -1) -> bytes:
        piece = b"%PDF-1.7".ljust(size, b"x")
        self.given += len(piece)
        return piece


class Interrupting(io.BytesIO):
    """A stream that does something once, after its first megabyte."""

    def __init__(self, content: bytes, action: Callable[[], object]) -> None:
        super().__init__(content)
        self._action: Callable[[], object] | None = action

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() > 1_000_000 and self._action is not None:
            action, self._action = self._action, None
            action()
        return super().read(size)


def test_a_stream_that_breaks_off_leaves_nothing(store: BlobStore) -> None:
    def break_off() -> None:
        raise ConnectionResetError("the other side went away")

    with pytest.raises(ConnectionResetError):
        store.put_stream(Interrupting(PDF * 1000, break_off), name="s", bytes_max=CAP)

    assert everything_in(store) == []


@pytest.mark.parametrize("change", ["grow", "rewrite", "truncate"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    store: BlobStore, source: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_bytes(PDF * 1000)
    read = hashlib.sha256

    def change_it() -> object:
        with source.open("r+b") as stream:
            if change == "grow":
                stream.seek(0, os.SEEK_END)
                stream.write(b"more")
            elif change == "rewrite":
                stream.write(b"%PDF-1.8")
            else:
                stream.truncate(1_500_000)
        return read()

    # The hash is begun between the look at the file and the first megabyte.
    monkeypatch.setattr("planroom.blobs.hashlib.sha256", change_it)
    error = refusal(lambda: store.put(source, bytes_max=CAP))

    assert error.code == "changed_while_reading"
    assert everything_in(store) == []


def test_a_full_disk_refuses_with_the_cause_and_leaves_nothing(
    store: BlobStore, source: Path
) -> None:
    source.write_bytes(PDF * 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))
    try:
        error = refusal(lambda: store.put(source, bytes_max=CAP))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert error.code == "disk_full"
    assert "File too large" in str(error)
    assert str(store.root) in str(error)
    assert everything_in(store) == []


ON_A_SMALL_DISK = """
set -e
mount -t tmpfs -o size=2m planroom "$1"
exec "$2" -c '
import sys
from pathlib import Path
from planroom.blobs import BlobStore
from planroom.errors import InputRefused
root = Path(sys.argv[1]) / "blobs"
try:
    BlobStore(root).put(Path(sys.argv[2]), bytes_max=10**9)
except InputRefused as error:
    print(error.code, error)
print([p.name for p in root.rglob("*") if p.is_file()])
' "$1" "$3"
"""


def test_a_disk_that_really_is_full_refuses_with_the_cause(tmp_path: Path, source: Path) -> None:
    source.write_bytes(PDF * 1000)
    disk = tmp_path / "disk"
    disk.mkdir()
    unshare = ["unshare", "--mount", "--map-root-user", "--user"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this system lets nobody mount a small disk")

    script = ["sh", "-c", ON_A_SMALL_DISK, "sh", str(disk), sys.executable, str(source)]
    result = subprocess.run([*unshare, *script], capture_output=True, text=True, check=True)

    assert result.stdout.startswith("disk_full")
    assert "No space left on device" in result.stdout
    assert result.stdout.endswith("[]\n")


def test_what_a_killed_intake_leaves_is_swept_and_what_another_writes_is_not(
    store: BlobStore, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = (
        "import sys; from pathlib import Path; from planroom.blobs import BlobStore\n"
        "stream = open(sys.argv[2], 'rb', buffering=0)\n"
        "BlobStore(Path(sys.argv[1])).put_stream(stream, name='s', bytes_max=10**9)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(store.root), str(pipe)])
    with pipe.open("wb", buffering=0) as feed:
        feed.write(b"%PDF-1.7".ljust(8192, b"x"))
        # The pipe holds 64 KB: when this is through, the child is inside its copy.
        feed.write(b"x" * 300_000)

        assert store.sweep() == 0
        assert len(everything_in(store)) == 1

        child.send_signal(signal.SIGKILL)
        child.wait(timeout=30)

    assert store.sweep() == 1
    assert everything_in(store) == []


def test_many_intakes_of_the_same_file_at_once_keep_it_once(store: BlobStore, source: Path) -> None:
    source.write_bytes(PDF * 100)
    with ThreadPoolExecutor(8) as pool:
        intakes = [pool.submit(store.put, source, bytes_max=CAP) for _ in range(40)]

    blobs = {intake.result() for intake in intakes}
    assert len(blobs) == 1
    assert len(everything_in(store)) == 1
    assert store.verify(blobs.pop().sha256)


def test_a_sweep_beside_intakes_takes_nothing_from_them(store: BlobStore, source: Path) -> None:
    done = threading.Event()

    def sweep() -> None:
        while not done.is_set():
            store.sweep()

    with ThreadPoolExecutor(1) as pool:
        sweeping = pool.submit(sweep)
        try:
            for number in range(200):
                source.write_bytes(PDF + str(number).encode())
                assert store.verify(store.put(source, bytes_max=CAP).sha256)
        finally:
            done.set()
        sweeping.result(timeout=30)


def test_a_damaged_blob_is_found_out(store: BlobStore, source: Path) -> None:
    blob = store.put(source, bytes_max=CAP)
    assert store.verify(blob.sha256)

    with store.path(blob.sha256).open("r+b") as stream:
        stream.write(b"%PDF-1.6")

    assert not store.verify(blob.sha256)


@pytest.mark.parametrize("use", ["find", "open", "verify"])
def test_a_missing_blob_is_a_failure_of_the_document(store: BlobStore, use: str) -> None:
    call: Callable[[bytes], Path | BinaryIO | bool] = getattr(store, use)

    with pytest.raises(DocumentFailed) as caught:
        call(bytes(32))

    assert caught.value.code == "blob_missing"


def test_a_blob_is_deleted_when_no_intake_has_met_it_lately(store: BlobStore, source: Path) -> None:
    blob = store.put(source, bytes_max=CAP)
    path = store.path(blob.sha256)

    assert not store.delete(blob.sha256)
    os.utime(path, (0, 0))
    store.put(source, bytes_max=CAP)
    assert not store.delete(blob.sha256), "an intake has just met it"

    os.utime(path, (0, 0))
    assert store.delete(blob.sha256)
    assert not path.exists()
    assert store.delete(blob.sha256), "it is gone already"
