-- The engine of leased jobs: workspaces, connections, their runs, and who works on them.
--
-- A lease is four columns of the job's own row: owner, token, expiry and the status `running`.
-- Whoever can name all four may write; nobody else can (rule L2). Tokens come from one sequence
-- and are never used twice, so a worker that reclaims its own expired row is still told apart
-- from its earlier self. What each status implies is a CHECK below; the moves between them are
-- one guarded update each, in leasequeue.lease and leasequeue.runs.

create sequence lease_tokens as bigint;

create table workspaces (
    id bigint generated always as identity primary key,
    name text not null unique check (name <> ''),
    created_at timestamptz not null default now()
);

create table connections (
    id bigint generated always as identity primary key,
    workspace_id bigint not null references workspaces,
    name text not null check (name <> ''),
    provider text not null check (provider <> ''),
    config jsonb not null default '{}' check (jsonb_typeof(config) = 'object'),
    status text not null default 'active'
        check (status in ('active', 'disconnected', 'deleting')),
    interval_seconds integer check (interval_seconds > 0),
    next_run_at timestamptz,
    created_at timestamptz not null default now(),
    unique (workspace_id, name),
    unique (id, workspace_id),
    constraint only_active_connections_are_scheduled
        check (next_run_at is null or (status = 'active' and interval_seconds is not null))
);

create index connections_due on connections (next_run_at, id) where next_run_at is not null;

create table connection_runs (
    id bigint generated always as identity primary key,
    workspace_id bigint not null references workspaces,
    connection_id bigint not null,
    -- Copied from the connection, so that the limiter reads one table.
    provider text not null,
    -- `purge` runs alone in its workspace; any other kind is limited to one per provider. Kinds
    -- are open: a worker claims only those it has a handler for, and leaves the rest alone.
    kind text not null check (kind ~ '^[a-z][a-z0-9_]{0,62}$'),
    payload jsonb not null default '{}',
    status text not null default 'queued' check (
        status in ('waiting', 'queued', 'running', 'succeeded', 'partial', 'failed', 'cancelled')
    ),
    -- Every claim; the number of the attempt in run_attempts.
    attempts integer not null default 0 check (attempts >= 0),
    -- Retryable failures, and expired leases, in a row and without progress between them.
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
    foreign key (connection_id, workspace_id) references connections (id, workspace_id),
    constraint running_means_leased check (
        (status = 'running') = (lease_owner is not null)
        and (status = 'running') = (lease_token is not null)
        and (status = 'running') = (lease_expires_at is not null)
    ),
    constraint running_has_started check (status <> 'running' or started_at is not null),
    constraint finished_means_terminal check (
        (status in ('succeeded', 'partial', 'failed', 'cancelled')) = (finished_at is not null)
    ),
    constraint failed_says_why check (status <> 'failed' or error_code is not null),
    constraint only_a_purge_waits check (status <> 'waiting' or kind = 'purge')
) with (fillfactor = 80);  -- Room for a renewal's new version beside the old.

-- L11: one active run a connection, one pending purge a connection.
create unique index connection_runs_one_active
    on connection_runs (connection_id) where status in ('queued', 'running');
create unique index connection_runs_one_pending_purge
    on connection_runs (connection_id)
    where kind = 'purge' and status in ('waiting', 'queued', 'running');

-- The claim walks this index in order; finished runs are not in it, however many there are.
-- Its condition is said in other words than those of the indexes above, which would serve the
-- claim, too, but in no order: a planner with old statistics once took one for the other.
-- lease_expires_at is not in it: the claim could not use it there (a queued row has none), and
-- every renewal would write to all the indexes of the table instead of to none.
create index connection_runs_claim on connection_runs (queued_at, id) where finished_at is null;
-- Once the workspace is locked the claim decides among its runs alone: with 6,000 queued elsewhere
-- that takes 0.5 ms by this index, and 3.7 ms without.
create index connection_runs_claim_in_workspace
    on connection_runs (workspace_id, queued_at, id) where finished_at is null;
create index connection_runs_running
    on connection_runs (workspace_id, provider) where status = 'running';
create index connection_runs_history on connection_runs (connection_id, id);
create index connection_runs_finished on connection_runs (finished_at) where finished_at is not null;

create table run_attempts (
    run_id bigint not null references connection_runs on delete cascade,
    attempt integer not null check (attempt > 0),
    lease_token bigint not null unique,
    worker text not null,
    started_at timestamptz not null,
    -- The last sign of life: written by the keeper's control query, every two seconds.
    seen_at timestamptz not null,
    ended_at timestamptz,
    outcome text check (
        outcome in (
            'succeeded', 'partial', 'failed', 'cancelled', 'retried', 'released', 'expired'
        )
    ),
    error_code text,
    error text,
    retry_at timestamptz,
    primary key (run_id, attempt),
    constraint ended_has_an_outcome check ((ended_at is null) = (outcome is null)),
    constraint only_a_retry_has_a_time check (retry_at is null or outcome in ('retried', 'released'))
);

create unique index run_attempts_one_open on run_attempts (run_id) where ended_at is null;

create table run_results (
    run_id bigint not null references connection_runs on delete cascade,
    table_name text not null check (table_name <> ''),
    upserted bigint not null default 0 check (upserted >= 0),
    unchanged bigint not null default 0 check (unchanged >= 0),
    deleted bigint not null default 0 check (deleted >= 0),
    failed bigint not null default 0 check (failed >= 0),
    error text,
    primary key (run_id, table_name)
);

create table workers (
    id text primary key,
    host text not null,
    pid integer not null,
    version text not null,
    started_at timestamptz not null,
    heartbeat_at timestamptz not null,
    -- What it works on, for people: `connection_runs 17`. The lease itself is the truth.
    working_on text
);

create index workers_heartbeat on workers (heartbeat_at);

-- One row: a boolean primary key that must be true (L18).
create table maintenance_state (
    id boolean primary key default true check (id),
    paused_at timestamptz,
    paused_by text,
    reason text,
    constraint paused_says_who check ((paused_at is null) = (paused_by is null))
);

insert into maintenance_state default values;

-- When a stage that runs seldom last ran, so that a fleet runs it once and not once a worker.
create table stage_markers (
    name text primary key check (name <> ''),
    ran_at timestamptz not null
);

-- For dashboards. Their names and columns are stable; they cost nothing until they are read.

-- What waits and what runs, and for how long the oldest of each has been due.
create view engine_queue as
select workspaces.name as workspace,
       runs.kind,
       runs.provider,
       runs.status,
       count(*) as runs,
       extract(epoch from now() - min(runs.queued_at))::double precision as oldest_seconds
  from connection_runs as runs
  join workspaces on workspaces.id = runs.workspace_id
 where runs.status in ('waiting', 'queued', 'running')
 group by workspaces.name, runs.kind, runs.provider, runs.status;

-- Who holds what, and until when; a negative remainder is a dead worker's, to be claimed next.
create view engine_leases as
select runs.id as run_id,
       workspaces.name as workspace,
       connections.name as connection,
       runs.kind,
       runs.provider,
       runs.lease_owner,
       attempts.attempt,
       attempts.started_at,
       attempts.seen_at,
       extract(epoch from runs.lease_expires_at - now())::double precision as remaining_seconds,
       runs.cancel_requested_at
  from connection_runs as runs
  join workspaces on workspaces.id = runs.workspace_id
  join connections on connections.id = runs.connection_id
  join run_attempts as attempts
    on attempts.run_id = runs.id and attempts.lease_token = runs.lease_token
 where runs.status = 'running';

-- How attempts ended, hour by hour.
create view engine_attempts_hourly as
select date_trunc('hour', attempts.ended_at) as hour,
       workspaces.name as workspace,
       runs.kind,
       runs.provider,
       attempts.outcome,
       count(*) as attempts,
       avg(extract(epoch from attempts.ended_at - attempts.started_at))::double precision
           as mean_seconds
  from run_attempts as attempts
  join connection_runs as runs on runs.id = attempts.run_id
  join workspaces on workspaces.id = runs.workspace_id
 where attempts.ended_at is not null
 group by hour, workspaces.name, runs.kind, runs.provider, attempts.outcome;

-- Who is alive: a heartbeat within three of its intervals.
create view engine_workers as
select id,
       host,
       pid,
       version,
       started_at,
       heartbeat_at,
       extract(epoch from now() - heartbeat_at)::double precision as silent_seconds,
       heartbeat_at > now() - interval '45 seconds' as alive,
       working_on
  from workers;
