"""`worker`, `workers`, `pause`, `resume`, `runs` and `run`: who works, and what became of it."""

from __future__ import annotations

import getpass
import socket
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planroom.cli.opening import open_room, read_settings
from planroom.cli.option import JsonOption, examples
from planroom.cli.output import Output
from planroom.cli.progress import duration
from planroom.cli.table import ago, said_of_pause, table

if TYPE_CHECKING:
    from planroom.config import Settings

Row = dict[str, Any]

commands = typer.Typer()


@commands.command(
    rich_help_panel="Fleet",
    epilog=examples(
        "planroom worker",
        "planroom worker --processes 4",
        "planroom worker --until-idle",
    ),
)
def worker(
    once: Annotated[bool, typer.Option("--once", help="Poll once, do one job at most.")] = False,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when nothing is queued or running.")
    ] = False,
    processes: Annotated[
        int, typer.Option("--processes", "-n", min=1, max=256, help="Workers to run at once.")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Work on whatever is queued, for every workspace, until SIGTERM or Ctrl-C.

    Then the job in hand goes back to the queue at once, where it stopped. With --processes a
    supervisor starts that many workers and replaces those that die. What happens is logged on
    standard error, with --json as JSON.
    """
    if once and until_idle:
        raise typer.BadParameter("--once and --until-idle exclude each other")
    settings = read_settings(log_format="json" if as_json else None)
    if processes > 1:
        _supervise(settings, processes, once=once, until_idle=until_idle)
    else:
        _work(settings, once=once, until_idle=until_idle)


def _supervise(settings: Settings, processes: int, *, once: bool, until_idle: bool) -> None:
    from planroom.log import set_up_log
    from planroom.supervise import Supervisor, worker_command

    set_up_log(settings)
    command = worker_command(once=once, until_idle=until_idle, log_format=settings.log_format)
    raise typer.Exit(Supervisor(command, processes, ends=once or until_idle).run())


def _work(settings: Settings, *, once: bool, until_idle: bool) -> None:
    import structlog

    from planroom.log import set_up_log
    from planroom.room import PlanRoom
    from planroom.supervise import die_with_supervisor
    from planroom.version import version

    set_up_log(settings)
    log = structlog.get_logger("planroom")
    with closing(PlanRoom(settings)) as room:
        it = room.worker()
        with it.signals():
            die_with_supervisor()
            log.info("worker started", worker=it.name, version=version())
            it.run(once=once, idle=room.is_idle if until_idle else None)
        log.info("worker stopped", worker=it.name)


@commands.command(rich_help_panel="Fleet", epilog=examples("planroom workers"))
def workers(as_json: JsonOption = False) -> None:
    """List the workers, what each works on, and when it was last heard of.

    With --json: one document, `workers` and `paused`.
    """
    output = Output(as_json)
    with open_room() as room:
        rows, pause = room.workers(), room.paused()
    output.document({"workers": rows, "paused": pause})
    if pause is not None:
        output.say(said_of_pause(pause))
    if not rows:
        output.say("No worker is running. planroom worker starts one.")
        return
    output.say(
        table(
            ["worker", "works on", "started", "heard of", "version"],
            [
                [
                    row["id"],
                    row["working_on"] or "",
                    ago(row["started_at"]),
                    ago(row["heartbeat_at"])
                    if row["alive"]
                    else f"silent, {ago(row['heartbeat_at'])}",
                    row["version"],
                ]
                for row in rows
            ],
        )
    )


@commands.command(
    rich_help_panel="Fleet", epilog=examples('planroom pause --reason "moving the database"')
)
def pause(
    reason: Annotated[str | None, typer.Option("--reason", help="Why, for the others.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Stop claiming, on every worker; what runs goes on.

    With --json: `paused`, with `at`, `by` and `reason`.
    """
    output = Output(as_json)
    with open_room() as room:
        room.pause(_who(), reason)
        paused = room.paused()
    output.document({"paused": paused})
    output.say("Paused: no worker claims anything until `planroom resume`.")


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "someone"
    return f"{user}@{socket.gethostname()}"


@commands.command(rich_help_panel="Fleet", epilog=examples("planroom resume"))
def resume(as_json: JsonOption = False) -> None:
    """Let claiming go on.

    With --json: `resumed`, false when it was not paused.
    """
    output = Output(as_json)
    with open_room() as room:
        resumed = room.resume()
    output.document({"resumed": resumed})
    output.say("Claiming goes on." if resumed else "It was not paused.")


@commands.command(
    rich_help_panel="Fleet", epilog=examples("planroom runs", "planroom runs --status failed")
)
def runs(
    status: Annotated[
        str | None,
        typer.Option("--status", metavar="STATUS", help="Only those: queued, failed, ..."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Most shown.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List the runs of connections, newest first.

    With --json: one document, `runs`.
    """
    output = Output(as_json)
    with open_room() as room:
        rows = room.runs(status=status, limit=limit)
    output.document({"runs": rows})
    if not rows:
        output.say("No runs.")
        return
    columns = ["connection", ">run", "kind", "status", ">attempts", "queued", "took", "error"]
    output.say(table(columns, [_run_cells(row) for row in rows]))


def _run_cells(row: Row) -> list[str]:
    return [
        row["connection"],
        str(row["id"]),
        row["kind"],
        row["status"],
        str(row["attempts"]),
        ago(row["queued_at"]),
        _took(row["started_at"], row["finished_at"]),
        row["error"] or row["error_code"] or "",
    ]


def _took(start: Any, end: Any) -> str:
    return duration((end - start).total_seconds()) if start and end else ""


@commands.command(rich_help_panel="Fleet", epilog=examples("planroom run 17"))
def run(
    run_id: Annotated[int, typer.Argument(metavar="ID", help="As `planroom runs` lists it.")],
    as_json: JsonOption = False,
) -> None:
    """Show one run: its results, and every attempt: who held it, when, why it ended.

    With --json: the run with `lease_history` and `results`.
    """
    output = Output(as_json)
    with open_room() as room:
        found = room.run_history(run_id)
    output.document(found)
    output.say(
        f"run {found['id']}: {found['kind']} of {found['connection']} ({found['provider']}),"
        f" {found['status']}"
    )
    if found["error"] or found["error_code"]:
        output.say(f"  {found['error'] or ''} [{found['error_code']}]")
    if found["results"]:
        names = ["upserted", "unchanged", "deleted", "failed"]
        cells = [
            [row["table_name"], *(f"{row[name]:,}" for name in names), row["error"] or ""]
            for row in found["results"]
        ]
        output.say("", table(["table", *(f">{name}" for name in names), "error"], cells))
    if found["lease_history"]:
        output.say("", table(_LEASES, [_lease_cells(row) for row in found["lease_history"]]))


_LEASES = ["worker", ">attempt", ">token", "began", "took", "ended", "why"]


def _lease_cells(row: Row) -> list[str]:
    return [
        row["worker"],
        str(row["attempt"]),
        str(row["lease_token"]),
        ago(row["started_at"]),
        _took(row["started_at"], row["ended_at"]),
        row["outcome"] or "running",
        row["error"] or row["error_code"] or "",
    ]
