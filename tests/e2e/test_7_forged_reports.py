"""Who may report what: the token names the pod, and nothing in the body counts."""

from __future__ import annotations

import base64
import json
import textwrap

from tests.e2e import jobs, runs
from tests.e2e.cluster import NAMESPACE, RECONCILE, Cluster
from tests.e2e.kubectl import Kubectl

_POST = textwrap.dedent("""
    import json, ssl, sys, urllib.request, urllib.error
    url, token, body = sys.argv[1:4]
    context = ssl.create_default_context(cadata=sys.stdin.read())
    request = urllib.request.Request(
        url + "/v1/runs", data=body.encode(), method="POST",
        headers={"Authorization": "Bearer " + token, "Content-Type": "application/json"})
    try:
        print(urllib.request.urlopen(request, timeout=10, context=context).status)
    except urllib.error.HTTPError as error:
        print(error.code)
""")

_CODES = ("bad-token", "bad-audience", "no-pod", "not-injected")
"""Of what is forged here; reports of pods that are deleted meanwhile have another."""


def test_forged_reports_are_refused(cluster: Cluster, namespace: Kubectl) -> None:
    namespace.apply(jobs.policy(), jobs.pytorch_job(workers=0))
    committed = runs.committed_beyond(namespace, 5)
    body = json.dumps({"leader": "forged", "sequence": 10**9, "world": 1, "settled": True})
    secret = cluster.kubectl.namespaced(NAMESPACE).get("secret", "keepstep-peers-ca")
    assert secret is not None
    ca = base64.b64decode(secret["data"]["ca.crt"]).decode()

    def post(token: str) -> int:
        url = f"https://keepstep-reports.{NAMESPACE}.svc"
        output = namespace(
            "exec", "-i", "gpt-master-0", "-c", "pytorch", "--", "python3", "-c", _POST,
            url, token, body, input=ca,
        )  # fmt: skip
        return int(output.strip().splitlines()[-1])

    other_audience = namespace("create", "token", "default").strip()
    no_pod = namespace("create", "token", "default", "--audience=reports.keepstep.dev").strip()
    assert post("not-a-token") == 401
    assert post(other_audience) == 401
    assert post(no_pod) == 403
    # a pod that nobody injected
    uninjected = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger"},
        "spec": {"containers": [jobs.trainer(steps=1) | {"command": ["sleep", "600"], "args": []}]},
    }  # fmt: skip
    namespace.apply(uninjected)
    namespace.eventually(lambda: namespace.get("pod", "stranger"), what="the stranger")
    bound = namespace(
        "create", "token", "default", "--audience=reports.keepstep.dev",
        "--bound-object-kind=Pod", "--bound-object-name=stranger",
    ).strip()  # fmt: skip
    assert post(bound) in (403, 404)
    for _ in range(3):
        post("not-a-token")
    assert runs.committed_beyond(namespace, committed) > committed, "the run is unharmed"
    log = cluster.kubectl.namespaced(NAMESPACE)("logs", "-l", RECONCILE, "--tail=2000")
    refused = [
        line
        for line in log.splitlines()
        if "api.request_refused" in line and any(f'"{code}"' in line for code in _CODES)
    ]
    assert 1 <= len(refused) <= 4, "once for each source and reason, not once a report"
