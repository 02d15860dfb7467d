"""What belongs to the sidecar alone reaches the training container by no words of the pod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.operator.injection.pods import bare_pod, policy_body
from tests.operator.promises.surface import is_injected, webhook


@pytest.mark.parametrize("spec", [{"shareProcessNamespace": True}, {"hostPID": True}])
async def test_a_shared_process_namespace_is_never_passed_over_in_silence(
    tmp_path: Path, spec: dict[str, Any]
) -> None:
    pod = bare_pod()
    pod["spec"] |= spec
    async with webhook(tmp_path, policy_body()) as admission:
        created, warnings = await admission.create(pod)
    assert not is_injected(created) or any(next(iter(spec)) in one for one in warnings), warnings


@pytest.mark.parametrize("volume", ["keepstep-token", "keepstep-volume-scratch"])
async def test_the_training_container_does_not_get_the_sidecars_volumes_by_naming_them(
    tmp_path: Path, volume: str
) -> None:
    pod = bare_pod()
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": volume, "mountPath": "/mine"})
    async with webhook(tmp_path, policy_body()) as admission:
        created, _ = await admission.create(pod)
    mounted = [one["name"] for one in created["spec"]["containers"][0]["volumeMounts"]]
    assert not is_injected(created) or volume not in mounted
