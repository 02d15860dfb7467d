"""Messages about pods for people: what happened and what to do. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from keepstep_operator import names
from keepstep_operator.api.cluster_objects import Job, PodRecord, RunKey

LIBRARY_S: Final = 60.0
"""From the start of a training container until its trainer must have come to the sidecar."""
_NAMED: Final = 3


def few(texts: Collection[str]) -> str:
    """The first few, and how many more there are."""
    named = sorted(texts)[:_NAMED]
    more = len(texts) - len(named)
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def and_more(pods: Collection[str]) -> str:
    """The end of a sentence about the first of these pods; '' if there is only one."""
    return f" (the same holds for {len(pods) - 1} more pods)" if len(pods) > 1 else ""


def not_injected_text(pod: PodRecord) -> str:
    """A pod that asked for a sidecar and got none."""
    again = f"kubectl delete pod -n {pod.namespace} {pod.name}"
    why = (
        f"{pod.trouble.rstrip('.')}. Then let its job make it again: {again}"
        if pod.trouble
        else "It was created while admission did not answer: delete it, so that its job makes it"
        f" again ({again})"
    )
    return (
        f"pod {pod.name} asks for keepstep (annotation {names.POLICY_ANNOTATION}: {pod.policy}) but"
        " has no sidecar, so no step of this run can become committed, and if it has steps already"
        f" its restarts fail rather than begin at step 0. {why}"
    )


def other_job_text(pod: PodRecord, holder: Job | None, run: RunKey) -> str:
    """A pod of another job than the one that has the run of its label."""
    own, other = _named(pod.job), _named(holder)
    return (
        f"pod {pod.name} of {own} has the label {names.RUN_LABEL}: {run.name}, but {other} has that"
        f" run: nothing of {own} is kept, and {other} goes on. Give it a label of its own. Or end"
        f" {other} and delete its pods: then {own} goes on with the run"
    )


def _named(job: Job | None) -> str:
    return f"{job.kind} {job.name}" if job is not None else "another job"


def same_rank_text(rank: int, pods: Collection[str]) -> str:
    """Several pods that stay have one node rank."""
    return (
        f"pods {few(pods)} share node rank {rank}, so the leader takes the reports of one of"
        f" them and no step of the run can become committed: give each pod the label"
        f" {names.NODE_RANK_LABEL} with a number of its own, or each job a run of its own (label"
        f" {names.RUN_LABEL})"
    )


def describe_missing_trainer(pod: str) -> str:
    """A training container runs, but no trainer has come to its sidecar."""
    return (
        f"the training container of pod {pod} runs for more than {LIBRARY_S:.0f} s, but no trainer"
        " has connected to its sidecar: is keepstep in the image (pip install ./lib of its"
        " source, or the wheel of a release), and does the script make a"
        " keepstep.Checkpointer? Training goes on unprotected"
    )


def explain_set_aside_steps(run: RunKey) -> str:
    """What to do about steps that a fresh start set aside."""
    return (
        "They are kept, and fill the volumes. If that start was wanted, let them go: kubectl"
        f" annotate checkpointrun -n {run.namespace} {run.name}"
        f" {names.FRESH_START_ANNOTATION}=newest; if not, stop the job and look for the volume that"
        " was not mounted, or for the former drive"
    )


def cordoned_sole_copy_text(node: str, step: int | None) -> str:
    """A cordoned node holds the only copy of some shards of the newest commit."""
    which = f"step {step}, the newest commit," if step is not None else "the newest commit"
    return (
        f"node {node} is cordoned, and some shards of {which} lie on it alone: when it goes, the"
        " run goes back to an older step, or cannot go on. Let the job end or save elsewhere first"
        " (see peers and archive of its policy), or uncordon the node"
    )
