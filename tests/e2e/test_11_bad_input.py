"""What does not fit together: the run says what to do, and training goes on where it can."""

from __future__ import annotations

from tests.e2e import jobs, runs
from tests.e2e.kubectl import Kubectl, Object

_PATCHED = """
import runpy, keepstep, keepstep.wire.trainer
{change}
runpy.run_path("/train_gpt.py", run_name="__main__")
"""


def _library(change: str) -> Object:
    """A training image whose library is another one."""
    return jobs.pytorch_job(workers=0, command=["python3", "-c", _PATCHED.format(change=change)])


def test_too_little_memory_for_a_slot_is_named_and_training_goes_on(namespace: Kubectl) -> None:
    namespace.apply(jobs.policy(memory={"limit": "1Mi"}), jobs.pytorch_job(workers=0))
    runs.becomes(namespace, "Protected", "False", words="not one fits", within_s=90)
    runs.training_beyond(namespace, 5)


def test_a_volume_that_is_too_small_is_reported_and_steps_stay_in_memory(
    namespace: Kubectl,
) -> None:
    policy = jobs.policy()
    policy["spec"]["volumes"][0]["capacity"] = "2Mi"
    namespace.apply(policy, jobs.pytorch_job(workers=0))
    runs.becomes(namespace, "Committing", "False", words="no space", within_s=90)
    namespace.eventually(lambda: len(_warned(namespace)) >= 2, what="events on job and run")
    namespace.eventually(
        lambda: runs.status(namespace)["watermarks"]["memory"], what="steps in memory"
    )
    runs.training_beyond(namespace, 5)
    assert _warned(namespace) == ["CheckpointRun", "PyTorchJob"], "once, not once a step"


def _warned(kubectl: Kubectl) -> list[str]:
    """The kinds of what `SidecarWarning`s are on."""
    return sorted(event["involvedObject"]["kind"] for event in kubectl.events("SidecarWarning"))


def test_the_librarys_version_is_in_the_status(namespace: Kubectl) -> None:
    """Also with a policy by which the cost of a save decides what is staged."""
    namespace.apply(
        jobs.policy(stage={"mode": "Auto"}), _library('keepstep.version.__version__ = "0.0.9"')
    )
    runs.committed_beyond(namespace, 3)
    assert runs.status(namespace)["libraryVersion"] == "0.0.9"


def test_a_library_with_another_protocol_version_is_reported_with_both_versions(
    namespace: Kubectl,
) -> None:
    change = (
        "of = keepstep.wire.trainer.LeaseRequest.__dataclass_fields__; of['protocol'].default = 99"
    )
    namespace.apply(jobs.policy(), _library(change))
    runs.becomes(namespace, "Protected", "False", words="speaks protocol 99", within_s=90)
