"""Where a sidecar's settings come from: flags, the environment, a file; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomllib
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import UsageError
from keepstep_sidecar.config.settings import Setting, to_toml, toml_value
from keepstep_sidecar.config.sidecar import SETTINGS, Config, OnLoss, given_values

EXAMPLES: dict[str, tuple[str, Any]] = {
    "run": ("gpt", "gpt"),
    "memory_dir": ("/m", Path("/m")),
    "volumes": ("/v /w", (Path("/v"), Path("/w"))),
    "slots": ("3", 3),
    "memory_limit": ("32Gi", 32 << 30),
    "huge_pages_dir": ("/huge/gpt", Path("/huge/gpt")),
    "small_pages": ("true", True),
    "stage_every": ("2", 2),
    "persist_every": ("10", 10),
    "drive_writes_per_day": ("0.3", 0.3),
    "keep": ("5", 5),
    "keep_every": ("6h", "6h"),
    "capacity": ("10G", 10**10),
    "archive": ("s3://ckpt/runs", "s3://ckpt/runs"),
    "archive_every": ("500", 500),
    "archive_keep": ("7", 7),
    "archive_keep_every": ("1000", "1000"),
    "archive_endpoint": ("https://s3.example.com", "https://s3.example.com"),
    "archive_region": ("eu-1", "eu-1"),
    "nodes": ("4", 4),
    "node_rank": ("1", 1),
    "leader": ("n1:9465", "n1:9465"),
    "secret_file": ("/secret", Path("/secret")),
    "secret_id": ("a1b2", "a1b2"),
    "peer_listen": (":9465", ":9465"),
    "peer_advertise": ("10.0.0.7:9465", "10.0.0.7:9465"),
    "pod": ("4f1c", "4f1c"),
    "node": ("node-7.zone", "node-7.zone"),
    "peer_replicas": ("0", 0),
    "peer_bytes_per_second": ("500Mi", 500 << 20),
    "io_threads": ("2", 2),
    "bytes_per_second": ("1Gi", 1 << 30),
    "flush_timeout": ("1m30s", 90.0),
    "linger": ("15m", 900.0),
    "owner_pid": ("42", 42),
    "report_url": ("https://operator", "https://operator"),
    "report_ca": ("-----BEGIN\n\x7f\u00e9\"'\\", "-----BEGIN\n\x7f\u00e9\"'\\"),
    "report_ca_file": ("/trust/ca.crt", Path("/trust/ca.crt")),
    "report_token_file": ("/token", Path("/token")),
    "restore_from": ("1200", "1200"),
    "restore_since": ("4", 4),
    "on_loss": ("restart", OnLoss.RESTART),
    "metrics_port": ("9464", 9464),
    "ui_port": ("26742", 26742),
}
"""Of each key: what a person writes, and what the sidecar has then."""
_ONE_MACHINE = {"nodes": 1, "node_rank": 0}
"""Nodes go without an operator."""
EXPECTED = {key.field: EXAMPLES[key.name][1] for key in SETTINGS}


def _written(name: str) -> Any:
    text = EXAMPLES[name][0]
    return text.split() if name == "volumes" else text


def _flags(setting: Setting) -> tuple[str, ...]:
    if not setting.kind.metavar:
        return (setting.flag,)
    written = _written(setting.name)
    words = written if isinstance(written, list) else [written]
    return tuple(word for value in words for word in (setting.flag, value))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """All keys."""
    path = tmp_path / "keepstep.toml"
    lines = [f"{name} = {toml_value(_tuple(_written(name)))}\n" for name in EXAMPLES]
    path.write_text("".join(lines))
    return path


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def test_each_key_is_read_from_flags_the_environment_and_a_file_alike(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert given_values("--config", str(file)) == EXPECTED
    assert given_values(*(word for setting in SETTINGS for word in _flags(setting))) == EXPECTED
    for key in SETTINGS:
        monkeypatch.setenv(key.variable, EXAMPLES[key.name][0])
    assert given_values() == EXPECTED


def test_a_flag_overrides_the_environment_and_the_environment_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keepstep.toml"
    path.write_text('slots = 3\nkeep = 3\narchive_every = 3\narchive = "s3://b"\n')
    monkeypatch.setenv("KEEPSTEP_KEEP", "4")
    monkeypatch.setenv("KEEPSTEP_SLOTS", "4")
    monkeypatch.setenv("KEEPSTEP_RUN", "")  # as a chart writes what is not set
    found = given_values("--config", str(path), "--slots", "5", "--archive", "")
    assert found == {"slots": 5, "keep": 4, "archive_every": 3}


def test_a_written_config_file_is_read_back_unchanged(file: Path) -> None:
    config = Config.from_values({**given_values("--config", str(file)), **_ONE_MACHINE})
    file.write_text(to_toml(SETTINGS, config))
    assert Config.from_values(given_values("--config", str(file))) == config
    plain = Config(run="gpt", memory_dir=Path("/m"), volumes=(Path("/v"),))
    file.write_text(to_toml(SETTINGS, plain))
    assert Config.from_values(given_values("--config", str(file))) == plain
    by_cost = replace(plain, stage_every="auto")
    file.write_text(to_toml(SETTINGS, by_cost))
    assert Config.from_values(given_values("--config", str(file))) == by_cost


@given(st.text().filter(lambda text: text.isprintable() or text.isascii()))
def test_any_string_survives_a_toml_round_trip(text: str) -> None:
    assert tomllib.loads(f"a = {toml_value(text)}") == {"a": text}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("slots = 0", "slots: 0 is not a whole number of at least 1"),
        ('slots = "four"', "slots: 'four' is not a whole number of at least 1"),
        ("slots = 2.0", "slots: 2.0 is not a whole number"),
        ("slots = true", "slots: True is not a whole number"),
        (
            "metrics_port = 70000",
            "metrics_port: 70000 is not a whole number of at least 1, at",
        ),
        ('memory_limit = "lots"', "memory_limit: 'lots' is not a size; write it like 512Mi"),
        ("memory_limit = [1]", "memory_limit: [1] is not a text"),
        ('linger = "soon"', "linger: 'soon' is not a duration; write it like 90s, 15m or 2h"),
        ("linger = nan", "linger: nan is not a duration"),
        ("keep_every = 0", "keep_every: '0' keeps nothing; write a number of steps, or a time"),
        ('archive_keep_every = "0s"', "archive_keep_every: '0s' keeps nothing"),
        ('keep_every = "often"', "keep_every: 'often' is not a duration"),
        ("bytes_per_second = 0", "bytes_per_second: 0: starts at 1; leave it out for no limit"),
        ("peer_bytes_per_second = 0", "peer_bytes_per_second: 0: starts at 1"),
        ("peer_replicas = -1", "peer_replicas: -1 is not a whole number of at least 0"),
        ('on_loss = "half"', "on_loss: 'half' is not one of wait, restart"),
        ('small_pages = "maybe"', "small_pages: 'maybe' is not true or false"),
        ('volumes = "/v"', "volumes: '/v' is not a list"),
        ("volumes = [7]", "volumes: 7 is not a path"),
        ('memory_dir = "/a\\u0000"', "memory_dir: '/a\\x00' is not a path"),
        ("run = 2020-01-01", "run: datetime.date(2020, 1, 1) is not a text"),
        ('archive = "s3//ckpt/gpt"', "write s3://"),
        ('archive = "s3:/ckpt/gpt"', "write s3://"),
        ('archive = "file:/mnt/archive"', "write file://"),
        ("slot = 4", "no key 'slot'; did you mean 'slots'? Keys are run, memory_dir, "),
        ("[archive]\nevery = 4", "archive: {'every': 4} is not a text"),
        ("[zzz]\na = 4", "no key 'zzz'. Keys are run, memory_dir, "),
        ("slots = ", "is not TOML"),
        ("slots = 2\nslots = 3", "is not TOML"),
    ],
)
def test_a_mistake_in_a_config_file_is_refused_with_the_allowed_values(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "keepstep.toml"
    path.write_text(line)
    with pytest.raises(UsageError) as caught:
        given_values("--config", str(path))
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_a_mistake_in_a_flag_or_variable_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        UsageError, match=r"^--stage-every: 'often' is not a whole number of at least 1, nor auto$"
    ):
        given_values("--stage-every", "often")
    with pytest.raises(UsageError, match=r"^--slots: '0' is not a whole number of at least 1$"):
        given_values("--slots", "0")
    monkeypatch.setenv("KEEPSTEP_ON_LOSS", "half")
    with pytest.raises(UsageError, match=r"^KEEPSTEP_ON_LOSS: 'half' is not one of wait, restart$"):
        given_values()


def test_an_unreadable_config_file_is_refused_with_its_path_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_bytes(b"#" * (2 << 20))
    (tmp_path / "link").symlink_to("link")
    for name, message in [
        ("absent", "no such file"),
        (".", "not a file"),
        ("binary", "not TOML"),
        ("large", "more than"),
        ("link", "cannot be read"),
    ]:
        with pytest.raises(UsageError, match=message) as caught:
            given_values("--config", str(tmp_path / name))
        assert str(tmp_path / name) in str(caught.value)


_NODES = {"report_url": None, "nodes": 4, "node_rank": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": "../x"}, "cannot name a run"),
        ({"volumes": ()}, "'--volume' (or KEEPSTEP_VOLUMES)"),
        ({"memory_dir": Path("/" + "x" * 100)}, "choose a shorter --memory-dir"),
        ({**_NODES, "node_rank": 4}, "the last has --node-rank 3"),
        ({**_NODES, "leader": None}, "with --leader HOST:PORT"),
        ({**_NODES, "leader": "n1"}, "'n1' is no address"),
        ({"report_url": None}, "one machine alone has no peers"),
        ({"leader": None}, "--report-url: say where machine 0 is found"),
        ({"peer_listen": "nowhere"}, "'nowhere' is no address"),
        ({"report_ca": None}, "--report-url needs --report-ca and --report-token-file"),
        ({"report_url": "http://x"}, "https:// only"),
        ({"archive": "s3://"}, "names no bucket"),
        ({"archive": None, "restore_from": "other/7"}, "give --archive"),
        ({"restore_from": "yesterday"}, "give a step's number or its id"),
    ],
)
def test_values_that_cannot_work_together_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Config.from_values({**EXPECTED, **_ONE_MACHINE, **change})
    assert message in str(caught.value)
