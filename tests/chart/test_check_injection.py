"""What `helm test` makes of a pod that the API server answers with."""

from __future__ import annotations

from charts.keepstep.files.check_injection import annotated_pod, problems


def test_checking_a_pod_without_a_sidecar_lists_everything_that_is_missing() -> None:
    found = "\n".join(problems(annotated_pod("default")))
    assert 'label keepstep.dev/injected="true"' in found
    assert "first init container is not keepstep-sidecar" in found
    assert "KEEPSTEP_SOCKET" in found
