"""The files in deploy/ are what their readers take: YAML of the right kinds, a unit for systemd.

And every query of docs/fleet.md runs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
import yaml

from planroom.config import Settings

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
SYSTEMD = ROOT / "deploy" / "systemd"


def documents(name: str) -> dict[str, Any]:
    """The objects of a file, by kind."""
    loaded = yaml.safe_load_all((KUBERNETES / name).read_text())
    return {entry["kind"]: entry for entry in cast(list[dict[str, Any]], list(loaded))}


def settings_in(environment: list[str]) -> set[str]:
    """Names of settings in variable names."""
    return {n.removeprefix("PLANROOM_").lower() for n in environment if n.startswith("PLANROOM_")}


def test_the_scaler_scales_the_deployment_by_the_depth_of_the_queue() -> None:
    fleet, keda = documents("worker.yaml"), documents("keda.yaml")
    assert set(fleet) == {"PersistentVolumeClaim", "Deployment", "Job"}
    scaled = keda["ScaledObject"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == fleet["Deployment"]["metadata"]["name"]
    (trigger,) = scaled["triggers"]
    assert trigger["type"] == "postgresql"
    assert trigger["metadata"]["query"] == "select jobs from fleet_depth"
    names = trigger["authenticationRef"]["name"]
    assert names == keda["TriggerAuthentication"]["metadata"]["name"]


def test_the_deployment_stops_slower_than_a_worker_leaves_and_knows_its_settings() -> None:
    deployment = documents("worker.yaml")["Deployment"]["spec"]
    pod = deployment["template"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert pod["terminationGracePeriodSeconds"] > 10
    (container,) = pod["containers"]
    assert container["args"] == ["planroom", "worker"]
    names = settings_in([entry["name"] for entry in container["env"]])
    assert names <= set(Settings.model_fields)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (SYSTEMD / "planroom-worker@.service").read_text()
    assert "ExecStart=/opt/planroom/bin/planroom worker\n" in unit
    # Verified with a program that exists on this machine.
    there = unit.replace("/opt/planroom/bin/planroom", sys.executable)
    (tmp_path / "planroom-worker@.service").write_text(there)
    shutil.copy(SYSTEMD / "planroom.target", tmp_path)
    done = subprocess.run(
        [analyze, "verify", "planroom-worker@1.service"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    seconds = re.search(r"^TimeoutStopSec=(\d+)s$", unit, re.MULTILINE)
    assert seconds is not None
    assert int(seconds[1]) > 10


def test_the_environment_file_names_settings_that_exist() -> None:
    lines = (SYSTEMD / "worker.env").read_text().splitlines()
    names = settings_in([line.partition("=")[0] for line in lines if not line.startswith("#")])
    assert names
    assert names <= set(Settings.model_fields)


def test_every_query_of_the_fleet_page_runs(connection: psycopg.Connection) -> None:
    page = (ROOT / "docs" / "fleet.md").read_text()
    blocks = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    queries = [q for block in blocks for q in block.split(";") if "select" in q]
    assert len(queries) == 7
    for query in queries:
        assert connection.execute(query.encode()).fetchall() == []


def test_the_depth_counts_what_wants_a_worker_now(connection: psycopg.Connection) -> None:
    connection.execute(
        """
        with workspace as (insert into workspaces (name) values ('w') returning id),
        source as (
            insert into connections (workspace_id, name, provider)
            select workspace.id, 'source ' || number, 'folder'
              from workspace, generate_series(1, 4) as number
            returning id, workspace_id, name
        )
        insert into connection_runs (
            workspace_id, connection_id, provider, kind, status, queued_at, started_at,
            finished_at, lease_owner, lease_token, lease_expires_at
        )
        select workspace_id, id, 'folder', 'sync',
               case name when 'source 3' then 'running' when 'source 4' then 'succeeded'
                   else 'queued' end,
               case name when 'source 2' then now() + interval '1 hour' else now() end,
               case name when 'source 3' then now() end,
               case name when 'source 4' then now() end,
               case name when 'source 3' then 'a' end, case name when 'source 3' then 1 end,
               case name when 'source 3' then now() + interval '1 hour' end
          from source
        """
    )
    depth = "select jobs, running, due, paused from fleet_depth"
    assert connection.execute(depth).fetchall() == [(2, 1, 1, False)]
    connection.execute("update maintenance_state set paused_at = now(), paused_by = 'me'")
    assert connection.execute(depth).fetchall() == [(1, 1, 1, True)]
