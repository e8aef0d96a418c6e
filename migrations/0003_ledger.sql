-- The kill ledger: what each attempt did, what of it was done before, and what its end cost.
--
-- `…_again` compares where an attempt began with how far the attempts before it had gone without
-- committing. It is an upper bound: an attempt notes ahead how far it may go (…_begun), since one
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
       greatest(0, coalesce(before.pages_begun, 0) - attempt.first_page) as pages_read_again,
       attempt.first_unit,
       attempt.units_embedded,
       attempt.units_reused,
       greatest(0, coalesce(before.units_begun, 0) - attempt.first_unit) as units_embedded_again,
       case when attempt.outcome in ('expired', 'released', 'retried') then
           greatest(0, extract(epoch from
               attempt.seen_at - coalesce(attempt.committed_at, attempt.started_at)))
       else 0 end as seconds_lost,
       extract(epoch from coalesce(attempt.ended_at, now()) - attempt.started_at) as seconds
  from ingestion_attempts as attempt
  join file_ingestions as job on job.id = attempt.ingestion_id
  left join lateral (
      select max(earlier.pages_begun) as pages_begun, max(earlier.units_begun) as units_begun
        from ingestion_attempts as earlier
       where earlier.ingestion_id = attempt.ingestion_id
         and earlier.attempt < attempt.attempt
         and earlier.outcome = 'expired'
  ) as before on true;

-- Files as people ask for them: what is searchable, and what is being done about the rest.
create view file_overview as
select files.id,
       files.workspace_id,
       projects.name as project,
       files.name,
       files.version,
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
