"""PDFs in, pages out: text, status and sheet number of every page, whatever the file does.

`reader` is the worker's side, `child` the process that the parsers run in. The rest is pure or
knows one parser: `text` cleans, `sheet` and `outline` name, `annotation` orders, `pdfium` and
`fallback` parse.
"""

from __future__ import annotations

from planroom.extract.annotation import ANNOTATION_MARK
from planroom.extract.limits import ExtractLimits
from planroom.extract.reader import (
    EXTRACTOR_VERSION,
    ExtractionAborted,
    PageReader,
    extractor_identity,
)
from planroom.extract.sheet import normalise_sheet_number
from planroom.extract.text import normalise

__all__ = [
    "ANNOTATION_MARK",
    "EXTRACTOR_VERSION",
    "ExtractLimits",
    "ExtractionAborted",
    "PageReader",
    "extractor_identity",
    "normalise",
    "normalise_sheet_number",
]
