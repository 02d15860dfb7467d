"""A pod that asked for keepstep and does not get it carries the reason. People see it on the pod,
and the reconciler turns it into an Event on the job."""

from __future__ import annotations

from copy import deepcopy

from keepstep_operator.api.pod import Injected, parse_pod
from keepstep_operator.names import INJECTED_LABEL, REFUSED, STATUS_ANNOTATION
from keepstep_operator.object_body import Body


def annotate_skip(pod: Body, *, reason: str, message: str) -> Body:
    """The pod plus the annotation keepstep.dev/status, which says why it has no sidecar, and the
    label by which the reconciler finds it."""
    injected = Injected(policy=parse_pod(pod).policy or "", reason=reason, message=message)
    result = deepcopy(pod)
    metadata = result["metadata"] = {**(result.get("metadata") or {})}
    annotations = metadata.get("annotations") or {}
    metadata["annotations"] = {**annotations, STATUS_ANNOTATION: injected.render()}
    metadata["labels"] = {**(metadata.get("labels") or {}), INJECTED_LABEL: REFUSED}
    return result
