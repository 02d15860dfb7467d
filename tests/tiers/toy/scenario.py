"""A life of a run whose packages have the tier `vault`: run by test_a_new_tier, on copies of the
packages, which come first in PYTHONPATH. Prints `passed` at its end."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(ROOT), str(ROOT / "tests/sidecar")]

import jsonschema  # noqa: E402
import yaml  # noqa: E402
from operator_host import OperatorHost, make_identity  # noqa: E402
from pods import Pod  # noqa: E402
from trainer import FakeTrainer, content, read_image  # noqa: E402

from keepstep.steps import StepId, Tier  # noqa: E402
from keepstep.wire.run_reports import RunReport  # noqa: E402
from keepstep_operator.api.policy import parse_policy  # noqa: E402
from keepstep_operator.injection import inject  # noqa: E402
from tests.chart.schemas import closed, json_schema  # noqa: E402
from tests.harness import eventually  # noqa: E402
from tests.operator.injection.pods import DEFAULTS, policy_body, pytorch_job  # noqa: E402


def asked_for(copy: Path) -> None:
    """The policy's spec: it fits the CRD, and its pods get what their sidecars need."""
    body = policy_body(vault={"claimName": "shared"})
    crd = yaml.safe_load((copy / "crds/keepstep.dev_checkpointpolicies.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    jsonschema.validate(body["spec"], closed(json_schema(schema)))
    pod = inject(pytorch_job(), parse_policy(body), DEFAULTS)["spec"]
    (sidecar,) = (
        container for container in pod["initContainers"] if container["name"] == "keepstep-sidecar"
    )
    (path,) = (
        variable["value"] for variable in sidecar["env"] if variable["name"] == "KEEPSTEP_VAULT"
    )
    (mount,) = (mount for mount in sidecar["volumeMounts"] if mount["mountPath"] == path)
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == mount["name"])
    assert volume["persistentVolumeClaim"] == {"claimName": "shared"}


def written(sidecar: Pod, vault: Path, operator: OperatorHost) -> StepId:
    """A committed step goes there, and is listed, shown, counted and reported."""
    trainer = FakeTrainer(sidecar.socket).begin_run()
    step_id = trainer.stage(3)
    assert trainer.wait(step_id, "committed", flush=True).reached
    (image,) = sidecar.root.glob("0*/rank-*.safetensors")
    copy = vault / "run" / str(step_id) / image.name
    eventually(copy.exists, what="the step in the vault")
    assert copy.read_bytes() == image.read_bytes()
    eventually(lambda: "vault" in status(sidecar, step_id)["ranks"], what="a status that lists it")
    shown = sidecar.get("/v1/status")
    assert StepId.parse(_text(shown["watermarks"]["vault"])) == step_id
    assert (shown["tiers"]["vault"]["where"], shown["tiers"]["vault"]["sent"]) == (str(vault), 1)
    assert re.search('keepstep_tier_sent_shards_total{.*tier="vault".*} 1', metrics(sidecar))
    trainer.disconnect()
    report = eventually(lambda: reported(operator), what="a report that lists it")
    assert report.watermarks[Tier.VAULT] == step_id
    return step_id


def status(sidecar: Pod, step_id: StepId) -> dict[str, list[int]]:
    steps = sidecar.get("/v1/status")["steps"]
    return next(step for step in steps if step["id"]["step"] == step_id.step)


def metrics(sidecar: Pod) -> str:
    import http.client
    import socket

    connection = http.client.HTTPConnection("localhost", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(sidecar.socket))
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()


def reported(operator: OperatorHost) -> RunReport | None:
    report = operator.newest
    return report if report is not None and Tier.VAULT in report.watermarks else None


def _text(step_id: dict[str, object]) -> str:
    epoch = step_id["epoch"]
    assert isinstance(epoch, dict)
    return f"{epoch['number']:04d}.{epoch['nonce']}-{step_id['step']:09d}"


def read_back(sidecar: Pod, step_id: StepId) -> None:
    """Memory and volume are lost: the step comes from there."""
    trainer = FakeTrainer(sidecar.socket)
    trainer.connect()
    found = eventually(lambda: trainer.candidates().candidates, what="a candidate")
    assert [shard.id for shard in found] == [step_id]
    opened = trainer.open(step_id)
    assert opened.tier is Tier.VAULT
    assert read_image(trainer.layout, opened.path) == content(trainer.layout, step_id.step)
    trainer.disconnect()


def main(copy: Path, home: Path) -> None:
    asked_for(copy)
    memory, vault = Path(tempfile.mkdtemp(prefix="keepstep-vault-", dir="/dev/shm")), home / "vault"
    vault.mkdir()
    identity = make_identity(home / "tls")
    operator = OperatorHost(identity).start()
    sidecar = Pod(0, memory=memory, home=home, url=operator.url, ca=identity.pem)
    sidecar.program = ("/usr/bin/env", *sidecar.program)  # not forked from the tests' own packages
    try:
        step_id = written(sidecar.start("--vault", str(vault)), vault, operator)
        sidecar.kill()
        sidecar.lose_memory()
        shutil.rmtree(sidecar.volume)
        read_back(sidecar.start("--vault", str(vault)), step_id)
    finally:
        sidecar.end()
        operator.stop()
        shutil.rmtree(memory, ignore_errors=True)
    print("passed")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
