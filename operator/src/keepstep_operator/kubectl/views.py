"""What people see of runs, from the objects of the API. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keepstep.errors import UsageError
from keepstep.steps import NEAREST_FIRST, StepId

Body = dict[str, Any]


def summary(run: Body) -> Body:
    """A run as one row."""
    status = run.get("status", {})
    return {
        "run": run["metadata"]["name"],
        "job": status.get("jobName", ""),
        "phase": status.get("phase", ""),
        "step": status.get("step"),
        "committed": status.get("committed", {}).get("step"),
        "restarts": status.get("restarts", 0),
        "protected": status.get("protected", "Unknown"),
        "origin": status.get("origin", ""),
    }


def steps(run: Body, checkpoints: Iterable[Body]) -> list[Body]:
    """The run's steps that the API knows of, newest first: the newest of each tier, the pinned and
    the archived ones. Sidecars hold more; `keepstep steps` in a pod lists those."""
    status, pins = run.get("status", {}), pinned(run)
    committed = status.get("committed", {}).get("id", "")
    tiers: dict[str, set[str]] = {one: set() for one in (committed, *pins) if one}
    for tier, step in status.get("watermarks", {}).items():
        if step:
            tiers.setdefault(step, set()).add(tier)
    for one in checkpoints:
        held = one.get("status", {}).get("tiers", ())
        tiers.setdefault(one["spec"]["step"], set()).update(held)
    return [
        {
            "id": step,
            "step": StepId.parse(step).step,
            "epoch": str(StepId.parse(step).epoch),
            "tiers": [tier for tier in NEAREST_FIRST if tier in tiers[step]],
            "committed": step == committed,
            "pinned": step in pins,
        }
        for step in sorted(tiers, key=StepId.parse, reverse=True)
    ]


def pinned(run: Body) -> list[str]:
    return list(run.get("spec", {}).get("pins") or ())


def full_id(step: str, known: Sequence[Body]) -> str:
    """The full id of a step that is given by its number or full id. Raises UsageError if none or
    several of `known` have this number."""
    try:
        return str(StepId.parse(step))
    except ValueError:
        if not step.isdecimal():
            raise UsageError(
                f"{step!r} is no step: give a number, or a full id like 0003.1f9c2d7a-000001200"
            ) from None
    found = [str(one["id"]) for one in known if one["step"] == int(step)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"step {step} is of several epochs: name one of {', '.join(found)}")
    raise UsageError(
        f"the API knows of no step {step}: give the full id, as `keepstep steps` in a pod of the"
        " run shows it"
    )


def tree(run: Body, of_run: Sequence[Body], runs: Iterable[Body]) -> Body:
    """A run's epochs with their known steps, where the run began, and the runs that began from it.

    Which epoch went on from which step is recorded on the sidecars' volumes, not in the API; so
    epochs are only in order. `from`: for the epoch that the last spec.restoreFrom led to, its step.
    """
    status, name = run.get("status", {}), run["metadata"]["name"]
    epochs: dict[str, list[int]] = {}
    for one in of_run:
        epochs.setdefault(one["epoch"], []).append(one["step"])
    if now := status.get("epoch"):
        epochs.setdefault(now, [])
    asked = status.get("restoreFrom", {})
    forks = [
        {"run": one["metadata"]["name"], "origin": origin}
        for one in runs
        if (origin := one.get("status", {}).get("origin", "")).startswith(f"{name}/")
    ]
    return {
        "run": name,
        "origin": status.get("origin", ""),
        "epochs": [
            {
                "epoch": epoch,
                "steps": sorted(epochs[epoch]),
                "now": epoch == now,
                "from": asked.get("step", "") if asked.get("epoch") == epoch else "",
            }
            for epoch in sorted(epochs)
        ],
        "forks": forks,
    }


def drawn(tree: Body) -> list[str]:
    """The tree as lines for a terminal."""
    lines = [f"{tree['run']}" + (f"  (began from {tree['origin']})" if tree["origin"] else "")]
    branches = []
    for one in tree["epochs"]:
        said = f"  steps {', '.join(map(str, one['steps']))}" if one["steps"] else ""
        back = f"  (rolled back to {one['from']})" if one["from"] else ""
        branches.append(f"epoch {one['epoch']}{said}{back}{'  <- now' if one['now'] else ''}")
    branches += [f"fork {one['run']}  (from {one['origin']})" for one in tree["forks"]]
    last = len(branches) - 1
    marks = ["`-- " if at == last else "|-- " for at in range(len(branches))]
    return lines + [mark + branch for mark, branch in zip(marks, branches, strict=True)]


def with_fork(manifest: Body, origin: str, *, annotation: str) -> int:
    """Put the annotation into every pod template of a manifest, in place. Returns how many there
    are."""
    found, template = 0, manifest.get("template")
    if isinstance(template, dict) and "containers" in (template.get("spec") or {}):
        metadata = template["metadata"] = dict(template.get("metadata") or {})
        metadata["annotations"] = {**(metadata.get("annotations") or {}), annotation: origin}
        found = 1
    for value in manifest.values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                found += with_fork(one, origin, annotation=annotation)
    return found


def table(rows: Sequence[Sequence[object]], *, head: Sequence[str]) -> list[str]:
    """A table as kubectl prints it."""
    cells = [list(head), *([_cell(one) for one in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["   ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return "-" if value in (None, "") else str(value)
