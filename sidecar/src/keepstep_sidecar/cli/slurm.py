"""The machines of a run under `srun`: what Slurm's environment says of a step."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

from keepstep.errors import UsageError
from keepstep_sidecar.config.sidecar import PEER_PORT

_TIMEOUT_S = 30.0


def read_node_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """`nodes`, `node_rank` and `leader`, by field of a Config, in a step of several nodes; else
    empty. A batch script itself is no step. Raises UsageError if the leader's name is not known."""
    nodes = environment.get("SLURM_STEP_NUM_NODES", "1")
    node_rank = environment.get("SLURM_NODEID", "")
    if not (nodes.isdecimal() and node_rank.isdecimal()) or int(nodes) < 2:
        return {}
    first = _first_host(environment.get("SLURM_STEP_NODELIST", ""), environment)
    leader = f"{first}:{PEER_PORT}"
    return {"nodes": int(nodes), "node_rank": int(node_rank), "leader": leader}


def _first_host(listed: str, environment: Mapping[str, str]) -> str:
    command = ("scontrol", "show", "hostnames", listed)
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        message = done.stderr.strip() or "it names no host"
        if done.returncode == 0 and done.stdout.split():
            return done.stdout.split()[0]
    except (OSError, subprocess.TimeoutExpired) as error:
        message = str(error)
    raise UsageError(
        f"`{' '.join(command)}` does not name the step's first node ({message}): say where it is"
        " found, with --leader HOST:PORT"
    )
