"""What README, CONTRIBUTING and docs/ tell a reader to type does what they say."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import tomllib
import yaml

from keepstep_operator import names
from keepstep_operator.injection import inject
from keepstep_sidecar.cli.main import cli
from tests import warm
from tests.chart.charts import KUBERNETES, crds, schema_of
from tests.chart.schemas import closed, filled, json_schema
from tests.cli.conftest import Keepstep
from tests.harness import ROOT, SidecarProcess
from tests.operator.injection.pods import DEFAULTS, policy, policy_body, pytorch_job
from tests.pages.blocks import COMMANDS, ELSEWHERE, Block, blocks
from tests.pages.programs import IN_FRAMEWORKS, PROGRAMS, check

BLOCKS = {block.name: block for block in blocks()}


def _of(language: str) -> list[Block]:
    return [block for block in BLOCKS.values() if block.language == language]


def test_every_code_block_of_the_documentation_is_run_by_a_test() -> None:
    run = {*PROGRAMS, *IN_FRAMEWORKS, *DATA, *(block.name for block in _of("bash"))}
    assert BLOCKS.keys() - ELSEWHERE.keys() - run == set()
    assert {*ELSEWHERE, *PROGRAMS, *IN_FRAMEWORKS, *DATA} - BLOCKS.keys() == set()
    assert ELSEWHERE.keys() & (PROGRAMS.keys() | IN_FRAMEWORKS.keys()) == set()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_every_test_assigned_to_a_code_block_uses_its_page_or_contains_its_lines(name: str) -> None:
    block, text = BLOCKS[name], (ROOT / ELSEWHERE[name]).read_text()
    if block.language == "python":
        used = [
            name.name
            for node in ast.walk(ast.parse(block.text))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keepstep")
            for name in node.names
        ]
        assert used
        assert [name for name in used if name not in text] == []
    else:
        assert Path(block.page).name in text or Path(block.page).parent.name in text


# --- Python ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_python_block_runs_and_resumes_after_a_restart(
    sidecar: SidecarProcess, tmp_path: Path, name: str
) -> None:
    check(PROGRAMS[name], BLOCKS[name], tmp_path, warm.python())


# --- the command -------------------------------------------------------------------------------

TRAIN = """
import os
import torch
import keepstep

ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
wrapped = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = keepstep.Checkpointer(model=wrapped, optimizer=optimizer)
at = checkpointer.restore()
first = at.step + 1 if at else 0
for step in range(first, max(first + 3, int(os.environ.get("STEPS", "0")))):
    wrapped(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpointer.save(step)
checkpointer.close()
"""


class Home:
    """Where a reader types: with `keepstep`, `python` and `torchrun` on the path, and a script."""

    def __init__(self, path: Path) -> None:
        self.keepstep = Keepstep(path)
        self.path = path
        self.keepstep.script("train.py", TRAIN)
        bin_ = path / "bin"
        bin_.mkdir()
        sidecar, python = warm.python(warm.SIDECAR), warm.python()
        for name, words in {
            "keepstep": f"{sidecar} -m keepstep_sidecar.cli",
            "python": python,
            "torchrun": f"{python} -m torch.distributed.run",
        }.items():
            (bin_ / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            (bin_ / name).chmod(0o755)
        self.places = {
            "s3://ckpt/runs": path / "archive",
            "/mnt/shared/archive": path / "archive",
            "/scratch/ckpt": path / ".keepstep",
            "/nvme0": path / "nvme0",
            "/nvme1": path / "nvme1",
        }
        for place in self.places.values():
            place.mkdir(exist_ok=True)
        self.env = {
            **os.environ,
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "PYTHON_EXEC": python,  # for torchrun
            "OMP_NUM_THREADS": "1",
            "KEEPSTEP_TEST_CLI": str(path),
        }

    def here(self, text: str) -> str:
        """The same, with places of this machine."""
        for named, place in self.places.items():
            text = text.replace(named, str(place))
        return text

    def start(self, line: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-ec", self.here(line)],
            cwd=self.path,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **options,
        )

    def __call__(self, line: str, *, codes: tuple[int, ...] = (0,)) -> str:
        """Type a line; what it says."""
        with self.start(line) as process:
            output, _ = process.communicate(timeout=90)
        assert process.returncode in codes, f"{line}\n{output}"
        assert "Traceback" not in output, output
        return output


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.keepstep.end()


def _lines() -> list[str]:
    return [line for block in _of("bash") if block.name not in ELSEWHERE for line in block.commands]


def test_the_commands_in_the_readme_behave_as_described(home: Home) -> None:
    _, run, status, export = BLOCKS["README.md Ten lines 2"].commands
    assert "restart" not in home(run)
    assert "committed" in home(status).lower()
    home(export)
    assert (home.path / "out/gpt/model.safetensors").stat().st_size > 0


def test_a_training_resumes_with_each_documented_way_to_start_it(home: Home) -> None:
    alone, eight = BLOCKS["docs/add-keepstep.md Add keepstep to a training script 2"].commands
    home(alone)
    assert "restored step 2" in home(eight)
    (warm_start,) = BLOCKS["docs/cli.md Warm starts"].commands
    message = home(warm_start.replace("--preload transformers", "--preload json"))
    assert "restored step 5" in message
    (export,) = BLOCKS["docs/add-keepstep.md Use the model elsewhere"].commands
    home(export)
    assert (home.path / "model/model.safetensors").stat().st_size > 0


def test_an_archive_is_listed_verified_pulled_forked_and_exported(home: Home) -> None:
    to_store, to_directory, ls, verify, pull = BLOCKS["docs/archive.md The archive"].commands
    home(to_store)
    assert "restored step 2" in home(to_directory)
    place = f"--archive {home.path}/archive --run train"
    assert "5" in home(f"{ls} {place}")
    home(verify.replace("[STEP]", f"5 {place}"))
    home(pull.replace("STEP DIR", f"5 pulled {place}"))
    assert list((home.path / "pulled").rglob("rank-*"))
    (fork,) = BLOCKS["docs/archive.md A fork"].commands
    assert "restored step 5" in home(fork.replace("gpt-a/12000", "train/5"))
    here, export = BLOCKS["docs/cli.md `keepstep export`"].commands
    home(f"{here} --run train")
    home(export.replace("12000", "5").replace("--run gpt", "--run train").replace("model", "other"))
    assert (home.path / "other/model.safetensors").exists()


def test_the_documented_keepstep_start_command_provides_a_sidecar_for_a_script(home: Home) -> None:
    (export,) = BLOCKS["docs/cli.md `keepstep start`"].commands
    home(f"{export}\npython train.py\nkeepstep stop")
    assert "2" in home("keepstep steps")


def test_the_documented_doctor_and_secret_commands_work(home: Home) -> None:
    (doctor,) = BLOCKS["docs/cli.md `keepstep doctor`"].commands
    message = home(doctor, codes=(0, 1))  # eight ranks of 40 GiB need a larger machine
    assert str(home.path / "nvme1") in message
    secret, run = BLOCKS["docs/peers.md On machines without Kubernetes"].commands
    home(secret)
    assert (home.path / "gpt.secret").stat().st_mode & 0o777 == 0o600
    words = shlex.split(run.replace("gpt.secret", str(home.path / "gpt.secret")).split(" -- ")[0])[
        2:
    ]
    given = cli.get_command(click.Context(cli), "run")
    assert given is not None
    context = given.make_context("run", [*words, "--", "true"])
    assert context.obj["nodes"] == 4


@pytest.mark.parametrize("line", BLOCKS["docs/page.md The page"].commands)
def test_the_documented_ui_command_prints_its_url_and_ends_on_interrupt(
    home: Home, line: str
) -> None:
    home("keepstep run -- python train.py")
    with home.start(line.replace("8790", "0"), start_new_session=True) as process:
        assert process.stdout is not None
        assert "http://127.0.0.1:" in process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=30)


# --- Kubernetes --------------------------------------------------------------------------------


def _cluster_lines() -> list[str]:
    return sorted({line for line in _lines() if re.search(r"\b(kubectl|helm)\b", line)})


@pytest.mark.parametrize("line", _cluster_lines())
def test_kubectl_and_helm_accept_each_documented_command(tmp_path: Path, line: str) -> None:
    """They read it whole before they find that there is no cluster."""
    for name, value in {"RUN": "run", "POD": "pod", "NAMESPACE": "space"}.items():
        line = re.sub(rf"\b{name}\b", value, line)
    for part in re.findall(r"\$\((.*?)\)", line) or [line]:
        words = shlex.split(part.split(" | ")[0])
        if shutil.which(words[0]) is None:
            pytest.skip(f"no {words[0]} here")
        if "github.com" in part:  # tests/e2e/cluster.py applies it
            assert words[-1] in (ROOT / "tests/e2e/cluster.py").read_text()
            continue
        done = subprocess.run(
            words, cwd=ROOT, env=_no_cluster(tmp_path), capture_output=True, text=True, timeout=60
        )
        assert done.returncode != 0
        assert re.search("refused|unreachable", done.stderr), done.stderr


def _no_cluster(tmp_path: Path) -> dict[str, str]:
    config = tmp_path / "kubeconfig"
    config.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: none\n"
        "contexts: [{name: none, context: {cluster: none}}]\n"
        "clusters: [{name: none, cluster: {server: 'http://127.0.0.1:1'}}]\n"
    )
    path = f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "KUBECONFIG": str(config)}


BUILTIN = {"namespace", "pod", "events"}
HELM = ("helm", "template", "charts/keepstep", "--kube-version", KUBERNETES[-1], "--set")


def test_documented_kubectl_commands_name_existing_kinds_files_and_values(tmp_path: Path) -> None:
    kinds = {*BUILTIN}
    for crd in crds().values():
        known = crd["spec"]["names"]
        kinds |= {known["plural"], known["singular"], *known["shortNames"]}
    lines = _cluster_lines()
    asked = [
        kind
        for line in lines
        for kind in re.findall(r" (?:get|describe|delete|create) (\w+)", line)
    ]
    assert len(asked) > 5
    assert {*asked} <= kinds
    assert {*re.findall(r"reason=(\w+)", "\n".join(lines))} == {"Restored"}
    sources = "".join(path.read_text() for path in (ROOT / "operator/src").rglob("*.py"))
    assert '"Restored"' in sources
    text = "\n".join(block.text for block in BLOCKS.values())
    for name in {*re.findall(r"keepstep\.dev/[a-z-]+", text)}:
        assert f'"{name}"' in sources, name
    containers = {*re.findall(r" -c ([\w-]+)", "\n".join(lines))}
    assert containers == {names.SIDECAR_CONTAINER, "pytorch"}
    for line in lines:
        for given in re.findall(r"--set '([^']+)'", line):
            if shutil.which("helm"):
                made = subprocess.run(
                    [*HELM, given], cwd=ROOT, check=True, capture_output=True, text=True
                )
                assert given.strip("}").partition("{")[2] in made.stdout


# --- programs of other people ------------------------------------------------------------------


def test_documented_docker_builds_use_existing_files_stages_and_arguments() -> None:
    """tests/e2e/cluster.py builds and loads the same."""
    lines = [line for line in _lines() if line.startswith(("docker build", "kind "))]
    assert len(lines) > 5
    for line in lines:
        for path in re.findall(r"(?:-f|--config) (\S+)", line):
            assert (ROOT / path).is_file(), line
        file = (re.findall(r"-f (\S+)", line) or ["Dockerfile"])[0]
        for stage in re.findall(r"--target (\S+)", line):
            assert re.search(rf"^FROM .* AS {stage}$", (ROOT / file).read_text(), re.MULTILINE)
        for argument in re.findall(r"--build-arg (\w+)=", line):
            assert f"ARG {argument}" in (ROOT / file).read_text()


def test_documented_make_targets_and_pip_packages_exist() -> None:
    for line in _lines():
        if line.startswith("make "):
            subprocess.run(
                ["make", "-n", *line.split()[1:]], cwd=ROOT, check=True, capture_output=True
            )
        for path in re.findall(r"(?<=pip install ).*", line):
            assert all((ROOT / word / "pyproject.toml").is_file() for word in path.split())
        for path in re.findall(r"pytest (\S+)", line):
            assert (ROOT / path).is_file()


def test_every_documented_shell_command_is_covered_by_one_of_these_tests() -> None:
    assert {line.split()[0] for line in _lines()} <= COMMANDS
    here = Path(__file__).read_text()
    named = {line for block in _of("bash") if f'"{block.name}"' in here for line in block.commands}
    ours = {line for line in _lines() if re.search(r"(^|\()keepstep ", line)}
    assert ours - named == set()


# --- data --------------------------------------------------------------------------------------


def _picture(text: str) -> None:
    """Drawn, or spoken by a program: nothing that a reader types."""
    assert "keepstep run" not in text


def _columns(text: str) -> None:
    (version,) = crds()["CheckpointRun"]["spec"]["versions"]
    shown = [column["name"].upper() for column in version["additionalPrinterColumns"]
             if not column.get("priority")]  # fmt: skip
    head, *rows = text.splitlines()
    assert head.split() == ["NAME", *shown][: len(head.split())]
    assert all(len(row.split()) == len(head.split()) for row in rows)


def _policy(text: str) -> None:
    spec = yaml.safe_load(text)["spec"]
    body = policy_body(**spec)
    schema = schema_of(crds()["CheckpointPolicy"])
    jsonschema.validate(filled(body, schema), closed(json_schema(schema)))


def _annotations(text: str) -> None:
    pod = pytorch_job()
    pod["metadata"]["annotations"] = yaml.safe_load(text)["metadata"]["annotations"]
    assert names.POLICY_ANNOTATION in pod["metadata"]["annotations"]
    made = inject(pod, policy(), DEFAULTS)
    assert names.SIDECAR_CONTAINER in json.dumps(made)


def _ports(text: str) -> None:
    ports = f"{names.SIDECAR_METRICS_PORT},{names.SIDECAR_PEER_PORT}"
    values = set(yaml.safe_load(text).values())
    assert values == {ports, str(names.SIDECAR_PEER_PORT)}


def _entry_point(text: str) -> None:
    command = yaml.safe_load(text)["command"]
    done = subprocess.run([warm.python(), *command[1:3], "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert command[3] == "--"


def _settings(text: str) -> None:
    file = tomllib.loads(text)
    given = cli.get_command(click.Context(cli), "run")
    assert given is not None
    flags = {opt for parameter in given.params for opt in parameter.opts}
    for name in file:
        flag = f"--{name.replace('_', '-')}"
        assert {flag, flag.removesuffix("s")} & flags, name


DATA: dict[str, Callable[[str], None]] = {
    "README.md On Kubernetes 2": _columns,
    "README.md How": _picture,
    "docs/architecture.md Architecture": _picture,
    "docs/archive.md What lies there": _picture,
    "docs/cli.md Which run": _picture,
    "docs/cli.md Warm starts 2": _entry_point,
    "docs/cli.md Settings": _settings,
    "docs/format.md The image": _picture,
    "docs/goodput.md Goodput": _picture,
    "docs/huge-pages.md On one machine": _picture,
    "docs/huge-pages.md On Kubernetes": _policy,
    "docs/install.md Service meshes": _ports,
    "docs/quickstart.md 4. A policy and a job 2": _annotations,
    "docs/quickstart.md 5. Watch 2": _columns,
}


@pytest.mark.parametrize("name", DATA)
def test_documented_data_examples_are_accepted_by_the_code(name: str) -> None:
    DATA[name](BLOCKS[name].text)
