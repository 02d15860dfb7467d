"""The group `keepstep-operator`: what a person sees, and where settings come from."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from keepstep_operator.admission.main import admission
from keepstep_operator.certificates.main import certificates
from keepstep_operator.cli import cli


def test_the_help_names_all_components_and_imports_none() -> None:
    code = (
        "import sys; from keepstep_operator.cli import cli\n"
        "try: cli(['--help'])\n"
        "except SystemExit: pass\n"
        "print([one for one in ('kopf', 'cryptography', 'aiohttp') if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in ("admission", "reconcile", "certificates", "Examples:"):
        assert name in done.stdout
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize("name", ["admission", "certificates", "reconcile"])
def test_no_component_imports_the_synchronous_client(name: str) -> None:
    code = (
        "import sys; from keepstep_operator.cli import cli\n"
        f"try: cli(['{name}', '--help'])\n"
        "except SystemExit: pass\n"
        "names = 'kubernetes.client', 'requests', 'oauthlib'\n"
        "print([one for one in names if sys.modules.get(one)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize("name", ["admission", "certificates"])
def test_each_component_has_help_with_examples(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert "Examples:" in result.output


@pytest.mark.parametrize("command", [admission, certificates], ids=lambda one: one.name)
def test_every_option_has_a_variable_that_is_spelt_out(command: click.Command) -> None:
    """None may be one that Kubernetes sets for a Service named keepstep-...: those end so."""
    for option in command.params:
        if option.name in ("once", "help"):
            continue
        variable = option.envvar
        assert isinstance(variable, str), option.name
        assert variable.startswith("KEEPSTEP_")
        assert not variable.endswith(("_SERVICE_HOST", "_SERVICE_PORT"))


def test_an_unknown_component_is_a_wrong_use() -> None:
    result = CliRunner().invoke(cli, ["admit"])
    assert result.exit_code == 2
    assert "No such command 'admit'" in result.output


def test_what_is_less_than_the_log_level_is_not_logged() -> None:
    code = (
        "from keepstep_operator import journal\n"
        "journal.configure('admission', level='warning')\n"
        "journal.say('quiet'); journal.warn('loud')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "loud" in done.stderr
    assert "quiet" not in done.stderr


def test_what_strangers_can_cause_is_logged_seldom_and_what_we_say_each_time() -> None:
    code = (
        "import logging\n"
        "from keepstep_operator import journal\n"
        "journal.configure('admission')\n"
        "for _ in range(50):\n"
        "    logging.getLogger('aiohttp.server').error('bad request')\n"
        "    journal.warn('loud')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("bad request") == 1
    assert done.stderr.count("loud") == 50


@pytest.mark.parametrize("resources", ["{", "7"])
def test_resources_of_helper_pods_that_are_none_are_a_wrong_use(resources: str) -> None:
    arguments = ["reconcile", "--namespace", "a", "--helper-resources", resources]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert "--helper-resources" in result.output
