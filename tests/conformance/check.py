"""What a test asks of a row."""

from __future__ import annotations

from tests.conformance.trial import Trial, of_control, of_keepstep, report


def check(trial: Trial) -> None:
    """Fails unless exactly the declared results are seen."""
    row, undisturbed = trial.row, trial.undisturbed()
    control, kept = trial.control(), trial.keepstep()
    seen = of_control(undisturbed, control), of_keepstep(row, undisturbed, control, kept)
    assert seen == (row.control, row.keepstep), (
        f"\ntorch.save: {seen[0].value}; {report(undisturbed, control)}"
        f"\nkeepstep: {seen[1].value}; {report(undisturbed, kept)}"
    )
