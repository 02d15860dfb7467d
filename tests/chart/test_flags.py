"""The arguments that the chart gives are options that the operator's commands have."""

from __future__ import annotations

import click
import pytest

from tests.chart.charts import Chart, pod_specs
from tests.chart.test_render import EVERYTHING

main = pytest.importorskip("keepstep_operator.cli", reason="the operator's commands are not there")

COMMANDS = ("admission", "reconcile", "certificates")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_in_the_chart_is_an_option_of_its_command(chart: Chart, name: str) -> None:
    objects = chart.render({**EVERYTHING, "hostPaths": ["/mnt/a", "/mnt/b"]})
    spec = dict(pod_specs(objects))[f"keepstep-{name}"]
    command, *arguments = spec["containers"][0]["args"]
    assert command == name
    found = main.cli.get_command(click.Context(main.cli), name)
    assert found is not None
    filled = [
        argument.replace("$(KEEPSTEP_NAMESPACE)", "keepstep-system") for argument in arguments
    ]
    context = found.make_context(name, filled)
    if "host_paths" in context.params:
        assert context.params["host_paths"] == ("/mnt/a", "/mnt/b")
