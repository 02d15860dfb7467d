"""Machines that know the same secret know each other; the clock plays no part."""

from __future__ import annotations

import contextlib
import datetime
import os
import ssl
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509

from keepstep.errors import UsageError
from keepstep_sidecar.cli.main import cli
from keepstep_sidecar.tiers.peer import secret
from keepstep_sidecar.tiers.peer.secret import SecretCredentials, read_secret
from keepstep_sidecar.tiers.peer.tls import AGENTS, PodIdentity
from tests.leader.runs import SECRET, credentials


def authority(own: SecretCredentials) -> bytes:
    (found,) = own.current().client.get_ca_certs(binary_form=True)
    return found


def test_each_machine_derives_the_same_authority_and_a_key_of_its_own() -> None:
    first, again, other = credentials(0), credentials(0), credentials(7)
    assert authority(first) == authority(again) == authority(other)
    assert first.current().identity == PodIdentity(namespace="~secret", run="gpt", node_rank=0)
    assert authority(credentials(0, secret=SECRET + b"!")) != authority(first)
    assert authority(credentials(0, run="bert")) != authority(first)


def test_no_namespace_and_no_agent_has_the_identity_of_a_machine() -> None:
    identity = credentials(3).current().identity
    assert PodIdentity.parse(identity.uri) == identity
    assert identity.namespace != AGENTS
    assert not identity.namespace[0].isalnum(), "as a namespace's first character must be"
    assert str(identity) == "node rank 3 of run gpt"


def test_the_derived_authority_is_valid_at_any_clock_time() -> None:
    found = x509.load_der_x509_certificate(authority(credentials(0)))
    assert found.not_valid_before_utc < datetime.datetime(1971, 1, 1, tzinfo=datetime.UTC)
    assert found.not_valid_after_utc.year == 9999


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(UsageError, match="15 bytes, and 16 are the least"):
        SecretCredentials(b"x" * 15, "gpt", 0)
    SecretCredentials(b"x" * 16, "gpt", 0)


def test_the_secret_command_writes_a_private_file_and_overwrites_none(tmp_path: Path) -> None:
    file = tmp_path / "gpt.secret"
    before = os.umask(0)
    try:
        assert CliRunner().invoke(cli, ["secret", str(file)]).exit_code == 0
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
    found = read_secret(file)
    assert len(found) == 44
    again = CliRunner().invoke(cli, ["secret", str(file)])
    assert (again.exit_code, read_secret(file)) == (2, found)
    assert "exists" in again.output


def test_the_command_prints_a_secret_for_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = CliRunner().invoke(cli, ["secret"]).output
    monkeypatch.setenv(secret.VARIABLE, printed)
    assert read_secret(None) == printed.strip().encode()
    assert printed != CliRunner().invoke(cli, ["secret"]).output


def test_a_secret_file_that_other_users_can_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gpt.secret"
    file.write_bytes(SECRET)
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(UsageError, match=r"must be of user .* private: chmod 600"):
            read_secret(file)
    file.chmod(0o600)
    assert read_secret(file) == SECRET
    link = tmp_path / "link"
    link.symlink_to(file)
    for wrong in (link, tmp_path / "absent", tmp_path):
        with pytest.raises(UsageError, match="cannot read the run's secret"):
            read_secret(wrong)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    with pytest.raises(UsageError, match="must be of user"):
        read_secret(file)


def test_the_error_for_a_missing_secret_names_the_command_that_creates_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(secret.VARIABLE, raising=False)
    with pytest.raises(UsageError, match="keepstep secret FILE"):
        read_secret(None)


def test_the_derived_certificate_is_valid_at_any_time_and_names_its_node_rank() -> None:
    here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = credentials(1).current().client.wrap_bio(here, there)
    server = credentials(0).current().server.wrap_bio(there, here, server_side=True)
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    found = client.getpeercert() or {}
    assert found["subjectAltName"] == (("URI", "keepstep://~secret/gpt/0"),)
    assert str(found["notBefore"]).startswith("Jan  1 00:00:00 1970")
    assert str(found["notAfter"]).startswith("Dec 31 23:59:59 9999")
