"""`inject(pod, policy, defaults) -> pod`: pure, idempotent, and nothing of the user's pod is lost.

inject            the whole injection, in order; start reading here
settings          what the chart fixes for all pods (`InjectionDefaults`)
containers        the sidecar, the init container, and what the training container gets
volumes           memory, token, and the policy's volumes
tiers             what peers and an archive need: variables, credentials, mounts
ports             the ports that the sidecar opens
affinity          preferences: nodes that hold shards of the run, apart from pods of its peers
resources         requests and limits; `accounting: CarveOut`
namespace_limits  what the namespace's LimitRanges and quotas leave for them
skip_annotation   what a pod without a sidecar carries instead
"""

from keepstep_operator.injection.affinity import NearNode
from keepstep_operator.injection.chart_defaults import InjectionDefaults
from keepstep_operator.injection.inject import inject, is_injected
from keepstep_operator.injection.namespace_limits import NamespaceLimits
from keepstep_operator.injection.skip_reason import annotate_skip

__all__ = [
    "InjectionDefaults",
    "NamespaceLimits",
    "NearNode",
    "annotate_skip",
    "inject",
    "is_injected",
]
