-- The kill ledger: what each attempt did, what of it was done before, and what its end cost.
--
-- `…_again` is what the last attempt that had begun left uncommitted, and this one therefore does
-- once more. It is an upper bound: an attempt notes ahead how far it may go (…_begun), since one
-- that is killed cannot say how far it went.

create view ingestion_ledger as
select attempt.ingestion_id,
       job.workspace_id,
       job.file_id,
       attempt.attempt,
       attempt.worker,
       attempt.lease_token,
       attempt.started_at,
       attempt.ended_at,
       attempt.outcome,
       attempt.error_code,
       attempt.error,
       attempt.retry_at,
       attempt.first_page,
       attempt.pages_read,
       coalesce(before.pages_wasted, 0) as pages_read_again,
       attempt.first_unit,
       attempt.units_embedded,
       attempt.units_reused,
       coalesce(before.units_wasted, 0) as units_embedded_again,
       case when attempt.outcome in ('expired', 'released', 'retried') then
           greatest(0, extract(epoch from
               attempt.seen_at - coalesce(attempt.committed_at, attempt.started_at)))
       else 0 end as seconds_lost,
       extract(epoch from coalesce(attempt.ended_at, now()) - attempt.started_at) as seconds
  from ingestion_attempts as attempt
  join file_ingestions as job on job.id = attempt.ingestion_id
  left join lateral (
      select greatest(0, earlier.pages_begun - earlier.first_page - earlier.pages_read)
                 as pages_wasted,
             greatest(0, earlier.units_begun - earlier.first_unit
                 - earlier.units_embedded - earlier.units_reused) as units_wasted
        from ingestion_attempts as earlier
       where earlier.ingestion_id = attempt.ingestion_id
         and earlier.attempt < attempt.attempt
         and earlier.committed_at is not null
         and attempt.committed_at is not null
       order by earlier.attempt desc
       limit 1
  ) as before on true;

-- Files as people ask for them: what is searchable, and what is being done about the rest.
create view file_overview as
select files.id,
       files.workspace_id,
       projects.name as project,
       files.name,
       files.version,
       -- The newest bytes wait for the ingestion in front of them to end.
       files.queued_version < files.version as waits_for_its_turn,
       files.size_bytes,
       files.published_ingestion_id,
       published.version as published_version,
       latest.id as ingestion_id,
       latest.status,
       latest.attempts,
       latest.queued_at,
       latest.started_at,
       latest.finished_at,
       latest.lease_owner,
       latest.lease_expires_at,
       latest.cancel_requested_at,
       latest.error_code,
       latest.error,
       latest.page_count,
       latest.processed_pages,
       latest.image_only_pages,
       latest.failed_pages,
       latest.planned_units,
       latest.total_units,
       latest.processed_units
  from files
  join projects on projects.id = files.project_id
  left join file_ingestions as published on published.id = files.published_ingestion_id
  left join lateral (
      select *
        from file_ingestions
       where file_ingestions.file_id = files.id
       order by file_ingestions.id desc
       limit 1
  ) as latest on true
 where files.status = 'ready';

-- How many jobs want a worker: what an autoscaler asks, in one row. A job that runs counts, so that
-- scaling down does not aim at it; what is due later does not, nor does anything that waits while
-- the fleet is paused, since no worker would take it.
create view fleet_depth as
with paused as (
    select count(*) > 0 as it_is from maintenance_state where paused_at is not null
), ingestions as (
    select count(*) filter (where status = 'running') as running,
           count(*) filter (where status = 'queued' and queued_at <= now()) as due,
           extract(epoch from now() - min(queued_at)
               filter (where status = 'queued' and queued_at <= now())) as oldest_seconds
      from file_ingestions
     where status in ('queued', 'running')
), runs as (
    select count(*) filter (where status = 'running') as running,
           count(*) filter (where status = 'queued' and queued_at <= now()) as due,
           extract(epoch from now() - min(queued_at)
               filter (where status = 'queued' and queued_at <= now())) as oldest_seconds
      from connection_runs
     where status in ('queued', 'running')
)
select ingestions.running + runs.running
           + case when paused.it_is then 0 else ingestions.due + runs.due end as jobs,
       ingestions.running + runs.running as running,
       ingestions.due + runs.due as due,
       greatest(ingestions.oldest_seconds, runs.oldest_seconds)::double precision
           as oldest_seconds,
       paused.it_is as paused
  from paused, ingestions, runs;
