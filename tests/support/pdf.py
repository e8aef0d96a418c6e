"""PDFs written by hand, so that a test can be as nasty as a file from outside.

`write_pdf` puts pages, annotations, labels and outlines where it is told, with a correct
cross-reference; the rest here makes content for it, or damages what it wrote.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pikepdf

ARCH_D = (2592.0, 1728.0)
LETTER = (612.0, 792.0)


@dataclass(frozen=True)
class PdfPage:
    """A page to write: `content` is its stream, `annotations` the bodies of dictionaries."""

    content: bytes = b""
    size: tuple[float, float] = LETTER
    rotate: int = 0
    annotations: tuple[str, ...] = ()
    extra: str = ""
    filters: str = ""


@dataclass(frozen=True)
class PdfBookmark:
    """A bookmark to write; `title` is a literal or hexadecimal PDF string."""

    title: str
    page: int
    children: tuple[PdfBookmark, ...] = ()


def text(string: str, x: float, y: float, size: float = 10, angle: int = 0) -> bytes:
    """Operators that print `string` in Helvetica, turned by a multiple of 90 degrees."""
    cos, sin = {0: (1, 0), 90: (0, 1), 180: (-1, 0), 270: (0, -1)}[angle]
    escaped = string.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
    matrix = f"{cos * size} {sin * size} {-sin * size} {cos * size} {x} {y}"
    # The size is in the matrix, as CAD programs write it: `Tf` alone says nothing.
    return f"BT /F1 1 Tf {matrix} Tm ({escaped}) Tj ET\n".encode("latin-1")


def drawing(
    number: str, title: str, *, size: tuple[float, float] = ARCH_D, notes: int = 20
) -> bytes:
    """The content of a sheet: notes, room tags, and a title block in the lower right corner."""
    width, height = size
    lines = (f"{i + 1}. VERIFY ALL DIMENSIONS" for i in range(notes))
    parts = [text(line, 100, height - 80 - 14 * i) for i, line in enumerate(lines)]
    parts += [text(f"A{100 + i}", 300 + 60 * i, 600, 9) for i in range(8)]
    parts += [
        text("SHEET TITLE", width * 0.88, 160, 8),
        text(title, width * 0.88, 140, 14),
        text("SHEET NUMBER", width * 0.88, 110, 8),
        text(number, width * 0.88, 60, 36),
        text('DATE 12-01-2026  SCALE 1/8" = 1\'-0"', width * 0.88, 40, 8),
    ]
    return b"".join(parts)


def write_pdf(
    path: Path,
    pages: Sequence[PdfPage],
    *,
    root: str = "",
    outline: Sequence[PdfBookmark] = (),
    objects: Sequence[bytes] = (),
) -> Path:
    """Write the pages; `objects` get the numbers from 10 on, `root` goes into the catalog."""
    bodies: dict[int, bytes] = {
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
    }
    bodies |= {10 + i: body for i, body in enumerate(objects)}
    first = 10 + len(objects)
    numbers = [first + 2 * i for i in range(len(pages))]
    for number, page in zip(numbers, pages, strict=True):
        bodies[number] = _page(page, number + 1)
        bodies[number + 1] = stream(page.content, page.filters)
    kids = " ".join(f"{number} 0 R" for number in numbers)
    bodies[2] = f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>".encode()
    if outline:
        root += " /Outlines 4 0 R"
        _write_outline(bodies, 4, outline, numbers, 0)
    bodies[1] = f"<< /Type /Catalog /Pages 2 0 R {root} >>".encode()
    return _write(path, bodies)


def stream(content: bytes, filters: str = "") -> bytes:
    """A stream object's body."""
    head = f"<< /Length {len(content)} {f'/Filter {filters}' if filters else ''} >>"
    return head.encode() + b"\nstream\n" + content + b"\nendstream"


def annotation(
    kind: str, contents: str, x: float = 0, y: float = 0, *, height: float = 10, extra: str = ""
) -> str:
    """The body of an annotation whose upper left corner is at (x, y)."""
    rectangle = f"[{x} {y - height} {x + 100} {y}]"
    said = f"/Contents ({contents})" if contents else ""
    return f"<< /Type /Annot /Subtype /{kind} /Rect {rectangle} {said} {extra} >>"


def labels(*names: str) -> str:
    """A page label of its own for every page, for the catalog."""
    numbers = " ".join(f"{i} << /P ({name}) >>" for i, name in enumerate(names))
    return f"/PageLabels << /Nums [{numbers}] >>"


def bomb(inflated_bytes: int) -> PdfPage:
    """A few kilobytes that inflate, twice over, to so many bytes of nothing."""
    deflate = zlib.compressobj(6)
    block = b" " * (1 << 20)
    once = b"".join(deflate.compress(block) for _ in range(inflated_bytes >> 20)) + deflate.flush()
    return PdfPage(zlib.compress(once, 9), filters="[/FlateDecode /FlateDecode]")


def slow(operators: int, said: str = "SLOW") -> PdfPage:
    """A page that takes about a second of parsing per 8 million operators, then has text."""
    content = b"1 w " * operators + text(said, 72, 72)
    return PdfPage(zlib.compress(content, 1), filters="/FlateDecode")


def image_page() -> PdfPage:
    """A scan: an image over the whole page and no text."""
    image = b"BI /W 8 /H 8 /CS /G /BPC 8 ID " + bytes(range(64)) + b" EI"
    return PdfPage(b"q 612 0 0 792 0 0 cm " + image + b" Q")


def encrypt(path: Path, *, user: str, owner: str) -> Path:
    """Encrypt in place, with AES-256."""
    with pikepdf.open(path, allow_overwriting_input=True) as document:
        document.save(path, encryption=pikepdf.Encryption(user=user, owner=owner))
    return path


def truncate(path: Path, share: float) -> Path:
    """Keep only the first `share` of the file."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def break_xref(path: Path) -> Path:
    """Take away the cross-reference table and what points to it."""
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"xref\n0 ")] + b"trailer << /Root 1 0 R >>\n%%EOF\n")
    return path


def _page(page: PdfPage, content: int) -> bytes:
    width, height = page.size
    return (
        f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {width} {height}] /Rotate {page.rotate}"
        f" /Resources << /Font << /F1 3 0 R >> >> /Contents {content} 0 R"
        f" /Annots [{' '.join(page.annotations)}] {page.extra} >>"
    ).encode("latin-1")


def _write_outline(
    bodies: dict[int, bytes],
    number: int,
    children: Sequence[PdfBookmark],
    pages: Sequence[int],
    depth: int,
    own: str = "",
) -> None:
    """Write the node `number` and what is below it, giving out free numbers."""
    bodies[number] = b"reserved"
    numbers: list[int] = []
    for child in children:
        free = max(bodies) + 1
        target = f"/Title {child.title} /Parent {number} 0 R /Dest [{pages[child.page]} 0 R /Fit]"
        _write_outline(bodies, free, child.children, pages, depth + 1, target)
        numbers.append(free)
    for here, following in pairwise(numbers):
        bodies[here] = bodies[here][:-2] + f"/Next {following} 0 R >>".encode()
    kids = f"/First {numbers[0]} 0 R /Last {numbers[-1]} 0 R" if numbers else ""
    bodies[number] = f"<< {own} {kids} /Count {len(numbers)} >>".encode("latin-1")


def _write(path: Path, bodies: dict[int, bytes]) -> Path:
    out = bytearray(b"%PDF-1.7\n")
    offsets: dict[int, int] = {}
    for number in sorted(bodies):
        offsets[number] = len(out)
        out += b"%d 0 obj\n" % number + bodies[number] + b"\nendobj\n"
    start = len(out)
    size = max(bodies) + 1
    out += b"xref\n0 %d\n" % size
    for number in range(size):
        if number in offsets:
            out += b"%010d 00000 n \n" % offsets[number]
        else:
            out += b"0000000000 65535 f \n"
    out += b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (size, start)
    path.write_bytes(bytes(out))
    return path


def upright(content: bytes, rotate: int, size: tuple[float, float] = ARCH_D) -> PdfPage:
    """A page with `/Rotate` whose content is turned the other way, so that it displays upright."""
    width, height = size
    matrix = {
        0: "1 0 0 1 0 0",
        90: f"0 1 -1 0 {height} 0",
        180: f"-1 0 0 -1 {width} {height}",
        270: f"0 -1 1 0 0 {width}",
    }[rotate]
    box = size if rotate in (0, 180) else (height, width)
    return PdfPage(f"{matrix} cm\n".encode() + content, box, rotate)
