"""Projects: named scopes in a workspace, each with the settings it sets apart from the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import psycopg
from psycopg.types.json import Jsonb
from pydantic import ValidationError

from planroom.config import Settings
from planroom.errors import NotFound, PlanroomError

Connection = psycopg.Connection[Any]

SETTINGS = ("embedder", "chunk_tokens", "chunk_overlap")
"""What a project may set for itself; each decides a part of the fingerprint."""


_FIND = "select id from projects where workspace_id = %(workspace_id)s and name = %(name)s"
_ENSURE = """
    insert into projects (workspace_id, name) values (%(workspace_id)s, %(name)s)
    on conflict (workspace_id, name) do update set name = excluded.name
    returning id
"""


def find_project(conn: Connection, workspace_id: int, name: str) -> int:
    """The id of a project of this workspace. Raises NotFound."""
    row = conn.execute(_FIND, {"workspace_id": workspace_id, "name": name}).fetchone()
    if row is None:
        raise NotFound(f"There is no project {name!r} in this workspace.")
    return cast(int, row[0])


def ensure_project(conn: Connection, workspace_id: int, name: str) -> int:
    """The id of the project of this name, made if it is new."""
    parameters = {"workspace_id": workspace_id, "name": name}
    row = conn.execute(_FIND, parameters).fetchone()
    if row is None:
        row = conn.execute(_ENSURE, parameters).fetchone()
    return cast(int, cast(tuple[Any, ...], row)[0])


_SET = """
    update projects
       set settings = %(settings)s
     where id = %(project_id)s and workspace_id = %(workspace_id)s
"""


def set_project_settings(
    conn: Connection,
    workspace_id: int,
    project_id: int,
    settings: Mapping[str, Any],
    defaults: Settings,
) -> None:
    """Set what this project's files are indexed with; takes effect at their next ingestion.

    Raises PlanroomError for a setting that a project does not have, or a value that with the
    defaults makes no sense, and NotFound.
    """
    unknown = sorted(set(settings) - set(SETTINGS))
    if unknown:
        raise PlanroomError(f"A project has no setting {unknown[0]!r}.", code="unknown_setting")
    _merged(defaults, settings)
    changed = conn.execute(
        _SET,
        {
            "settings": Jsonb(dict(settings)),
            "project_id": project_id,
            "workspace_id": workspace_id,
        },
    ).rowcount
    if not changed:
        raise NotFound(f"There is no project {project_id} in this workspace.")


_SETTINGS = """
    select settings from projects where id = %(project_id)s and workspace_id = %(workspace_id)s
"""


def project_settings(
    conn: Connection, workspace_id: int, project_id: int, defaults: Settings
) -> Settings:
    """The settings in force for a project: its own over the defaults."""
    row = conn.execute(
        _SETTINGS, {"project_id": project_id, "workspace_id": workspace_id}
    ).fetchone()
    if row is None:
        raise NotFound(f"There is no project {project_id} in this workspace.")
    return _merged(defaults, row[0]) if row[0] else defaults


_EMBEDDERS = """
    select distinct settings->>'embedder'
      from projects
     where workspace_id = %(workspace_id)s
       and (%(project_id)s::bigint is null or id = %(project_id)s)
       and settings->>'embedder' is not null
"""


def embedders_set(
    conn: Connection, workspace_id: int, project_id: int | None, defaults: Settings
) -> set[str]:
    """The embedders that the defaults, or a project's own settings, name: of one, or of all."""
    parameters = {"workspace_id": workspace_id, "project_id": project_id}
    return {defaults.embedder, *(row[0] for row in conn.execute(_EMBEDDERS, parameters))}


def _merged(defaults: Settings, own: Mapping[str, Any]) -> Settings:
    """The defaults with a project's own settings over them, checked as a whole."""
    given = {name: getattr(defaults, name) for name in Settings.model_fields}
    try:
        return Settings(_env_file=None, **{**given, **own})  # pyright: ignore[reportCallIssue]
    except ValidationError as error:
        said = "; ".join(str(problem["msg"]) for problem in error.errors())
        raise PlanroomError(
            f"The settings of the project make no sense: {said}.", code="setting_invalid"
        ) from None
