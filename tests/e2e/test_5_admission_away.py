"""The webhook does not answer: pods start all the same, and somebody is told."""

from __future__ import annotations

import base64
import datetime
import json
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.e2e import jobs, runs
from tests.e2e.cluster import ADMISSION, CERTIFICATES, NAMESPACE, OPERATOR, Cluster
from tests.e2e.kubectl import Kubectl, Object
from tests.harness import eventually


@pytest.fixture
def admission_is_back(turn_alone: None, namespace: Kubectl) -> Iterator[None]:
    """Before others have their turn. That its pods are ready is not all: nodes hear of a Service's
    pods a moment later, as the API server does of a webhook's authority."""
    yield
    namespace.apply(jobs.policy())
    jobs.all_inject(namespace, jobs.owner(namespace))


_AWAY = pytest.mark.usefixtures("admission_is_back")
_TARPIT = textwrap.dedent("""
    import socket, time
    server = socket.create_server(("", 9443))
    taken = []
    while True:
        taken.append(server.accept())  # and never a word
""")


@contextmanager
def _scaled(cluster: Cluster, replicas: int) -> Iterator[None]:
    """So many admission pods; 0 is a Service without endpoints."""
    system = cluster.kubectl.namespaced(NAMESPACE)
    system("scale", "deployment/keepstep-admission", f"--replicas={replicas}")
    try:
        system.eventually(lambda: len(system.list("pods", ADMISSION)) == replicas, what="scaled")
        yield
    finally:
        system("scale", "deployment/keepstep-admission", "--replicas=2")
        cluster.admission_settled()


@contextmanager
def _tarpit(cluster: Cluster) -> Iterator[None]:
    """The Service leads to somebody who takes every connection and never answers."""
    system = cluster.kubectl.namespaced(NAMESPACE)
    service = system.get("service", "keepstep-admission")
    assert service is not None
    own = service["spec"]["selector"]
    (port,) = service["spec"]["ports"]
    container = {
        "name": "tarpit",
        "image": OPERATOR,
        "command": ["python3", "-c", _TARPIT],
        "ports": [{"name": port["targetPort"], "containerPort": 9443}],
    }
    system.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "tarpit", "labels": {"app": "tarpit"}},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
        }
    )
    try:
        system("wait", "pod/tarpit", "--for=condition=Ready", "--timeout=240s", timeout_s=250)
        _select(system, {**dict.fromkeys(own), "app": "tarpit"})
        system.eventually(lambda: _endpoints(system) == ["tarpit"], what="the Service leads there")
        yield
    finally:
        _select(system, {**own, "app": None})
        system("delete", "pod", "tarpit", "--wait=false")


def _select(system: Kubectl, selector: dict[str, str | None]) -> None:
    patch = json.dumps({"spec": {"selector": selector}})
    system("patch", "service", "keepstep-admission", "--type=merge", "-p", patch)


def _endpoints(system: Kubectl) -> list[str]:
    """Names of the pods behind admission's Service."""
    slices = system.list("endpointslices", "kubernetes.io/service-name=keepstep-admission")
    return [
        endpoint["targetRef"]["name"] for part in slices for endpoint in part["endpoints"] or ()
    ]


def _starts_without_us(kubectl: Kubectl, job: str = "gpt") -> str:
    """A job's pod is made without a sidecar, and the run says so; its message."""
    kubectl.apply(jobs.policy(), jobs.pytorch_job(job, workers=0))
    pod = kubectl.eventually(lambda: kubectl.get("pod", f"{job}-master-0"), what="the pod")
    assert "keepstep.dev/injected" not in pod["metadata"].get("labels", {})
    kubectl.eventually(
        lambda: ("PyTorchJob", job) in {_about(event) for event in kubectl.events("NotInjected")},
        what="an event on the job",
    )
    return str(runs.becomes(kubectl, "FullyInjected", "False", job=job)["message"])


def _about(event: Object) -> tuple[str, str]:
    return event["involvedObject"]["kind"], event["involvedObject"]["name"]


@_AWAY
def test_pods_start_without_admission_and_the_run_reports_the_missing_sidecars(
    cluster: Cluster, namespace: Kubectl
) -> None:
    owner = jobs.owner(namespace)

    def waits() -> float:
        begun = time.monotonic()
        assert not jobs.is_injected(namespace, owner)
        return time.monotonic() - begun

    with _scaled(cluster, 0):
        assert "gpt-" in _starts_without_us(namespace), "it names a pod"
        with _tarpit(cluster):
            # until nodes route to it, calls may still fail at once; a busy machine takes longer
            eventually(
                lambda: 9.0 < waits() < 14.0,
                within_s=120,
                what="a wait for the webhook's timeout, which is 10 s",
            )
            _starts_without_us(namespace, "late")


@_AWAY
def test_with_failure_policy_fail_annotated_pods_wait_and_others_start(
    cluster: Cluster, namespace: Kubectl
) -> None:
    namespace.apply(jobs.policy())
    owner = jobs.owner(namespace)
    cluster.install("--set", "admission.failurePolicy=Fail")
    try:
        with _scaled(cluster, 0):
            with pytest.raises(RuntimeError, match="failed calling webhook"):
                jobs.admitted(namespace, jobs.owned_pod("asks", owner))
            other = jobs.owned_pod("other", owner)
            del other["metadata"]["annotations"]
            assert jobs.admitted(namespace, other)
    finally:
        cluster.install()


@_AWAY
def test_an_expired_webhook_certificate_is_reported_and_replaced(
    cluster: Cluster, namespace: Kubectl
) -> None:
    system = cluster.kubectl.namespaced(NAMESPACE)
    namespace.apply(jobs.policy())
    owner = jobs.owner(namespace)
    expired, key = _expired(f"keepstep-admission.{NAMESPACE}.svc")
    system("scale", "deployment/keepstep-certificates", "--replicas=0")
    try:
        # its last round would replace what is served here
        system.eventually(lambda: not system.list("pods", CERTIFICATES), what="no keeper of it")
        _serve_certificate(cluster, expired, key)
        # a kubelet may give a new pod the Secret as it was a moment ago, and the new one later
        namespace.eventually(
            lambda: jobs.injected(namespace, owner) == {False}, what="the expired one is served"
        )
        _starts_without_us(namespace)
    finally:
        system("scale", "deployment/keepstep-certificates", "--replicas=1")
        system.eventually(
            lambda: _served(cluster) != expired, within_s=90, what="a new certificate"
        )
        # rather than wait for kubelets
        system("rollout", "restart", "deployment/keepstep-admission")
        cluster.admission_settled()
    jobs.all_inject(namespace, owner)


def _serve_certificate(cluster: Cluster, certificate: bytes, key: bytes) -> None:
    system = cluster.kubectl.namespaced(NAMESPACE)
    data = {
        name: base64.b64encode(value).decode()
        for name, value in (("tls.crt", certificate), ("tls.key", key))
    }
    patch = json.dumps({"data": data})
    system("patch", "secret", "keepstep-admission-tls", "--type=merge", "-p", patch)
    system("rollout", "restart", "deployment/keepstep-admission")  # rather than wait for kubelets
    cluster.admission_settled()


def _served(cluster: Cluster) -> bytes:
    secret = cluster.kubectl.namespaced(NAMESPACE).get("secret", "keepstep-admission-tls")
    assert secret is not None
    return base64.b64decode(secret["data"]["tls.crt"])


def _expired(name: str) -> tuple[bytes, bytes]:
    """PEM of a certificate that ended yesterday, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=90))
        .not_valid_after(now - datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM), pem


def test_no_pod_is_missed_while_the_certificate_is_replaced(
    cluster: Cluster, namespace: Kubectl
) -> None:
    namespace.apply(jobs.policy())
    owner = jobs.owner(namespace)
    system = cluster.kubectl.namespaced(NAMESPACE)
    jobs.all_inject(namespace, owner)
    before = _bundle(cluster)
    system("annotate", "secret", "keepstep-admission-tls", "keepstep.dev/rotate-ca=now")
    pods = 0

    def both_are_trusted() -> bool:
        nonlocal pods
        pods += 1
        assert jobs.is_injected(namespace, owner, f"p{pods}"), f"pod {pods} was missed"
        return _bundle(cluster).count(b"BEGIN CERTIFICATE") > before.count(b"BEGIN CERTIFICATE")

    eventually(both_are_trusted, within_s=120, what="the bundle holds the new certificate, too")
    for number in range(20):
        assert jobs.is_injected(namespace, owner, f"after{number}")


def _bundle(cluster: Cluster) -> bytes:
    (found,) = cluster.kubectl.list(
        "mutatingwebhookconfigurations", "app.kubernetes.io/name=keepstep"
    )
    return base64.b64decode(found["webhooks"][0]["clientConfig"].get("caBundle", ""))


@_AWAY
def test_an_emptied_ca_bundle_of_the_webhook_is_restored(cluster: Cluster) -> None:
    kubectl = cluster.kubectl
    (before,) = kubectl.list("mutatingwebhookconfigurations", "app.kubernetes.io/name=keepstep")
    name = before["metadata"]["name"]
    kubectl(
        "patch", "mutatingwebhookconfiguration", name, "--type=json",
        "-p", '[{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": ""}]',
    )  # fmt: skip
    kubectl.eventually(
        lambda: (kubectl.get("mutatingwebhookconfiguration", name) or {})["webhooks"][0][
            "clientConfig"
        ]["caBundle"],
        within_s=90,
        what="the CA bundle is back",
    )
