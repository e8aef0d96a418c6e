"""Search: which sheet answers a question, in one workspace, among published versions only.

Two rankings are made, one by meaning (vectors) and one by words (Postgres full text), and fused by
reciprocal rank (Cormack, Clarke and Büttcher, SIGIR 2009): a sheet that both find beats one that
either finds alone, and no scores of different kinds are compared. A sheet whose number the query
names comes before all of that.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, LiteralString

import numpy as np
import psycopg
from numpy.typing import NDArray
from pgvector import HalfVector
from psycopg import sql
from psycopg.rows import dict_row

from planroom.errors import PlanroomError
from planroom.extract.sheet import normalise_sheet_number

Connection = psycopg.Connection[Any]
Row = dict[str, Any]

RANK_CONSTANT = 60
"""The paper's: how much less a second place is worth than a first."""
CANDIDATES_MIN = 60
QUERY_CHARACTERS_MAX = 2000

# Control characters never occur in stored text, so they mark words without any escaping.
_MARK_START, _MARK_STOP = "\x02", "\x03"


class Mode(StrEnum):
    """Which rankings are used."""

    HYBRID = "hybrid"
    VECTOR = "vector"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Scope:
    """What is searched: a workspace, and within it a project, a file, a sheet number if given."""

    workspace_id: int
    project_id: int | None = None
    file_id: int | None = None
    sheet: str | None = None

    @property
    def parameters(self) -> Row:
        """For the conditions that every statement here shares."""
        key = None if self.sheet is None else normalise_sheet_number(self.sheet)
        return {
            "workspace_id": self.workspace_id,
            "project_id": self.project_id,
            "file_id": self.file_id,
            "sheet_key": key,
        }


@dataclass(frozen=True, slots=True)
class Hit:
    """A sheet that answers. `page` counts from 1; `marks` are spans of `snippet` to show marked."""

    file_id: int
    file: str
    project: str
    page: int
    page_count: int
    sheet_number: str | None
    sheet_title: str | None
    sheet_source: str | None
    label: str | None
    snippet: str
    marks: Sequence[tuple[int, int]]
    score: float
    exact_sheet: bool


@dataclass(slots=True)
class _Candidate:
    """A page on its way up: its fused score, and the chunk that speaks for it."""

    score: float = 0.0
    exact: bool = False
    chunk_index: int | None = None
    found_by: set[str] = field(default_factory=set[str])


_Page = tuple[int, int]
"""Ingestion and page index."""

# Published versions of the scope: everything a search may see, and nothing else.
_SCOPE: LiteralString = """
    select files.published_ingestion_id as ingestion_id, files.id as file_id
      from files
     where files.workspace_id = %(workspace_id)s
       and files.status = 'ready'
       and files.published_ingestion_id is not null
       and (%(project_id)s::bigint is null or files.project_id = %(project_id)s)
       and (%(file_id)s::bigint is null or files.id = %(file_id)s)
"""
_ON_SHEET: LiteralString = """
    (%(sheet_key)s::text is null or exists (
        select 1 from pages
         where pages.ingestion_id = chunks.ingestion_id
           and pages.page_index = chunks.page_index
           and pages.sheet_key = %(sheet_key)s
    ))
"""


def search(
    conn: Connection,
    scope: Scope,
    query: str,
    *,
    vector: NDArray[np.float32] | None,
    embedder_identity: str,
    k: int = 10,
    mode: Mode = Mode.HYBRID,
) -> list[Hit]:
    """The `k` best sheets for `query`, best first.

    `vector` is the query's, of shape (dimensions,), by the embedder of that identity; it is
    compared only with chunks of the same embedder, and may be None in `text` mode.
    """
    text = query.replace("\x00", " ")[:QUERY_CHARACTERS_MAX].strip()
    if not text and scope.sheet is None:
        raise PlanroomError("The query is empty.", code="query_empty")
    limit = max(CANDIDATES_MIN, 4 * k)
    found: dict[_Page, _Candidate] = {}
    if mode is not Mode.TEXT and vector is not None and text:
        _fuse(found, "vector", _rank_by_vector(conn, scope, vector, embedder_identity, limit))
    if mode is not Mode.VECTOR and text:
        _fuse(found, "text", _rank_by_text(conn, scope, text, limit))
    for page in _pages_named(conn, scope, text, limit):
        found.setdefault(page, _Candidate()).exact = True
    best = sorted(found.items(), key=lambda item: (not item[1].exact, -item[1].score, item[0]))
    return _hits(conn, scope, text, best[:k])


def _fuse(
    found: dict[_Page, _Candidate], ranking: str, chunks: Sequence[tuple[int, int, int]]
) -> None:
    """Add one ranking of chunks (ingestion, page, chunk): a page counts once, by its best chunk."""
    rank = 0
    for ingestion_id, page_index, chunk_index in chunks:
        candidate = found.setdefault((ingestion_id, page_index), _Candidate())
        if ranking in candidate.found_by:
            continue
        rank += 1
        candidate.found_by.add(ranking)
        candidate.score += 1.0 / (RANK_CONSTANT + rank)
        if candidate.chunk_index is None or ranking == "text":
            candidate.chunk_index = chunk_index


# Written with the embedder's number and dimensions as literals: so the planner can prove that the
# partial index of that embedder serves, once there is one (see planroom.vector_index).
_BY_VECTOR: LiteralString = (
    "with scope as ("
    + _SCOPE
    + """)
    select chunks.ingestion_id, chunks.page_index, chunks.chunk_index
      from chunks
     where chunks.workspace_id = %(workspace_id)s
       and chunks.embedder_id = {embedder_id}
       and chunks.ingestion_id in (select ingestion_id from scope)
       and """
    + _ON_SHEET
    + """
     order by (chunks.embedding::halfvec({dimensions})) <#> %(vector)s,
           chunks.ingestion_id, chunks.chunk_index
     limit %(limit)s
"""
)
_EMBEDDER = "select id, dimensions from embedders where identity = %(identity)s"


def _rank_by_vector(
    conn: Connection, scope: Scope, vector: NDArray[np.float32], identity: str, limit: int
) -> list[tuple[int, int, int]]:
    embedder = conn.execute(_EMBEDDER, {"identity": identity}).fetchone()
    if embedder is None:
        return []
    embedder_id, dimensions = embedder
    statement = sql.SQL(_BY_VECTOR).format(
        embedder_id=sql.Literal(embedder_id), dimensions=sql.Literal(dimensions)
    )
    parameters = scope.parameters | {"vector": HalfVector(vector), "limit": limit}
    return conn.execute(statement, parameters).fetchall()


# Any of the words, ranked by how many and how rare a place they have: a question names more than
# any one sheet says.
_BY_TEXT: LiteralString = (
    "with scope as ("
    + _SCOPE
    + """), query as (
        select replace(plainto_tsquery('english', %(query)s)::text, ' & ', ' | ')::tsquery as any_of
    )
    select chunks.ingestion_id, chunks.page_index, chunks.chunk_index
      from chunks, query
     where chunks.workspace_id = %(workspace_id)s
       and chunks.search @@ query.any_of
       and chunks.ingestion_id in (select ingestion_id from scope)
       and """
    + _ON_SHEET
    + """
     order by ts_rank(chunks.search, query.any_of) desc, chunks.ingestion_id, chunks.chunk_index
     limit %(limit)s
"""
)


def _rank_by_text(
    conn: Connection, scope: Scope, query: str, limit: int
) -> list[tuple[int, int, int]]:
    return conn.execute(_BY_TEXT, scope.parameters | {"query": query, "limit": limit}).fetchall()


_NAMED: LiteralString = (
    "with scope as ("
    + _SCOPE
    + """)
    select pages.ingestion_id, pages.page_index
      from pages
     where pages.workspace_id = %(workspace_id)s
       and pages.sheet_key = any (%(keys)s)
       and pages.ingestion_id in (select ingestion_id from scope)
     order by pages.ingestion_id, pages.page_index
     limit %(limit)s
"""
)


def _pages_named(conn: Connection, scope: Scope, query: str, limit: int) -> list[_Page]:
    """The pages whose sheet number the query, or the scope, names."""
    keys = [normalise_sheet_number(scope.sheet)] if scope.sheet else sheet_keys(query)
    if not keys:
        return []
    return conn.execute(_NAMED, scope.parameters | {"keys": keys, "limit": limit}).fetchall()


def sheet_keys(query: str) -> list[str]:
    """What in a query may be a sheet number, as matching keys: `a 101` and `A-101` give `A101`.

    The whole query; each word that has a letter and a digit; and a short word of letters together
    with the number after it.
    """
    words = re.findall(r"[^\s,;:!?()\"']+", query)
    maybe = [query, *words]
    maybe += [a + b for a, b in itertools.pairwise(words) if len(a) <= 3 and a.isalpha()]
    keys = [normalise_sheet_number(word).rstrip(".") for word in maybe]
    return list(
        dict.fromkeys(
            key
            for key in keys
            if re.search(r"\d", key) and re.search(r"[^\W\d_]", key) and len(key) <= 64
        )
    )


# The snippet's chunk, or, for a page known by its number alone, the page's first chunk; a page
# without text has none.
_SHOW: LiteralString = """
    select files.id as file_id, files.name as file, projects.name as project,
           pages.page_index, job.page_count, pages.sheet_number, pages.sheet_title,
           pages.sheet_source, pages.label,
           coalesce(
               ts_headline(
                   'english', chunk.text,
                   replace(plainto_tsquery('english', %(query)s)::text, ' & ', ' | ')::tsquery,
                   'MaxFragments=2, MaxWords=24, MinWords=8, FragmentDelimiter=" … ", StartSel="'
                       || %(mark_start)s || '", StopSel="' || %(mark_stop)s || '"'
               ), ''
           ) as snippet
      from pages
      join file_ingestions as job on job.id = pages.ingestion_id
      join files on files.published_ingestion_id = job.id
      join projects on projects.id = files.project_id
      left join lateral (
          select text
            from chunks
           where chunks.ingestion_id = pages.ingestion_id
             and chunks.page_index = pages.page_index
             and (%(chunk_index)s::integer is null or chunks.chunk_index = %(chunk_index)s)
           order by chunks.chunk_index
           limit 1
      ) as chunk on true
     where pages.ingestion_id = %(ingestion_id)s
       and pages.page_index = %(page_index)s
       and pages.workspace_id = %(workspace_id)s
"""


def _hits(
    conn: Connection,
    scope: Scope,
    query: str,
    best: Sequence[tuple[_Page, _Candidate]],
) -> list[Hit]:
    hits: list[Hit] = []
    with conn.cursor(row_factory=dict_row) as cursor:
        for (ingestion_id, page_index), candidate in best:
            parameters: Row = {
                "workspace_id": scope.workspace_id,
                "ingestion_id": ingestion_id,
                "page_index": page_index,
                "chunk_index": candidate.chunk_index,
                "query": query,
                "mark_start": _MARK_START,
                "mark_stop": _MARK_STOP,
            }
            row = cursor.execute(_SHOW, parameters).fetchone()
            if row is not None:  # Superseded since it was ranked.
                hits.append(_hit(row, candidate))
    return hits


def _hit(row: Row, candidate: _Candidate) -> Hit:
    snippet, marks = read_marks(row["snippet"])
    return Hit(
        file_id=row["file_id"],
        file=row["file"],
        project=row["project"],
        page=row["page_index"] + 1,
        page_count=row["page_count"],
        sheet_number=row["sheet_number"],
        sheet_title=row["sheet_title"],
        sheet_source=row["sheet_source"],
        label=row["label"],
        snippet=snippet,
        marks=marks,
        score=candidate.score,
        exact_sheet=candidate.exact,
    )


def read_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Split a headline into its text, on one line, and the spans of its marked words."""
    text, marks, start = "", list[tuple[int, int]](), 0
    for part in re.split(f"([{_MARK_START}{_MARK_STOP}])", re.sub(r"\s+", " ", marked.strip())):
        if part == _MARK_START:
            start = len(text)
        elif part == _MARK_STOP:
            marks.append((start, len(text)))
        else:
            text += part
    return text, marks
