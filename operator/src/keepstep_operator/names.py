"""Every name that users, pods and the cluster see: labels, annotations, paths, ports, variables.

They are in one place, because admission, reconcile, chart and documentation must agree on them.
"""

from __future__ import annotations

GROUP = "keepstep.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

# --- what users write into a pod template ------------------------------------------------------

POLICY_ANNOTATION = "keepstep.dev/policy"
"""Name of a CheckpointPolicy of the pod's namespace. This annotation asks for keepstep."""
CONTAINER_ANNOTATION = "keepstep.dev/container"
"""The training container's name, if it is neither the one that the job kind fixes nor the first."""
JOB_INDEX_ANNOTATION = "keepstep.dev/job-index-label"
"""Which label of a JobSet's pods numbers the jobs that train."""
RUN_LABEL = "keepstep.dev/run"
"""Continues one run over several jobs."""
RESTORE_FROM_ANNOTATION = "keepstep.dev/restore-from"
"""`RUN/STEP`: a run without a step of its own begins from this step of the archive."""
FRESH_START_ANNOTATION = "keepstep.dev/fresh-start"
"""On a CheckpointRun: the epoch (or "newest") that rightly began at step 0. Older steps may then be
deleted."""
FRESH_START_ALLOW = "allow"
"""Its value that asks to begin at step 0 if no step can be restored. It becomes an epoch's name."""

POD_SECURITY_LABEL = "pod-security.kubernetes.io/enforce"
"""Of Kubernetes, on a namespace: the level of Pod Security that its pods must meet."""

# --- what injection adds -----------------------------------------------------------------------

INJECTED_LABEL = "keepstep.dev/injected"
"""On each pod that admission was asked about: `INJECTED`, or `REFUSED` if the annotation below says
why. It is one label, so that one selection finds all these pods."""
INJECTED = "true"
REFUSED = "refused"
RUN_KEY_LABEL = "keepstep.dev/run-key"
"""The run's directory name and the name of its CheckpointRun."""
NODE_RANK_LABEL = "keepstep.dev/node-rank"
AGENT_LABEL = "keepstep.dev/agent"
"""On the pods of the agents of nodes."""
STATUS_ANNOTATION = "keepstep.dev/status"
"""Annotation with JSON: policy, generation, sidecar image and version, training container, job."""

SIDECAR_CONTAINER = "keepstep-sidecar"
VOLUMES_CONTAINER = "keepstep-volumes"
"""Init container that makes the pod's directory below each hostPath, and gives it to the group."""
MEMORY_VOLUME = "keepstep-memory"
HUGE_VOLUME = "keepstep-hugepages"
TOKEN_VOLUME = "keepstep-token"
TRUST_VOLUME = "keepstep-trust"
VOLUME_PREFIX = "keepstep-volume-"

MEMORY_PATH = "/run/keepstep"
"""Slots and the socket, in both containers."""
SOCKET_PATH = f"{MEMORY_PATH}/sidecar.sock"
HUGE_PATH = "/keepstep/hugepages"
"""Slots on huge pages, in both containers."""
HUGE_PAGES = "hugepages-2Mi"
"""The resource that nodes offer and containers request."""
VOLUMES_PATH = "/keepstep/volumes"
COMPILE_CACHE_PATH = "/keepstep/compile-cache"
"""In the training container alone."""
ARCHIVE_VOLUME = "keepstep-archive"
ARCHIVE_PATH = "/keepstep/archive"
TOKEN_PATH = "/var/run/secrets/keepstep.dev/token"
TRUST_PATH = "/keepstep/trust"
"""Authorities of the reports API that replies named, for a restarted sidecar."""

SOCKET_ENV = "KEEPSTEP_SOCKET"
NODE_ENV = "KEEPSTEP_NODE"
"""The name of the pod's node."""
POD_ENV = "KEEPSTEP_POD"
"""The pod's UID."""
UI_PORT_ENV = "KEEPSTEP_UI_PORT"
UI_SECRET_ENV = "KEEPSTEP_UI_SECRET"
"""The pod's UID, which the page asks for."""
RESTORE_TIMEOUT_ENV = "KEEPSTEP_RESTORE_TIMEOUT"
"""In seconds, for the library in the training container."""

USER_ID = 65532
GROUP_ID = 65532
"""User and group of the sidecar. The pod gets the group as a supplemental one, so that trainers may
fill slots."""

# --- ports -------------------------------------------------------------------------------------

ADMISSION_PORT = 9443
REPORTS_PORT = 9444
METRICS_PORT = 9090
SIDECAR_METRICS_PORT = 26740
SIDECAR_PEER_PORT = 26741
"""Defaults of a policy; `injection.ports` says why these."""
SIDECAR_UI_PORT = 26742
"""Of the run's page, on its pod's loopback."""
