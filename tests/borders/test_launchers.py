"""Variables and ranks of torchrun, and what other launchers have left of them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megatron_collab import train
from megatron_collab.config import Config, compose
from megatron_collab.launch import program
from megatron_collab.runtime import process
from megatron_collab.runtime.process import EXIT_BAD_INPUT
from tests.helpers import free_port

RANK = dict.fromkeys(("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
RANK |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
LEFTOVERS = {
    "the id": ({"TORCHELASTIC_RUN_ID": "x"}, "TORCHELASTIC_RUN_ID: set, but torchrun did not start this process"),
    "a rank": ({"RANK": "1"}, "RANK: set, but torchrun did not start this process (TORCHELASTIC_RUN_ID is not set)"),
    "a local rank": ({"LOCAL_RANK": "3"}, "LOCAL_RANK: set, but "),
    "a size, as Kubernetes operators set it": ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE: set, but "),
    "a launcher": ({process.LAUNCHER: "7"}, f"{process.LAUNCHER}: set, but "),
    "torchrun's number of nodes": ({"PET_NNODES": "2"}, "PET_NNODES: set, but torchrun did not start this process"),
    "torchrun's other defaults": (
        {"PET_NPROC_PER_NODE": "4", "PET_MODULE": "1", "PET_RDZV_BACKEND": "c10d"},
        "PET_MODULE, PET_NPROC_PER_NODE, PET_RDZV_BACKEND: set, but ",
    ),
    "all without a master": (RANK, "(MASTER_PORT is not set); unset them"),
    "all of a rank, none of torchrun": (RANK | {"MASTER_PORT": "{port}"}, "(TORCHELASTIC_USE_AGENT_STORE is not set);"),
    "all": (RANK | AGENT | {"MASTER_PORT": "{port}"}, "(MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: "),
    "no port": (RANK | AGENT | {"MASTER_PORT": "x"}, "MASTER_PORT=x: invalid literal"),
}


@pytest.mark.parametrize("name", LEFTOVERS)
def test_left_over_variables_of_torchrun_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(free_port())
    variables, message = LEFTOVERS[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value.replace("{port}", port))
    assert train.main(["experiment=booking_sft", f"run.dir={tmp_path}/run"]) == EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message.replace("{port}", port) in err and "; unset them" in err, err
    assert not (tmp_path / "run").exists()


def test_a_rank_of_torchrun_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the store of torchrun, and with one of rank 0, which is not there yet; also if PET_NNODES is a setting."""
    assert process.leftover_rank() is None
    with socket.create_server(("127.0.0.1", 0)) as master:
        for name, value in (RANK | AGENT | {"MASTER_PORT": str(master.getsockname()[1]), "PET_NNODES": "1"}).items():
            monkeypatch.setenv(name, value)
        assert process.leftover_rank() is None
    assert process.leftover_rank() is not None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert process.leftover_rank() is None


@pytest.mark.parametrize(
    ("world", "local", "local_rank", "nodes"),
    [(3, 3, 0, 1), (3, 3, 1, 1), (1, 1, 0, 1), (4, 2, 0, 1), (4, 2, 1, 1), (2, 2, 0, 2), (2, 1, 0, 1), (4, 4, 0, 2)],
)
def test_another_number_of_ranks_than_in_the_settings_is_refused_once(
    world: int, local: int, local_rank: int, nodes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(program.time, "sleep", waits.append)
    monkeypatch.setattr(process, "leftover_rank", lambda: None)
    sizes = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "LOCAL_RANK": local_rank}
    for name, value in (RANK | sizes).items():
        monkeypatch.setenv(name, str(value))
    settings = ["launch.nproc_per_node=2", f"launch.nodes={nodes}", "run.dir=unused"]
    config = compose(["experiment=booking_sft", *settings])
    assert program.run("a.module", "", Config, [], lambda *_: (config, 2, lambda: None)) == EXIT_BAD_INPUT
    message = f"launch.nodes={nodes}: torchrun has started {world} ranks, {local} of them on this node; start it with "
    message += f"--nnodes={nodes} --nproc-per-node=2, or change the settings"
    assert capsys.readouterr().err.count(message) == (local_rank == 0)
    assert bool(waits) == (local_rank == 1)  # for the launcher, which ends it after the first rank
