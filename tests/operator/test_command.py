"""The group `keepstep-operator`: what a person sees, and where settings come from."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from keepstep_operator.api.run_status import cut_text
from keepstep_operator.text_sanitizing import replace_unprintable


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


def test_messages_below_the_log_level_are_not_logged() -> None:
    code = (
        "from keepstep_operator import log\n"
        "log.configure('admission', level='warning')\n"
        "log.info('quiet'); log.warn('loud')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "loud" in done.stderr
    assert "quiet" not in done.stderr


def test_messages_that_clients_can_trigger_are_rate_limited_and_own_messages_are_not() -> None:
    code = (
        "import logging\n"
        "from keepstep_operator import log\n"
        "log.configure('admission')\n"
        "for _ in range(50):\n"
        "    logging.getLogger('aiohttp.server').error('bad request')\n"
        "    log.warn('loud')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("bad request") == 1
    assert done.stderr.count("loud") == 50


# What pods wrote, in objects and Events: one line, bounded, and nothing for a terminal to obey.


@given(st.text())
def test_unprintable_characters_are_replaced_and_printable_text_is_unchanged(text: str) -> None:
    shown = replace_unprintable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert all(new in (old, "\ufffd") for old, new in zip(text, shown, strict=True))


@given(st.text(), st.integers(10, 50))
def test_truncated_text_is_printable_and_on_one_line(text: str, longest: int) -> None:
    shown = cut_text(text, longest=longest)
    assert shown.isprintable()
    assert len(shown) <= longest


def test_newlines_and_tabs_are_kept_in_multi_line_output() -> None:
    assert replace_unprintable("a\tb\n\x1b[2Jc\r", lines=True) == "a\tb\n\ufffd[2Jc\ufffd"
