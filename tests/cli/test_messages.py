"""What `keepstep run` says of what there is."""

from __future__ import annotations

from keepstep.steps import StepId, Tier
from keepstep.wire.status import StepStatus
from keepstep_sidecar.cli import run_messages
from keepstep_sidecar.cli.inventory import RunHoldings


def restarted(**ranks: tuple[int, ...]) -> str:
    held = {Tier(name): there for name, there in ranks.items()}
    step = StepStatus(id=StepId.parse("0001.59af5a88-000000007"), world=2, ranks=held)
    holdings = RunHoldings(live=None, steps=(step,))
    return run_messages.restarted_text(holdings, code=1, attempt=1, restarts=3)


def test_a_step_that_all_ranks_have_on_volumes_is_not_reported_as_uncommitted() -> None:
    """A sidecar that has just begun publishes it in a moment."""
    assert "nothing is committed" in restarted(memory=(0, 1), local=(0,))
    assert "nothing is committed" not in restarted(local=(0, 1))
