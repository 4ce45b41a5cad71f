"""What the scripts for Slurm would run, and that Ray is waited for; without Slurm."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_collab.config import Config, compose
from megatron_collab.launch import slurm
from megatron_collab.runtime.process import RunStopped
from tests.helpers import free_port

ROOT = Path(__file__).resolve().parents[2]
SECRET = "sk-do-not-print-this"


def dry_run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment = {name: value for name, value in environment.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    environment |= {"VENV": str(Path(sys.executable).parents[1]), "OPENAI_API_KEY": SECRET, **variables}
    command = ["bash", str(ROOT / "slurm" / script), "--dry-run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def stand_in(folder: Path, nodes: int = 1, run_dir: str = "run") -> str:
    """A folder for VENV whose Python answers at once, for a run of so many nodes; see `slurm.settings`."""
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    settings = f"*settings*) printf '%s\\n' {shlex.quote(run_dir)} {nodes} 8 4 ;;"
    python.write_text(f"#!/bin/sh\ncase $* in {settings} *address*) echo 127.0.0.1 ;; esac\n")
    python.chmod(0o755)
    return str(folder / "venv")


def option(command: str, name: str) -> str:
    (value,) = (word.split("=", 1)[1] for word in shlex.split(command) if word.startswith(f"{name}="))
    return value


@pytest.mark.processes
def test_a_dry_run_prints_every_command(tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path}/a run", "rollout.tools=[calculator]", "launch.nodes=2"]
    done = dry_run("train_70b.sh", *overrides, "parallel.pp=2", "rollout.server.replicas=2")
    assert done.returncode == 0, done.stderr
    head, worker, ranks = (line for line in done.stdout.splitlines() if line.startswith("srun") and line.endswith("&"))
    assert "ray start --head" in head and "ray start --address=" in worker
    assert (option(head, "--nodelist"), option(worker, "--nodelist")) == ("node0", "node1")
    assert "launch.slurm wait" in done.stdout and " node0 node1" in done.stdout
    assert "megatron_collab.launch.torchrun" in ranks and option(ranks, "--nnodes") == "2"
    assert shlex.split(ranks.partition(" >")[0])[-5:-2] == overrides
    assert "experiment=train_70b" in ranks
    assert not list(tmp_path.iterdir()), "nothing was run"
    assert "session_latest/logs" in done.stdout and done.stdout.endswith("\n# scontrol requeue JOB\n")
    assert SECRET not in done.stdout and re.search(r"RAY_AUTH_TOKEN=\"\$\(", done.stdout)
    checked = subprocess.run(["bash", "-n"], input=done.stdout, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.processes
def test_the_nodes_of_a_job_are_asked_without_a_proxy(tmp_path: Path) -> None:
    """By Ray's own processes too, which are started on each node."""
    done = dry_run("train_8b.sh", VENV=stand_in(tmp_path))
    body = re.search(r"^bypass_proxies ?\(\).*?^bypass_proxies$", done.stdout, re.M | re.S)
    assert body, done.stderr
    shown = f'address=(10.0.0.1 10.0.0.2)\n{body[0]}\necho "$no_proxy $NO_PROXY"'
    hosts = "localhost,127.0.0.1,::1,10.0.0.1,10.0.0.2"
    for name, value in (("no_proxy", "example.org"), ("NO_PROXY", "example.org"), ("OTHER", "")):
        environment = {"PATH": os.environ["PATH"], name: value}
        result = subprocess.run(["bash", "-euc", shown], capture_output=True, text=True, check=True, env=environment)
        assert result.stdout.split() == [f"{value},{hosts}"] * 2


@pytest.mark.processes
def test_an_override_comes_through_unchanged(tmp_path: Path) -> None:
    run_dir = f"{tmp_path}/it's $HOME, ADDRESS_0 & (more)"
    override = f'run.dir="{run_dir}"'
    done = dry_run("train_8b.sh", override, VENV=stand_in(tmp_path, run_dir=run_dir))
    assert done.returncode == 0, done.stderr
    ranks = done.stdout.splitlines()[-5].removesuffix(" 2>&1 &").rpartition(" >")[0]
    printing = 'address=(10.0.0.1); srun() { printf "%s\\0" "$@"; }; ' + ranks
    arguments = subprocess.run(["bash", "-c", printing], capture_output=True, text=True, check=True).stdout.split("\0")
    assert arguments[-3:-1] == ["experiment=train_8b", override]
    assert "--master-addr=10.0.0.1" in arguments
    assert f"--output={run_dir}/logs/attempt-0/ranks-%n.log" in arguments


@pytest.mark.processes
def test_ports_are_explicit_distinct_and_below_those_of_the_kernel(tmp_path: Path) -> None:
    environment = stand_in(tmp_path, nodes=3)
    done = dry_run("train_8b.sh", VENV=environment)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("srun")]
    ports, blocks = [], []
    for line in lines:
        named_ports = {name: int(port) for name, port in re.findall(r"--([\w-]*port)=(\d+)", line)}
        if "ray start" in line:
            blocks.append(range(named_ports.pop("min-worker-port"), named_ports.pop("max-worker-port") + 1))
        ports += named_ports.values()
    assert len(blocks) == 3 and len(ports) == 3 * 6 + 2 + 1  # those of each Ray node, of the head, of the ranks
    every = [*ports, *(port for block in blocks for port in block)]
    assert len(every) == len(set(every))
    kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(every) < min(kernel, 20_000)
    refused = dry_run("train_8b.sh", PORT=str(min(kernel, 20_000) - 10), VENV=environment)
    assert refused.returncode == 2 and re.match(r"megatron-collab: PORT=\d+: 3 nodes need 100 ports", refused.stderr)


@pytest.mark.processes
def test_bad_input_is_one_line() -> None:
    refused = dry_run("train_70b.sh", "parallel.pq=3")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "parallel.pq" in refused.stderr
    refused = dry_run("train_70b.sh", "optim.lr=my-secret-key", MY_KEY="my-secret-key")
    assert refused.returncode == 2 and "optim.lr=***" in refused.stderr and "my-secret-key" not in refused.stderr
    refused = dry_run("train_70b.sh", VENV="/nowhere")
    assert refused.returncode == 2 and refused.stderr.startswith("megatron-collab: no /nowhere/bin/python")


def test_the_settings_that_decide_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = compose(["experiment=booking", "launch.nodes=2", "launch.interface=lo", "rollout.workers=3"])
    config.rollout.server.replicas = 2
    assert slurm.settings(config) == ["runs/booking/rl", "2", "2", "2"]
    overrides = ["experiment=booking", f"run.dir={tmp_path}"]
    assert slurm.main(["address", *overrides, "launch.interface=lo"]) == 0
    assert slurm.main(["address", *overrides, "launch.interface=nothing0"]) == 2
    printed, error = capsys.readouterr()
    assert printed == "127.0.0.1\n" and "launch.interface=nothing0" in error


def test_settings_that_no_job_can_have_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for settings, message in (
        (["experiment=train_8b", "launch.nodes=2"], "megatron-collab: launch.nodes=2: needs launch.interface"),
        (["experiment=train_70b", "launch.nodes=8"], "/ launch.nodes=8: needs 16 devices per node"),
    ):
        assert slurm.main(["settings", *settings]) == 2
        printed, error = capsys.readouterr()
        assert printed == "" and error.count("\n") == 1 and message in error


def test_what_extensions_print_is_no_setting(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def settings(config: Config) -> list[str]:
        print("loading")
        os.write(1, b"loading natively\n")
        return [config.run.dir]

    monkeypatch.setattr(slurm, "settings", settings)
    assert slurm.main(["settings", "experiment=booking", "run.dir=here"]) == 0
    printed, error = capfd.readouterr()
    assert printed == "here\n" and "loading\n" in error and "loading natively\n" in error


@pytest.fixture
def ray_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray cluster of one node called a."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    at = f"127.0.0.1:{free_port()}"
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--node-name=a", "--num-cpus=0"]
    command += ["--disable-usage-stats", "--include-dashboard=false", f"--port={at.split(':')[1]}"]
    with (tmp_path / "ray.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    yield at
    process.terminate()
    process.wait(60)


WAITS = """
import sys
from megatron_collab.launch import slurm
from megatron_collab.runtime.process import RunStopped
for seconds, names in ((300, "a"), (1, "abc"), (300, "b")):
    try:
        slurm.wait(sys.argv[1], seconds, list(names))
        print("all are there")
    except RunStopped as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_ray_is_waited_for(ray_head: str) -> None:
    """In a process of its own, since Ray keeps a token for as long as its process lives."""
    done = subprocess.run([sys.executable, "-c", WAITS, ray_head], timeout=600, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "all are there",
        "1 of 3 Ray nodes joined within 1 s; missing: b, c; see their logs",
        f"Ray at {ray_head} has nodes of another job: a",
    ], done.stderr


@pytest.mark.seconds
def test_a_head_that_does_not_come() -> None:
    with pytest.raises(RunStopped, match=r"head does not answer at 127\.0\.0\.1:\d+ after 0\.1 s"):
        slurm.wait(f"127.0.0.1:{free_port()}", 0.1, ["a"])


# Both write down what they are called with, and run what asks about settings; Ray waits to be ended, all else is done.
SRUN = """#!/usr/bin/env bash
printf 'srun %s\\n' "$*" >>"$RECORD"
while [[ $1 == --* ]]; do shift; done
case "$*" in
  "apptainer "* | "mkdir "* | *"launch.slurm settings"* | *"launch.slurm address"*) exec "$@" ;;
  *"ray start"*) exec sleep 100 ;;
esac
"""
APPTAINER = """#!/usr/bin/env bash
printf 'apptainer %s\\n' "$*" >>"$RECORD"
while [[ $1 != *.sif ]]; do shift; done
shift
case "$*" in
  *"launch.slurm settings"* | *"launch.slurm address"*) exec "$@" ;;
  *"ray start"*) exec sleep 100 ;;
esac
"""


def job_in_a_container(folder: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """A job of one node, as sbatch would start it, and what was called of srun and apptainer."""
    programs = {"srun": SRUN, "apptainer": APPTAINER, "scontrol": "#!/usr/bin/env bash\necho node0\n"}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "node0", "CHECKOUT": str(ROOT)}
    job |= {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(folder / "calls")}
    environment = os.environ | {"VENV": stand_in(folder, run_dir=f"{folder}/run")} | job | variables
    command = ["bash", str(ROOT / "slurm" / "train_8b.sh"), "experiment=booking", f"run.dir={folder}/run"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    calls = folder / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.processes
@pytest.mark.parametrize("by", ["CONTAINER_IMAGE", pytest.param("APPTAINER_IMAGE", marks=pytest.mark.slow)])
def test_everything_of_ours_runs_in_the_container(tmp_path: Path, by: str) -> None:
    """The step that moves Ray's logs at the end runs outside of the container: it uses nothing of this project."""
    image = tmp_path / ("image.sqsh" if by == "CONTAINER_IMAGE" else "image.sif")
    image.touch()
    cache = tmp_path / "cache"
    settings = {by: str(image), "CONTAINER_MOUNTS": "/models:/models", "CACHE_DIR": str(cache)}
    done, calls = job_in_a_container(tmp_path, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert cache.is_dir()
    mounts = f"{ROOT}:{ROOT},/tmp:/tmp,{cache}:{cache},/models:/models"
    if by == "CONTAINER_IMAGE":
        contained = f"--container-image={image} --container-mounts={mounts} --container-workdir={ROOT}"
    else:
        contained = f"apptainer exec --nv --bind {mounts} --pwd {ROOT} {image} "
    plain = "srun --export=ALL --overlap --cpu-bind=none --ntasks-per-node=1"
    assert calls[0] == f"{plain} mkdir -p {cache}", "on all nodes"
    ours = [call for call in calls[1:] if "session_latest" not in call]
    assert all(contained in call for call in ours) and len(calls) > len(ours)
    for command in ("slurm settings", "slurm address", "ray start", "slurm wait", "launch.torchrun"):
        assert any(command in call for call in ours), command


@pytest.mark.processes
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"CONTAINER_IMAGE": "a", "APPTAINER_IMAGE": "b"}, "CONTAINER_IMAGE and APPTAINER_IMAGE: one container only"),
        ({"CONTAINER_IMAGE": "/nowhere.sqsh"}, "CONTAINER_IMAGE=/nowhere.sqsh: no such file"),
        ({"APPTAINER_IMAGE": "nowhere.sif"}, "APPTAINER_IMAGE=nowhere.sif: no such file"),
        ({"CONTAINER_MOUNTS": "/models"}, "CONTAINER_MOUNTS=/models: there is no container"),
        ({"CACHE_DIR": "cache"}, "CACHE_DIR=cache: set an absolute path"),
    ],
)
def test_a_container_that_cannot_be_is_refused(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    done, calls = job_in_a_container(tmp_path, **variables)
    assert done.returncode == 2 and not calls
    assert done.stderr.startswith(f"megatron-collab: {message}") and done.stderr.count("\n") == 1


@pytest.mark.processes
def test_a_dry_run_shows_the_container_and_starts_none(tmp_path: Path) -> None:
    environment = stand_in(tmp_path)
    done = dry_run("train_8b.sh", CONTAINER_IMAGE="registry#team/image:1", VENV=environment)
    assert done.returncode == 0, done.stderr
    steps = [line for line in done.stdout.splitlines() if line.startswith("srun")]
    assert len(steps) == 3 and all(option(line.partition(" >")[0], "--container-image") for line in steps)
    assert option(steps[0].partition(" >")[0], "--container-mounts") == f"{ROOT}:{ROOT},/tmp:/tmp", "no home"
    assert "XDG_CACHE_HOME" not in done.stdout
    cached = dry_run("train_8b.sh", CACHE_DIR=f"{tmp_path}/cache", VENV=environment)
    assert f"mkdir -p {tmp_path}/cache\n" in cached.stdout and f"XDG_CACHE_HOME={tmp_path}/cache " in cached.stdout
