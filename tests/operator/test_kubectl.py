"""`kubectl keepstep` against the stand-in of an API server: what it shows, and what it writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from keepstep_operator import __version__, names
from keepstep_operator.kube import RUNS
from keepstep_operator.kubectl.main import cli
from tests.operator.apiserver import ApiServer, Body

NEW, OLD, OTHER = (
    "0002.bbbbbbbb-000000040",
    "0001.aaaaaaaa-000000020",
    "0002.bbbbbbbb-000000020",
)
JOB = {
    "kind": "PyTorchJob",
    "metadata": {"name": "fork"},
    "spec": {
        "pytorchReplicaSpecs": {
            kind: {
                "template": {
                    "metadata": {"annotations": {"keepstep.dev/policy": "default"}},
                    "spec": {"containers": [{"name": "pytorch"}]},
                }
            }
            for kind in ("Master", "Worker")
        }
    },
}


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    """A run `gpt` of namespace n with a pinned and an archived step, and a fork of it."""
    async with ApiServer().running() as one:
        monkeypatch.setenv("KUBECONFIG", str(one.kubeconfig(tmp_path)))
        status = {
            "jobName": "job",
            "phase": "Running",
            "step": 41,
            "committed": {"step": 40, "id": NEW},
            "watermarks": {"memory": NEW, "local": NEW},
            "epoch": "0002.bbbbbbbb",
            "protected": "True",
            "sidecarVersion": __version__,
            "libraryVersion": __version__,
        }
        run = {"metadata": {"name": "gpt", "namespace": "n"}, "spec": {}, "status": status}
        one.put(RUNS, run | {"spec": {"pins": [OLD]}})
        fork = {"origin": f"gpt/{OLD}", "phase": "Finished", "jobName": "second"}
        one.put(RUNS, {"metadata": {"name": "fork", "namespace": "n"}, "status": fork})
        _checkpoint(one, OLD, ["archive"])
        yield one


def _checkpoint(server: ApiServer, step: str, tiers: list[str]) -> None:
    path = f"/apis/{names.API_VERSION}/namespaces/n/checkpoints/gpt-{step}"
    body = {"metadata": {"name": f"gpt-{step}", "namespace": "n"}}
    server.add(path, body | {"spec": {"run": "gpt", "step": step}, "status": {"tiers": tiers}})


async def _said(*arguments: str, input: str | None = None) -> Result:
    """In a thread: the server answers in this one."""
    return await asyncio.to_thread(CliRunner().invoke, cli, arguments, input=input)


async def _ok(*arguments: str, input: str | None = None) -> str:
    result = await _said(*arguments, input=input)
    assert result.exit_code == 0, result.output
    return result.stdout


def _spec(server: ApiServer, run: str = "gpt") -> Body:
    return server.take(RUNS, run, namespace="n").get("spec", {})  # type: ignore[no-any-return]


async def test_steps_are_told_with_their_tiers_newest_first(server: ApiServer) -> None:
    found = json.loads(await _ok("steps", "gpt", "-o", "json"))
    assert [(one["id"], one["tiers"]) for one in found] == [
        (NEW, ["memory", "local"]),
        (OLD, ["archive"]),
    ]
    assert [(one["committed"], one["pinned"]) for one in found] == [(True, False), (False, True)]
    assert NEW in await _ok("steps", "gpt")


async def test_a_rollback_is_the_field_of_the_run_and_nothing_else(server: ApiServer) -> None:
    said = await _ok("rollback", "gpt", "20")
    assert _spec(server) == {"pins": [OLD], "restoreFrom": "20"}
    assert "kubectl -n n describe ckrun gpt" in said
    assert [one.method for one in server.requests if one.method != "GET"] == ["PATCH"]


async def test_a_rollback_to_a_step_that_the_api_does_not_know_says_so(server: ApiServer) -> None:
    result = await _said("rollback", "gpt", "5")
    assert result.exit_code == 0, "a pod may have it"
    assert "knows of no step 5 of run gpt (there is: 40, 20)" in result.stderr
    assert "NotFound" in result.stderr
    assert "no step" not in (await _said("rollback", "gpt", "20")).stderr


async def test_a_fresh_start_is_an_annotation_and_nothing_else(server: ApiServer) -> None:
    said = await _ok("fresh-start", "gpt")
    assert "if no step can be restored" in said
    (written,) = [one for one in server.requests if one.method != "GET"]
    assert written.method == "PATCH"
    assert written.body == {"metadata": {"annotations": {"keepstep.dev/fresh-start": "allow"}}}


async def test_a_step_of_another_run_is_no_rollback(server: ApiServer) -> None:
    result = await _said("rollback", "gpt", "other/20")
    assert result.exit_code == 2
    assert "kubectl keepstep fork" in result.stderr
    assert "restoreFrom" not in _spec(server)


async def test_steps_are_pinned_and_unpinned_by_number_or_full_id(server: ApiServer) -> None:
    await _ok("pin", "gpt", "40")
    assert _spec(server)["pins"] == [OLD, NEW]
    await _ok("pin", "gpt", NEW)
    assert _spec(server)["pins"] == [OLD, NEW]
    await _ok("unpin", "gpt", "20")
    assert _spec(server)["pins"] == [NEW]
    await _ok("pin", "fork", OLD)
    assert _spec(server, "fork") == {"pins": [OLD]}


async def test_a_number_of_two_epochs_or_of_none_is_refused_with_what_to_give(
    server: ApiServer,
) -> None:
    _checkpoint(server, OTHER, ["archive"])
    for step, told in (("20", f"{OTHER}, {OLD}"), ("7", "full id"), ("newest", "no step")):
        result = await _said("pin", "gpt", step)
        assert result.exit_code == 2
        assert told in result.stderr
    assert (await _said("unpin", "gpt", NEW)).exit_code == 2
    assert _spec(server)["pins"] == [OLD]


async def test_a_spec_that_changed_meanwhile_is_not_written_over(server: ApiServer) -> None:
    def before(method: str, path: str) -> None:
        if method == "PATCH":
            server.objects[path]["spec"] = {"pins": [OLD, OTHER]}

    server.before = before
    result = await _said("pin", "gpt", NEW)
    assert result.exit_code == 1
    assert "meanwhile" in result.stderr
    assert _spec(server)["pins"] == [OLD, OTHER]


async def test_a_fork_is_a_manifest_with_the_annotation_in_every_template(
    server: ApiServer,
) -> None:
    said = await _ok("fork", "gpt", "20", "-f", "-", input=yaml.safe_dump(JOB))
    for replica in yaml.safe_load(said)["spec"]["pytorchReplicaSpecs"].values():
        annotations = replica["template"]["metadata"]["annotations"]
        assert annotations == {
            "keepstep.dev/policy": "default",
            names.RESTORE_FROM_ANNOTATION: "gpt/20",
        }
    assert {one.method for one in server.requests} == {"GET"}


async def test_logs_are_of_every_pod_with_a_sidecar(server: ApiServer) -> None:
    for name in ("gpt-0", "gpt-1"):
        labels = {names.RUN_KEY_LABEL: "gpt", names.INJECTED_LABEL: "true"}
        path = f"/api/v1/namespaces/n/pods/{name}"
        server.add(path, {"metadata": {"name": name, "namespace": "n", "labels": labels}})
        server.logs[path] = f"hello from {name}\nbye\n"
    assert (await _ok("logs", "gpt", "--tail", "5", "--previous")).splitlines() == [
        "gpt-0: hello from gpt-0", "gpt-0: bye", "gpt-1: hello from gpt-1", "gpt-1: bye",
    ]  # fmt: skip
    (asked, _) = server.asked("GET", "/log")
    assert asked.query == {
        "container": names.SIDECAR_CONTAINER, "tailLines": "5", "previous": "true",
    }  # fmt: skip
    assert (await _said("logs", "fork")).exit_code == 1


def _installed(server: ApiServer, *, ca: str = "Y2E=", ready: int = 1) -> None:
    labels = {"app.kubernetes.io/name": "keepstep"}
    webhook: Any = {"metadata": {"name": "keepstep", "labels": labels}}
    webhook["webhooks"] = [{"clientConfig": {"caBundle": ca}}]
    kind = "mutatingwebhookconfigurations"
    server.add(f"/apis/admissionregistration.k8s.io/v1/{kind}/keepstep", webhook)
    for component in ("admission", "reconcile", "certificates"):
        metadata = {
            "name": f"keepstep-{component}",
            "namespace": "keepstep-system",
            "labels": labels | {"app.kubernetes.io/component": component},
        }
        path = f"/apis/apps/v1/namespaces/keepstep-system/deployments/{metadata['name']}"
        status = {"readyReplicas": ready}
        server.add(path, {"metadata": metadata, "spec": {"replicas": 1}, "status": status})
    node = {"metadata": {"name": "a"}, "status": {"allocatable": {"hugepages-2Mi": "320Mi"}}}
    server.add("/api/v1/nodes/a", node)


async def _findings() -> tuple[int, dict[str, str]]:
    """Exit code, and the worst result of each check."""
    result = await _said("doctor", "-o", "json")
    found: dict[str, str] = {}
    for one in json.loads(result.stdout):
        found[one["check"]] = min(found.get(one["check"], "z"), one["result"])
    return result.exit_code, found


async def test_the_doctor_finds_nothing_where_all_is_there(server: ApiServer) -> None:
    _installed(server)
    checks = ("kinds", "webhook", "operator", "huge pages")
    assert await _findings() == (0, dict.fromkeys(checks, "ok"))
    assert "1 of 1 nodes have hugepages-2Mi" in await _ok("doctor")


async def test_the_doctor_names_what_is_bad(server: ApiServer) -> None:
    code, found = await _findings()
    assert (code, found["webhook"], found["operator"]) == (1, "bad", "bad")
    _installed(server, ca="", ready=0)
    code, found = await _findings()
    bad = {check for check, result in found.items() if result == "bad"}
    assert (code, bad) == (1, {"webhook", "operator"})


async def test_a_name_never_leads_to_another_object(server: ApiServer) -> None:
    before = deepcopy(server.objects)
    for name in ("gpt/../fork", "../checkpointpolicies/nvme", "gpt?x=1", "gpt#"):
        assert (await _said("pin", name, "3")).exit_code == 1
    assert server.objects == before


async def test_a_fork_changes_no_other_value(server: ApiServer) -> None:
    odd = "starts: 12:00:00\nsince: 2001-12-14T21:59:43Z\nmode: 0755\ncount: 5\nalso: 1_000\n"
    said = await _ok("fork", "gpt", "20", "-f", "-", input=yaml.safe_dump(JOB) + odd)
    found = yaml.load(said, yaml.BaseLoader)
    assert [found[key] for key in ("starts", "since", "also")] == [
        "12:00:00", "2001-12-14T21:59:43Z", "1_000",
    ]  # fmt: skip
    assert yaml.safe_load(said)["count"] == 5
    assert yaml.safe_load(said)["mode"] == 0o755


_ESC = "\x1b]0;pwned\x07\x1b[8m\u202e\x9b1A"


@pytest.mark.parametrize(
    "words",
    ["runs", "steps gpt", "tree gpt", "logs gpt", "doctor", "pin gpt 7", "rollback gpt other/7",
     "steps other", "fork gpt 20 -f -"],
)  # fmt: skip
async def test_nothing_that_a_pod_wrote_is_a_command_for_the_terminal(
    server: ApiServer, words: str
) -> None:
    """Every text of the objects has control sequences in it; errors that quote it, too."""
    body = server.take(RUNS, "gpt", namespace="n")
    for name in ("jobName", "phase", "protected", "epoch", "sidecarVersion", "libraryVersion"):
        body["status"][name] += _ESC
    server.put(RUNS, body | {"status": body["status"] | {"origin": f"x{_ESC}/{OLD}"}})
    _pod_of_gpt(server)
    result = await _said(*words.split(), input=yaml.safe_dump({**JOB, "note": _ESC}))
    said = f"{result.output}{result.stderr}"
    assert said
    assert [one for one in said if not one.isprintable() and one not in "\n\t"] == []


def _pod_of_gpt(server: ApiServer) -> None:
    labels = {names.RUN_KEY_LABEL: "gpt", names.INJECTED_LABEL: names.INJECTED}
    path = "/api/v1/namespaces/n/pods/gpt-0"
    server.add(path, {"metadata": {"name": "gpt-0", "namespace": "n", "labels": labels}})
    server.logs[path] = f"one{_ESC}\ntwo"
