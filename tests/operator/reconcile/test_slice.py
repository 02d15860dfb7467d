"""From a report to a status, through the real handlers."""

from __future__ import annotations

from pathlib import Path

from keepstep_operator.kube import SERVICES
from tests.harness import until
from tests.operator.apiserver import ApiServer, bound_to, put_policy
from tests.operator.injection.pods import policy_body
from tests.operator.reconcile.samples import KEY, pod_body, pod_path, report
from tests.operator.reconcile.serving import serving


async def test_a_report_becomes_a_status_and_is_answered(tmp_path: Path) -> None:
    cluster = ApiServer(tokens={"good": bound_to("team", "gpt-worker-0", "pod-0")})
    put_policy(cluster, {**policy_body(), "metadata": {"name": "default", "namespace": "team"}})
    for rank in (0, 1):
        cluster.objects[pod_path(f"gpt-worker-{rank}")] = pod_body(rank)
    async with serving(cluster, tmp_path) as served:
        await until(lambda: served.condition("FullyInjected") == ("True", "AllInjected"))
        answer = await served.report(report())
        assert [one["pod"] for one in answer["members"]] == ["pod-0", "pod-1"]
        await until(lambda: served.condition("Committing") == ("True", "Committing"))
        assert served.status()["committed"]["step"] == 100
        path = SERVICES.path(f"keepstep-{KEY.name}", namespace=KEY.namespace)
        service = await until(lambda: cluster.objects.get(path))
        assert service["spec"]["clusterIP"] == "None"
