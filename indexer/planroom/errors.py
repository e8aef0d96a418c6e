"""What can go wrong with a document, as types with a stable code, a sentence and what to do.

Three kinds matter to callers. `InputRefused` is said at the door and leaves nothing behind.
`DocumentFailed` seals an ingestion `failed` and is never retried. `leasequeue.Retryable` is
raised for what may pass (a busy embedding service, a full disk).
"""

from __future__ import annotations

from leasequeue import JobFailed


class PlanroomError(Exception):
    """The base of the errors that planroom raises to its callers."""

    code = "error"

    def __init__(self, message: str, *, code: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code if code is not None else type(self).code
        self.hint = hint


class InputRefused(PlanroomError):
    """A path that is not taken in: no row and no blob is left."""

    code = "refused"


class NotFound(PlanroomError):
    """No such file, project or run in this workspace."""

    code = "not_found"


class DatabaseUnusable(PlanroomError):
    """The server cannot be reached, or lacks what planroom needs."""

    code = "database_unusable"


class DocumentFailed(JobFailed):
    """This document cannot be indexed as it is: sealed `failed`, not retried.

    Codes: password_required, unreadable, no_text, too_many_bytes, too_many_pages,
    too_many_chunks, blob_missing, embedding_invalid, embedder_refused.
    """

    code = "document_failed"
