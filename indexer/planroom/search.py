"""Search: which sheet answers a question, in one workspace, among published versions only.

Rankings by meaning (vectors, one ranking an embedder), by words (Postgres full text) and by title
are fused by reciprocal rank (Cormack, Clarke and Büttcher, SIGIR 2009): a sheet that several find
beats one that only one finds, and no scores of different kinds are compared. By its title a scan
without text is found too. A sheet whose number the query names comes before all of that.

All of one search reads one snapshot of the database, so a version that is published meanwhile is
seen whole or not at all.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
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
from planroom.extract import normalise, normalise_sheet_number

Connection = psycopg.Connection[Any]
Row = dict[str, Any]

RANK_CONSTANT = 60
"""The paper's: how much less a second place is worth than a first."""
CANDIDATES_MIN = 60
TITLE_WEIGHT = 2.0
"""A query whose every word is in a sheet's title is its name; a scan has no other ranking."""
EXACT_CHUNKS_MAX = 50_000
"""Scopes of up to so many chunks are searched one by one, though there be an index of vectors."""
QUERY_CHARACTERS_MAX = 2000

# Control characters never occur in stored text, so they mark words without any escaping, and stand
# for what Postgres would take for HTML or the name of a file (see migrations/0002_documents.sql).
_MARK_START, _MARK_STOP = "\x02", "\x03"
_PARTED = "<>/"
_STAND_INS = "\x04\x05\x06"
_TO_SPACES = str.maketrans(_PARTED, " " * len(_PARTED))
_FROM_STAND_INS = str.maketrans(_STAND_INS, _PARTED)


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


def clean_query(query: str) -> str:
    """What is searched for: cleaned as stored text is, and of bounded length."""
    return normalise(query[:QUERY_CHARACTERS_MAX]).strip()


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


_EMBEDDERS_IN_SCOPE: LiteralString = (
    "with scope as ("
    + _SCOPE
    + """)
    select distinct job.embedder
      from file_ingestions as job
     where job.id in (select ingestion_id from scope)
       and job.total_units > 0
     order by job.embedder
"""
)


def list_embedders(conn: Connection, scope: Scope) -> list[str]:
    """The identities of the embedders whose vectors a search of this scope would compare."""
    return [row[0] for row in conn.execute(_EMBEDDERS_IN_SCOPE, scope.parameters)]


# `strict_order`: an index scan goes on until enough rows of the scope have come, nearest first.
_BEGIN: LiteralString = "set transaction isolation level repeatable read, read only"
_SET_UP: LiteralString = "select set_config('hnsw.iterative_scan', 'strict_order', true)"


def search(
    conn: Connection,
    scope: Scope,
    query: str,
    *,
    vectors: Mapping[str, NDArray[np.float32]],
    k: int = 10,
    mode: Mode = Mode.HYBRID,
) -> list[Hit]:
    """The `k` best sheets for `query`, best first; the same again for the same database.

    `vectors` are the query's, each of shape (dimensions,), by the identity of its embedder; each is
    compared only with chunks of the same embedder, and none is needed in `text` mode. `conn` is
    outside a transaction. Raises PlanroomError (`query_empty`).
    """
    text = clean_query(query)
    if not text and scope.sheet is None:
        raise PlanroomError("The query is empty.", code="query_empty")
    limit = max(CANDIDATES_MIN, 4 * k)
    found: dict[_Page, _Candidate] = {}
    with conn.transaction():
        conn.execute(_BEGIN)
        conn.execute(_SET_UP)
        if mode is not Mode.TEXT and text:
            for identity, vector in sorted(vectors.items()):
                _fuse(found, "vector", _rank_by_vector(conn, scope, vector, identity, limit))
        if mode is not Mode.VECTOR and text:
            _fuse(found, "text", _rank_by_text(conn, scope, text, limit))
            titled = _rank_by_title(conn, scope, text, limit)
            _fuse(found, "title", [(i, p, None) for i, p, whole in titled if whole], TITLE_WEIGHT)
            _fuse(found, "scan", [(i, p, None) for i, p, whole in titled if not whole])
        for page in _pages_named(conn, scope, text, limit):
            found.setdefault(page, _Candidate()).exact = True
        best = sorted(found.items(), key=lambda item: (not item[1].exact, -item[1].score, item[0]))
        return _hits(conn, scope, text, best[:k])


def _fuse(
    found: dict[_Page, _Candidate],
    ranking: str,
    chunks: Sequence[tuple[int, int, int | None]],
    weight: float = 1.0,
) -> None:
    """Add one ranking of (ingestion, page, chunk): a page counts once, by its best chunk.

    What is shown of a page is the chunk with its words, or else the one nearest in meaning.
    """
    rank = 0
    for ingestion_id, page_index, chunk_index in chunks:
        candidate = found.setdefault((ingestion_id, page_index), _Candidate())
        if ranking in candidate.found_by:
            continue
        rank += 1
        candidate.found_by.add(ranking)
        candidate.score += weight / (RANK_CONSTANT + rank)
        if candidate.chunk_index is None or ranking == "text":
            candidate.chunk_index = chunk_index


# Written with the embedder's number and dimensions as literals: so the planner can prove that the
# partial index of that embedder serves, once there is one (see planroom.vector_index). `{exactly}`
# is empty, or a term that changes no distance and keeps the planner from that index.
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
     order by ((chunks.embedding::halfvec({dimensions})) <#> %(vector)s) {exactly},
           chunks.ingestion_id, chunks.chunk_index
     limit %(limit)s
"""
)
_EXACTLY: LiteralString = "+ 0"
_EMBEDDER: LiteralString = "select id, dimensions from embedders where identity = %(identity)s"
_CHUNKS_IN_SCOPE: LiteralString = (
    "with scope as ("
    + _SCOPE
    + """)
    select coalesce(sum(job.total_units), 0)
      from file_ingestions as job
     where job.id in (select ingestion_id from scope)
"""
)


def _rank_by_vector(
    conn: Connection, scope: Scope, vector: NDArray[np.float32], identity: str, limit: int
) -> list[tuple[int, int, int]]:
    """The nearest chunks. Through the index, where there is one, only in scopes that need it.

    The index knows nothing of scopes: of a small one among many neighbours it may give up before
    it has found enough, so then, too, every chunk of the scope is compared.
    """
    embedder = conn.execute(_EMBEDDER, {"identity": identity}).fetchone()
    if embedder is None:
        return []
    parameters = scope.parameters | {"vector": HalfVector(vector), "limit": limit}
    literals = {"embedder_id": sql.Literal(embedder[0]), "dimensions": sql.Literal(embedder[1])}
    exact = sql.SQL(_BY_VECTOR).format(**literals, exactly=sql.SQL(_EXACTLY))
    counted = conn.execute(_CHUNKS_IN_SCOPE, parameters).fetchone()
    if scope.sheet is None and counted is not None and counted[0] > EXACT_CHUNKS_MAX:
        statement = sql.SQL(_BY_VECTOR).format(**literals, exactly=sql.SQL(""))
        nearest = conn.execute(statement, parameters).fetchall()
        if len(nearest) == limit:
            return nearest
    return conn.execute(exact, parameters).fetchall()


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
    parameters = {"query": query.translate(_TO_SPACES), "limit": limit}
    return conn.execute(_BY_TEXT, scope.parameters | parameters).fetchall()


# A sheet with text says its title there too, so here it is ranked only where the query is its
# title; of a scan any word of the title will do.
_BY_TITLE: LiteralString = (
    "with scope as ("
    + _SCOPE
    + """), query as (
        select all_of, replace(all_of::text, ' & ', ' | ')::tsquery as any_of
          from plainto_tsquery('english', %(query)s) as all_of
    )
    select pages.ingestion_id, pages.page_index, pages.title_search @@ query.all_of as is_whole
      from pages, query
     where pages.workspace_id = %(workspace_id)s
       and pages.title_search @@ query.any_of
       and (pages.title_search @@ query.all_of or pages.status <> 'text')
       and pages.ingestion_id in (select ingestion_id from scope)
       and (%(sheet_key)s::text is null or pages.sheet_key = %(sheet_key)s)
     order by is_whole desc, ts_rank(pages.title_search, query.any_of, 1) desc,
           pages.ingestion_id, pages.page_index
     limit %(limit)s
"""
)


def _rank_by_title(
    conn: Connection, scope: Scope, query: str, limit: int
) -> list[tuple[int, int, bool]]:
    """Sheets by their titles: (ingestion, page, whether every word of the query is in it)."""
    parameters = {"query": query.translate(_TO_SPACES), "limit": limit}
    return conn.execute(_BY_TITLE, scope.parameters | parameters).fetchall()


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


_BETWEEN_WORDS = re.compile(r"[\s,;:!?()\[\]/|\"']+")


def sheet_keys(query: str) -> list[str]:
    """What in a query may be a sheet number, as matching keys: `a 101` and `A-101` give `A101`.

    The whole query; each word that has a letter and a digit; and a short word of letters together
    with the number after it.
    """
    words = [word for word in _BETWEEN_WORDS.split(query) if re.search(r"\w", word)]
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
                   'english', translate(chunk.text, %(parted)s, %(stand_ins)s),
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
                "query": query.translate(_TO_SPACES),
                "parted": _PARTED,
                "stand_ins": _STAND_INS,
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
    line = re.sub(r"\s+", " ", marked.strip()).translate(_FROM_STAND_INS)
    for part in re.split(f"([{_MARK_START}{_MARK_STOP}])", line):
        if part == _MARK_START:
            start = len(text)
        elif part == _MARK_STOP:
            marks.append((start, len(text)))
        else:
            text += part
    return text, marks
