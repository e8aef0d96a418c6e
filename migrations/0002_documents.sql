-- Drawing sets: projects, files, their leased ingestions, and the pages and chunks these make.
--
-- A file is a name in a project; its bytes have a version. An ingestion turns one version into
-- pages and chunks, and carries the same lease columns as connection_runs. Searchers see only
-- what files.published_ingestion_id points at, so a version appears whole or not at all.
--
-- Locks are always taken in this order: workspace, connection, file, ingestion, pages, chunks.

create extension if not exists vector;

create table projects (
    id bigint generated always as identity primary key,
    workspace_id bigint not null references workspaces,
    name text not null check (name <> ''),
    -- What this project sets apart from the defaults: embedder, chunk_tokens, chunk_overlap.
    settings jsonb not null default '{}' check (jsonb_typeof(settings) = 'object'),
    created_at timestamptz not null default now(),
    unique (workspace_id, name),
    unique (id, workspace_id)
);

create table files (
    id bigint generated always as identity primary key,
    workspace_id bigint not null references workspaces,
    project_id bigint not null,
    connection_id bigint,
    name text not null check (name <> ''),
    status text not null default 'ready' check (status in ('ready', 'removed')),
    sha256 bytea not null check (octet_length(sha256) = 32),
    size_bytes bigint not null check (size_bytes > 0),
    -- The version the bytes above are, and the last version an ingestion was made for.
    version integer not null default 1 check (version > 0),
    queued_version integer not null default 0 check (queued_version between 0 and version),
    published_ingestion_id bigint,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    removed_at timestamptz,
    foreign key (project_id, workspace_id) references projects (id, workspace_id),
    foreign key (connection_id, workspace_id) references connections (id, workspace_id),
    unique (id, workspace_id),
    constraint removed_says_when check ((status = 'removed') = (removed_at is not null)),
    constraint removed_publishes_nothing
        check (status <> 'removed' or published_ingestion_id is null)
);

create unique index files_one_name on files (project_id, name) where status = 'ready';
create index files_unqueued on files (id) where status = 'ready' and queued_version < version;
create index files_by_content on files (sha256) where status = 'ready';
create index files_by_connection on files (connection_id) where connection_id is not null;
create index files_removed on files (removed_at) where status = 'removed';

create table file_ingestions (
    id bigint generated always as identity primary key,
    workspace_id bigint not null references workspaces,
    project_id bigint not null,
    file_id bigint not null,
    version integer not null check (version > 0),
    sha256 bytea not null check (octet_length(sha256) = 32),
    size_bytes bigint not null check (size_bytes > 0),
    status text not null default 'queued'
        check (status in ('queued', 'running', 'ready', 'failed', 'cancelled')),
    attempts integer not null default 0 check (attempts >= 0),
    failures integer not null default 0 check (failures >= 0),
    crashes integer not null default 0 check (crashes >= 0),
    timeout_seconds double precision check (timeout_seconds > 0),
    created_at timestamptz not null default now(),
    queued_at timestamptz not null default now(),
    started_at timestamptz,
    finished_at timestamptz,
    lease_owner text,
    lease_token bigint,
    lease_expires_at timestamptz,
    cancel_requested_at timestamptz,
    error_code text,
    error text,
    -- The fingerprint, stored before the first page (model.Fingerprint).
    extractor text,
    chunker text,
    embedder text,
    -- The checkpoint. planned_units grows with the pages; total_units is set once they are all in.
    page_count integer check (page_count > 0),
    processed_pages integer not null default 0 check (processed_pages >= 0),
    image_only_pages integer not null default 0 check (image_only_pages >= 0),
    failed_pages integer not null default 0 check (failed_pages >= 0),
    planned_units integer not null default 0 check (planned_units >= 0),
    total_units integer check (total_units >= 0),
    processed_units integer not null default 0 check (processed_units >= 0),
    -- Since when no search and no retry can want its pages and chunks: a later version was
    -- published, or the file was removed. And when they had all been deleted.
    unread_at timestamptz,
    swept_at timestamptz,
    foreign key (project_id, workspace_id) references projects (id, workspace_id),
    foreign key (file_id, workspace_id) references files (id, workspace_id),
    constraint running_means_leased check (
        (status = 'running') = (lease_owner is not null)
        and (status = 'running') = (lease_token is not null)
        and (status = 'running') = (lease_expires_at is not null)
    ),
    constraint running_has_started check (status <> 'running' or started_at is not null),
    constraint finished_means_terminal
        check ((status in ('ready', 'failed', 'cancelled')) = (finished_at is not null)),
    constraint failed_says_why check (status <> 'failed' or error_code is not null),
    constraint pages_within_the_document
        check (processed_pages = 0 or processed_pages <= page_count),
    constraint gaps_within_the_pages check (image_only_pages + failed_pages <= processed_pages),
    constraint units_within_the_plan check (processed_units <= planned_units),
    constraint a_total_is_the_whole_plan
        check (total_units is null or (total_units = planned_units and processed_pages = page_count)),
    constraint pages_have_a_fingerprint check (
        processed_pages = 0
        or (extractor is not null and chunker is not null and embedder is not null)
    ),
    constraint ready_is_complete check (
        status <> 'ready'
        or (total_units is not null and total_units > 0 and processed_units = total_units)
    ),
    constraint only_the_unread_is_swept
        check (swept_at is null or (unread_at is not null and finished_at is not null))
) with (fillfactor = 80);  -- Room for a checkpoint's new version beside the old.

-- L11: one active ingestion a file.
create unique index file_ingestions_one_active
    on file_ingestions (file_id) where status in ('queued', 'running');
-- Without lease_expires_at, or every checkpoint and renewal would write to all the indexes.
-- The condition is not said as in the index above, or the planner may take that for the claim.
create index file_ingestions_claim on file_ingestions (queued_at, id) where finished_at is null;
create index file_ingestions_history on file_ingestions (file_id, id);
create index file_ingestions_unswept
    on file_ingestions (unread_at) where unread_at is not null and swept_at is null;
-- Whether a blob is still wanted.
create index file_ingestions_by_content on file_ingestions (sha256);

alter table files
    add foreign key (published_ingestion_id) references file_ingestions (id);
create index files_by_published on files (published_ingestion_id)
    where published_ingestion_id is not null;

create table ingestion_attempts (
    ingestion_id bigint not null references file_ingestions on delete cascade,
    attempt integer not null check (attempt > 0),
    lease_token bigint not null unique,
    worker text not null,
    started_at timestamptz not null,
    seen_at timestamptz not null,
    ended_at timestamptz,
    outcome text check (
        outcome in ('ready', 'failed', 'cancelled', 'retried', 'released', 'expired')
    ),
    error_code text,
    error text,
    retry_at timestamptz,
    -- The ledger. `first_…` is the checkpoint this attempt found, `…_begun` how far it may have
    -- gone beyond its last commit: written with that commit, so a SIGKILL cannot hide it.
    first_page integer not null default 0,
    pages_read integer not null default 0,
    pages_begun integer not null default 0,
    first_unit integer not null default 0,
    units_embedded integer not null default 0,
    units_reused integer not null default 0,
    units_begun integer not null default 0,
    committed_at timestamptz,
    primary key (ingestion_id, attempt),
    constraint ended_has_an_outcome check ((ended_at is null) = (outcome is null)),
    constraint only_a_retry_has_a_time check (retry_at is null or outcome in ('retried', 'released'))
);

create unique index ingestion_attempts_one_open
    on ingestion_attempts (ingestion_id) where ended_at is null;

create table pages (
    ingestion_id bigint not null references file_ingestions,
    page_index integer not null check (page_index >= 0),
    workspace_id bigint not null,
    status text not null check (status in ('text', 'image_only', 'failed')),
    reason text,
    detail text,
    parser text not null,
    text text not null,
    label text,
    bookmark text,
    sheet_number text,
    -- The sheet number as it is matched: A-101, A101 and a 101 are one.
    sheet_key text,
    sheet_title text,
    sheet_source text check (sheet_source in ('label', 'bookmark', 'title_block')),
    width double precision not null,
    height double precision not null,
    rotation integer not null check (rotation in (0, 90, 180, 270)),
    chunk_count integer not null check (chunk_count >= 0),
    -- A scan has no text of its own and is found by what its sheet is called.
    title_search tsvector not null generated always as (
        to_tsvector(
            'english',
            translate(coalesce(sheet_title, '') || ' ' || coalesce(bookmark, ''), '<>/', '   ')
        )
    ) stored,
    primary key (ingestion_id, page_index),
    constraint failed_says_why check ((status = 'failed') = (reason is not null)),
    constraint only_text_has_text
        check ((status = 'text') = (text <> '') and (status = 'text' or chunk_count = 0)),
    constraint a_number_has_a_source check ((sheet_number is null) = (sheet_source is null)),
    constraint a_number_has_a_key check ((sheet_number is null) = (sheet_key is null))
);

create index pages_by_sheet on pages (workspace_id, sheet_key) where sheet_key is not null;
create index pages_by_title on pages using gin (title_search);

create table embedders (
    id integer generated always as identity primary key,
    identity text not null unique check (identity <> ''),
    dimensions integer not null check (dimensions > 0)
);

create table chunks (
    ingestion_id bigint not null references file_ingestions,
    chunk_index integer not null check (chunk_index >= 0),
    workspace_id bigint not null,
    page_index integer not null,
    embedder_id integer not null references embedders,
    tokens integer not null check (tokens > 0),
    text_hash bytea not null check (octet_length(text_hash) = 32),
    text text not null check (text <> ''),
    embedding halfvec not null,
    -- To Postgres <EXISTING WALL> is a tag of HTML, and not indexed, and SUPPLY/RETURN is one word,
    -- the name of a file. On drawings they are words; queries are parted in the same way.
    search tsvector not null generated always as (
        to_tsvector('english', translate(text, '<>/', '   '))
    ) stored,
    primary key (ingestion_id, chunk_index)
);

create index chunks_search on chunks using gin (search);
-- Where an embedding can be used again: the same text, the same embedder, the same workspace.
create index chunks_by_text on chunks (workspace_id, embedder_id, text_hash);

-- One row: which database this is. A folder of blobs remembers the databases that use it, and is
-- tidied only by the one that has it to itself (planroom.orphans).
create table installation (
    id boolean primary key default true check (id),
    uuid uuid not null default gen_random_uuid()
);

insert into installation default values;
