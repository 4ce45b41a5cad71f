from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_collab import environments
from megatron_collab.config import Config
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.data.examples import load_conversations, load_tasks
from megatron_collab.environments import World, booking
from megatron_collab.settings import ConfigError
from megatron_collab.types import Task


def config(folder: Path, world: str | None = "booking", seed: int = 0) -> Config:
    config = Config()
    config.data.world, config.data.dir, config.run.seed = world, str(folder), seed
    return config


def prepare(config: Config) -> None:
    environments.prepare(config.data, config.run.seed)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds") / "booking"
    prepare(config(folder))
    return folder


@pytest.mark.processes
def test_the_booking_world_is_a_model_and_data(world: Path) -> None:
    hf = json.loads((world / "model" / "config.json").read_text())
    weights = load_file(world / "model" / "model.safetensors")
    chat = ChatRenderer(str(world / "model"))
    assert hf["model_type"] == "qwen3" and hf["eos_token_id"] == chat.end_id
    assert 400_000 < sum(weight.numel() for weight in weights.values()) < 600_000
    assert len(load_tasks(world / "train.jsonl")) == len(load_conversations(world / "sft.jsonl")) == 4096
    assert list(load_tasks(world / "eval.jsonl")) == booking.tasks(0, booking.EVALUATED, held_out=True)
    longest = max(len(chat.first(messages)) for messages in load_conversations(world / "sft.jsonl"))
    assert longest < booking.CONTEXT / 3


@pytest.mark.seconds
def test_an_existing_world_is_left_alone(world: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in world.rglob("*")}
    prepare(config(world))
    assert {file: file.stat().st_mtime_ns for file in world.rglob("*")} == before


def test_a_world_of_another_seed_is_refused(world: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.dir=.*'seed': 0.*not.*'seed': 1.*choose another"):
        prepare(config(world, seed=1))


@pytest.mark.parametrize("marker", [None, b"", b"{", b"[" * 5000, b"[" * 101 + b"]" * 101, b"\xff", b" " * 99])
def test_a_folder_without_a_world_is_refused(tmp_path: Path, marker: bytes | None) -> None:
    if marker is not None:
        (tmp_path / "world.json").write_bytes(marker)
    with pytest.raises(ValueError, match=r"data\.dir=.*holds something else"):
        prepare(config(tmp_path))


@pytest.mark.seconds
def test_an_unfinished_world_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> list[Task]:
        raise KeyboardInterrupt

    folder = tmp_path / "world"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(booking, "tasks", broken)
        prepare(config(folder))
    assert not folder.exists()
    prepare(config(folder))
    assert (folder / "world.json").exists() and not list(tmp_path.glob("*unfinished*"))


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("{}['x']", "KeyError: 'x'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise RuntimeError('a\\nb')", "RuntimeError: a b"),
        ("raise StopIteration(4)", "StopIteration: 4"),
        ("self.options.size", "AttributeError: 'NoOptions' object has no attribute 'size'"),
    ],
)
def test_what_a_world_raises_is_one_line(tmp_path: Path, code: str, fault: str) -> None:
    name = f"{tmp_path}/my.py:Mine"
    make = f"from {World.__module__} import World\nclass Mine(World):\n    def make(self, *_):\n        {code}\n"
    (tmp_path / "my.py").write_text(make)
    with pytest.raises(ConfigError) as error:
        prepare(config(tmp_path / "world", name))
    assert str(error.value) == f"data.world={name}: its make fails ({fault}); mend it"
    assert not (tmp_path / "world").exists()


def test_without_a_world_nothing_is_prepared(tmp_path: Path) -> None:
    prepare(config(tmp_path / "world", world=None))
    assert not (tmp_path / "world").exists()


def test_a_world_needs_a_folder() -> None:
    nowhere = config(Path("x"))
    nowhere.data.dir = None
    with pytest.raises(ValueError, match=r"data\.dir: not set"):
        prepare(nowhere)
