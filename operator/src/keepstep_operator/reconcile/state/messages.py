"""Messages for people: what happened, what it cost and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from keepstep.core.ledger import Outlook
from keepstep.core.ledger import Restart as Goes
from keepstep.errors import few
from keepstep.steps import StepId
from keepstep_operator import names
from keepstep_operator.api.model import Job, PodRecord, RunKey
from keepstep_operator.reconcile.state.drives import OtherDrive
from keepstep_operator.reconcile.state.restart_history import Restart
from keepstep_operator.reconcile.state.restore_request import RestoreRequest

_DRIVES_NAMED = 3


def not_injected(pod: PodRecord) -> str:
    """A pod that asked for a sidecar and got none."""
    return (
        f"pod {pod.name} asks for keepstep (annotation {names.POLICY_ANNOTATION}: {pod.policy}) but"
        " has no sidecar, so no step of this run can become committed, and if it has steps already"
        f" its restarts fail, lest it begin anew. {_why(pod)}"
    )


def rival(pod: PodRecord, holder: Job | None, run: RunKey) -> str:
    """A pod of another job than the one that has the run of its label."""
    own = _named(pod.job)
    other = _named(holder)
    return (
        f"pod {pod.name} of {own} has the label {names.RUN_LABEL}: {run.name}, but {other} has that"
        f" run: nothing of {own} is kept, and {other} goes on. Give it a label of its own. Or end"
        f" {other} and delete its pods: then {own} goes on with the run"
    )


def _named(job: Job | None) -> str:
    return f"{job.kind} {job.name}" if job is not None else "another job"


def _why(pod: PodRecord) -> str:
    """The reason that admission gave, or otherwise the likely one, and what to do."""
    again = f"kubectl delete pod -n {pod.namespace} {pod.name}"
    if pod.trouble:
        return f"{pod.trouble.rstrip('.')}. Then let its job make it again: {again}"
    return (
        "It was created while admission did not answer: delete it, so that its job makes it again"
        f" ({again})"
    )


def without_library(pod: str, *, after_s: float) -> str:
    """A training container runs, but no trainer has come to its sidecar."""
    return (
        f"the training container of pod {pod} runs for more than {after_s:.0f} s, but no trainer"
        " came to its sidecar: is keepstep in the image (pip install ./lib of its source, or the"
        " wheel of a release), and does the script"
        " make a keepstep.Checkpointer? Training goes on, nothing of it is protected"
    )


def restarted(
    restart: Restart, run: RunKey, *, kept_aside: bool, again: bool = False, other_drives: str = ""
) -> str:
    """Where an epoch of the run began, and what the restart cost. `kept_aside`: older steps still
    exist. `again`: of these, a part is gone for good. `other_drives`: as the function of this
    name."""
    lost = _steps_lost(restart.lost_steps)
    if restart.parent:
        where = f" from {restart.tier}" if restart.tier else ""
        seconds = f"{restart.seconds:.1f}" if restart.seconds >= 1 else f"{restart.seconds:.2f}"
        if restart.origin:
            return f"began from step {restart.step} of run {restart.origin}{where} in {seconds} s"
        return f"restored step {restart.step}{where} in {seconds} s; {lost}"
    if again:
        return (
            f"began again at step 0 ({lost}): a part of every step went with the pod that held it."
            " With peers or an archive in the policy, or hostPath volumes, it would not; with"
            " onLoss: Wait, the run would wait for a person"
        )
    if kept_aside:
        why = f": {other_drives}" if other_drives else ""
        return f"began at step 0 although older steps exist ({lost}){why}. {acknowledge(run)}"
    return (
        f"began at step 0: nothing older was left to restore ({lost}); volumes of kind emptyDir"
        " and ephemeral go with their pod, a hostPath stays on its node"
    )


def acknowledge(run: RunKey) -> str:
    """What to do about steps that a fresh start set aside."""
    return (
        "They are kept, and fill the volumes. If that start was wanted, let them go: kubectl"
        f" annotate checkpointrun -n {run.namespace} {run.name}"
        f" {names.FRESH_START_ANNOTATION}=newest; if not, stop the job and look for the volume that"
        " was not mounted, or for the former drive"
    )


def other_drives(found: Iterable[OtherDrive], pods: Mapping[int, str]) -> str:
    """Where other file systems lie than those of the run's shards. `pods`: names by node rank."""
    said = [
        f"volume {one.volume} of pod {pods.get(one.node_rank, one.node_rank)} lies on another file"
        f" system than its steps did ({one.now}, formerly {one.was})"
        for one in found
    ]
    return few(said, _DRIVES_NAMED)


def other_drive(said: str, run: RunKey, *, waits: bool) -> str:
    """A part of the run lay on a drive in whose place another one is now."""
    onward = (
        f"starts wait (onLoss: Wait). {begin_again(run)}"
        if waits
        else "the next start begins again at step 0; what is left of older steps is kept"
    )
    return f"{said}: what it held does not come back, and {onward}"


def rolled_back(restore_request: RestoreRequest) -> str:
    """An epoch began from the step that `spec.restoreFrom` asked for."""
    step = restore_request.id.step if restore_request.id else 0
    return f"epoch {restore_request.epoch} went on from step {step}, as spec.restoreFrom asked"


def draining(node: str, step: int | None) -> str:
    """A cordoned node holds the only copy of some shards of the newest commit."""
    which = f"step {step}, the newest commit," if step is not None else "the newest commit"
    return (
        f"node {node} is cordoned, and some shards of {which} lie on it alone: when it goes, the"
        " run goes back to an older step, or cannot go on. Let the job end or save elsewhere first"
        " (see peers and archive of its policy), or uncordon the node"
    )


def _steps_lost(count: int) -> str:
    if count == 0:
        return "no step lost"
    return "1 step lost" if count == 1 else f"{count} steps lost"


def last_step_lost(pod: PodRecord, before: StepId, after: Outlook, run: RunKey) -> str:
    """A pod was deleted before its last step was on anything that outlives the pod. `after`: what a
    restart does now."""
    step = after.step.step if after.step else 0
    onward = {
        Goes.GOES_ON: f"a restart goes on from step {step}",
        Goes.BEGINS: "nothing is left, so a restart begins at step 0",
        Goes.BEGINS_AGAIN: "the other pods do not have all of any step, so the run begins again at"
        " step 0",
        Goes.WAITS: "the other pods do not have all of any step, so restarts wait for what is"
        f" missing. {begin_again(run)}",
    }
    return (
        f"pod {pod.name} was deleted before step {before.step} was kept where it outlives the pod;"
        f" {onward[after.restart]}. Give the policy peers or an archive, and a flushTimeout that"
        " holds what a pod writes and sends"
    )


def begin_again(run: RunKey) -> str:
    """How a person has a run begin again that waits for what is missing."""
    return (
        "To begin again at step 0: kubectl annotate --overwrite checkpointrun -n"
        f" {run.namespace} {run.name} {names.FRESH_START_ANNOTATION}={names.FRESH_START_ALLOW}"
    )


def restore_refused(times: int, reason: str) -> str:
    """The ranks' vote refused to go on."""
    starts = "1 start was" if times == 1 else f"{times} starts were"
    return f"{starts} refused: {reason}"
