"""The bytes of documents, kept once each under the SHA-256 of their content.

`home/blobs/ab/cd/abcd…` holds a blob; its name is proof of its content, so it never changes and
needs no version. Bytes arrive through `blobs/tmp`, are flushed to disk, and appear under their
name by one rename: a blob is whole or not there.

A temporary file is locked by whoever writes it. The kernel drops the lock with its holder, so
`sweep` can tell what a killed intake left from what another process is writing at this moment,
also across containers, where process numbers mean nothing.

Whatever is no PDF file is refused at the door, before a byte is kept.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Protocol

from planroom.errors import DocumentFailed, InputRefused

HEAD_BYTES = 1024
"""How far into a file the mark `%PDF-` may stand; readers accept junk before it."""

_READ_BYTES = 1024 * 1024
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

# What a file that is no PDF most likely is, by its first bytes.
_LOOKS_LIKE = (
    (b"<!doctype html", "a web page (HTML)"),
    (b"<html", "a web page (HTML)"),
    (b"<?xml", "an XML file"),
    (b"pk\x03\x04", "a ZIP archive or an Office document"),
    (b"\x89png", "an image (PNG)"),
    (b"\xff\xd8\xff", "an image (JPEG)"),
    (b"ii*\x00", "an image (TIFF)"),
    (b"mm\x00*", "an image (TIFF)"),
    (b"gif8", "an image (GIF)"),
    (b"bm", "an image (BMP)"),
    (b"%!ps", "a PostScript file"),
    (b"{\\rtf", "a Rich Text document"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf", "a 7-Zip archive"),
    (b"rar!", "a RAR archive"),
    (b"\xd0\xcf\x11\xe0", "an old Office document"),
)
_DWG = b"ac10"


class InputTooLarge(InputRefused):
    """The file is over the cap; it was not read, or not further than the cap.

    `size` is in bytes, as far as it is known; `cap` is what `PLANROOM_FILE_BYTES_MAX` allows.
    """

    code = "too_many_bytes"

    def __init__(self, name: str, size: int, cap: int) -> None:
        super().__init__(
            f"{name} has {size:,} bytes; at most {cap:,} are taken.",
            hint="Raise PLANROOM_FILE_BYTES_MAX.",
        )
        self.size = size
        self.cap = cap


@dataclass(frozen=True, slots=True)
class Blob:
    """What a document's content is known by: its SHA-256 (32 bytes) and its size in bytes."""

    sha256: bytes
    size: int


class Readable(Protocol):
    """Whatever bytes can be read from."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; none at the end."""
        ...


class BlobStore:
    """The blobs of one home. Any number of processes may use it at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._tmp = root / "tmp"

    def put(self, source: Path, *, bytes_max: int) -> Blob:
        """Keep the PDF file at `source` and return what it is known by; links are followed.

        Content that is there already is left as it is. Raises `InputTooLarge` over `bytes_max`,
        and `InputRefused` for what is not a readable, regular, whole PDF file, for one that
        changes while it is read, and for a full disk. Then nothing is left behind.
        """
        with _opened(source) as stream:
            before = os.fstat(stream.fileno())
            if before.st_size > bytes_max:
                raise InputTooLarge(str(source), before.st_size, bytes_max)

            def unchanged(size: int) -> bool:
                after = os.fstat(stream.fileno())
                return (before.st_size, before.st_mtime_ns) == (size, after.st_mtime_ns)

            return self._take(stream, str(source), bytes_max, unchanged)

    def put_stream(self, stream: Readable, *, name: str, bytes_max: int) -> Blob:
        """Keep what a stream yields, as `put` does; `name` is for the messages."""
        return self._take(stream, name, bytes_max)

    def path(self, sha256: bytes) -> Path:
        """Where the blob is, if it is there."""
        name = sha256.hex()
        return self.root / name[:2] / name[2:4] / name

    def find(self, sha256: bytes) -> Path:
        """Return the path of a blob that is there; raise `DocumentFailed` (`blob_missing`)."""
        path = self.path(sha256)
        if not path.is_file():
            raise _missing(path)
        return path

    def open(self, sha256: bytes) -> BufferedReader:
        """Open a blob for reading; raise `DocumentFailed` (`blob_missing`)."""
        try:
            return self.path(sha256).open("rb")
        except FileNotFoundError:
            raise _missing(self.path(sha256)) from None

    def hashes(self) -> Iterator[bytes]:
        """The SHA-256 of every blob that is there, read from the disk as it is asked for."""
        for path in self.root.glob("[0-9a-f][0-9a-f]/[0-9a-f][0-9a-f]/*"):
            with suppress(ValueError):
                yield bytes.fromhex(path.name)

    def verify(self, sha256: bytes) -> bool:
        """Read a blob again and say whether its content is still what its name says."""
        with self.open(sha256) as stream:
            return hashlib.file_digest(stream, "sha256").digest() == sha256

    def delete(self, sha256: bytes, *, idle_seconds: float = 3600.0) -> bool:
        """Remove a blob that no intake has met for `idle_seconds`; return whether it is gone.

        The caller knows that no row names it. An intake that met it just now may be about to
        write such a row, so then it stays for a later call.
        """
        path = self.path(sha256)
        if not path.exists():
            return True
        with self._locked(fcntl.LOCK_EX):
            try:
                if time.time() - path.stat().st_mtime < idle_seconds:
                    return False
                path.unlink()
            except FileNotFoundError:
                return True
        _sync_folder(path.parent)
        return True

    def sweep(self) -> int:
        """Remove what killed intakes have left, and return how many files that were."""
        swept = 0
        with suppress(FileNotFoundError):
            for path in self._tmp.iterdir():
                swept += _remove_if_abandoned(path)
        return swept

    def _take(
        self,
        stream: Readable,
        name: str,
        bytes_max: int,
        unchanged: Callable[[int], bool] = lambda size: True,
    ) -> Blob:
        head = _read_head(stream, name)
        try:
            self.sweep()
            with self._temporary() as (path, output):
                blob = _copy(head, stream, output, name, bytes_max)
                if not unchanged(blob.size):
                    raise InputRefused(
                        f"{name} changed while it was being read.",
                        code="changed_while_reading",
                        hint="Try again when it has been written completely.",
                    )
                output.flush()
                os.fsync(output.fileno())
                self._publish(path, blob)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise InputRefused(
                f"{name} was not taken in: {os.strerror(error.errno)} ({self.root}).",
                code="disk_full",
                hint="Make room there, or set PLANROOM_HOME to a folder on another disk.",
            ) from error
        return blob

    @contextmanager
    def _temporary(self) -> Generator[tuple[Path, BinaryIO]]:
        """A locked file in `tmp`, gone at the end unless it was renamed."""
        # For root the home also holds the embedded database, whose user has to pass it.
        self.root.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        _make_folder(self._tmp)
        path, output = _create_locked(self._tmp)
        try:
            with output:
                yield path, output
        finally:
            path.unlink(missing_ok=True)

    def _publish(self, temporary: Path, blob: Blob) -> None:
        """Give a complete file its name; one that is there already is only marked as met."""
        path = self.path(blob.sha256)
        _make_folder(path.parent)
        with self._locked(fcntl.LOCK_SH):
            if path.exists() and path.stat().st_size == blob.size:
                os.utime(path)
            else:
                temporary.rename(path)
        _sync_folder(path.parent)

    @contextmanager
    def _locked(self, kind: int) -> Generator[None]:
        """Keep `delete` from removing a blob between its look at it and the removal."""
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, kind)
            yield
        finally:
            os.close(descriptor)


def _missing(path: Path) -> DocumentFailed:
    return DocumentFailed(
        f"The document's content is not in {path.parents[2]}.",
        code="blob_missing",
        hint="Add the file again; workers on several machines need the same PLANROOM_HOME/blobs.",
    )


# ---------------------------------------------------------------------------------- the door


@contextmanager
def _opened(source: Path) -> Generator[BinaryIO]:
    """The file at `source`, if it is one and can be read."""
    try:
        mode = source.stat().st_mode
        if not stat.S_ISREG(mode):
            raise InputRefused(f"{source} is {_kind(mode)}, not a file.", code="not_a_file")
        # Should a pipe have taken its place since, opening must not wait for a writer.
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise InputRefused(f"{source}: there is no such file.", code="no_such_file") from None
    except PermissionError:
        raise InputRefused(f"{source} may not be read by this user.", code="not_readable") from None
    except OSError as error:
        said = os.strerror(error.errno or 0)
        raise InputRefused(f"{source} cannot be opened: {said}.", code="not_readable") from error
    with os.fdopen(descriptor, "rb") as stream:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise InputRefused(f"{source} is {_kind(mode)}, not a file.", code="not_a_file")
        yield stream


def _kind(mode: int) -> str:
    names = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return names.get(stat.S_IFMT(mode), "something else")


def _read_head(stream: Readable, name: str) -> bytes:
    """The first bytes of the stream, if they are those of a PDF file."""
    head = b""
    while len(head) < HEAD_BYTES and (piece := stream.read(HEAD_BYTES - len(head))):
        head += piece
    if not head:
        raise InputRefused(f"{name} is empty.", code="empty_file")
    if b"%PDF-" not in head:
        raise InputRefused(
            f"{name} is not a PDF file: it looks like {_looks_like(head)}.", code="not_a_pdf"
        )
    return head


def _looks_like(head: bytes) -> str:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for mark, name in _LOOKS_LIKE:
        if start.startswith(mark):
            return name
    if start.startswith(_DWG) and start[4:6].isdigit():
        return "a drawing (DWG)"
    if not head.strip(b"\0"):
        return "nothing but zeros"
    # A character may be cut off at the end of what was read.
    text = head.decode("utf-8", "ignore").encode()
    if len(head) - len(text) < 4 and b"\0" not in head:
        return "plain text"
    return "something else"


# ------------------------------------------------------------------------------- the copying


def _copy(head: bytes, stream: Readable, output: BinaryIO, name: str, bytes_max: int) -> Blob:
    """Write the stream to `output`, once, hashing on the way; stop at the cap."""
    digest = hashlib.sha256()
    size = 0
    for piece in _pieces(head, stream):
        size += len(piece)
        if size > bytes_max:
            raise InputTooLarge(name, size, bytes_max)
        digest.update(piece)
        output.write(piece)
    return Blob(digest.digest(), size)


def _pieces(head: bytes, stream: Readable) -> Iterator[bytes]:
    yield head
    while piece := stream.read(_READ_BYTES):
        yield piece


def _create_locked(folder: Path) -> tuple[Path, BinaryIO]:
    """A new file that this process holds the lock of.

    A sweep may take it between its creation and the lock; then it has no name, and is made anew.
    """
    while True:
        path = folder / uuid.uuid4().hex
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        output = os.fdopen(os.open(path, flags, 0o600), "wb")
        fcntl.flock(output, fcntl.LOCK_EX)
        if os.fstat(output.fileno()).st_nlink > 0:
            return path, output
        output.close()


def _remove_if_abandoned(path: Path) -> bool:
    """Remove a temporary file whose writer is gone."""
    try:
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except (BlockingIOError, FileNotFoundError):
        return False
    return True


def _make_folder(folder: Path) -> None:
    """Make a private folder, and make its name last."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
