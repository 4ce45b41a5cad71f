"""Nothing of a model is lost or changed by a conversion: what is not whole, or of another model, is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_collab.checkpoint import convert, hf
from megatron_collab.commands.__main__ import run
from tests.borders.damage import NORM, WRONG, Damage, described, written
from tests.helpers import make_model


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("made") / "model", vocab=301)


@pytest.fixture
def model(base_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base_model, tmp_path / "model"))


def tool(*arguments: object) -> int:
    return run("convert", [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def checkpoint(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "start"
    assert tool(base_model, folder, "--to-megatron") == 0
    return folder


def state(change: Callable[[dict], object]) -> Damage:
    """The checkpoint with another state.json; without sums of the files, as earlier versions had none."""

    def rewrite(folder: Path) -> None:
        file = folder / "step_0" / "state.json"
        fields = json.loads(file.read_text())
        del fields["files"]
        change(fields)
        file.write_text(json.dumps(fields))

    return rewrite


def old(folder: Path) -> None:
    """As an earlier version wrote it: which model it is of, only its tensors say."""
    state(lambda fields: fields.pop("model"))(folder)


def old_rotation(folder: Path) -> None:
    """As an earlier version recorded the rotary embedding."""
    rope = {"theta": 1e4, "scaling": None, "attention_factor": 1.0}
    state(lambda fields: fields["model"].update(rope=rope))(folder)


def no_metadata(folder: Path) -> None:
    old(folder)
    written("step_0/.metadata", "x")(folder)


FOREIGN: dict[str, tuple[Damage, dict[str, object], str]] = {
    "family": (
        lambda folder: None,
        {"model_type": "llama", "architectures": None},
        "has family=llama, and the model in the checkpoint",
    ),
    "scaling": (lambda folder: None, {"rms_norm_eps": 0.5}, "has norm_eps=0.5, and the model in the checkpoint"),
    "old, family": (
        old,
        {"model_type": "llama", "architectures": None},
        "all or part of decoder.layers.self_attention.k_layernorm.weight",
    ),
    "old, layers": (old, {"num_hidden_layers": 2}, "has 2 layers, the checkpoint has more"),
    "old, more layers": (old, {"num_hidden_layers": 4}, "in the checkpoint it is missing"),
    "old, width": (old, {"intermediate_size": 64}, "has shape (128, 64); in the checkpoint it has shape"),
    "old, vocabulary": (old, {"vocab_size": 300}, "has shape (300, 64); in the checkpoint it has"),
    "old, rotation": (old_rotation, {}, ""),
    "latest": (lambda folder: (folder / "latest").write_bytes(b"\xff\x00"), {}, ""),
    "state": (written("step_0/state.json", "{}"), {}, "is damaged (no valid state.json); give another checkpoint"),
    "metadata": (no_metadata, {}, ".metadata is corrupt"),
}


@pytest.mark.seconds
@pytest.mark.parametrize("name", FOREIGN)
def test_a_checkpoint_and_a_model_that_are_not_of_one_another(
    tmp_path: Path, model: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    change, settings, message = FOREIGN[name]
    altered = Path(shutil.copytree(checkpoint, tmp_path / "start"))
    change(altered)
    described(**settings, layer_types=None)(model)
    capsys.readouterr()
    assert tool(altered, tmp_path / "out", "--model", model) == (2 if message else 0)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == bool(message), error
    assert (tmp_path / "out").exists() == (not message)


@pytest.mark.parametrize("name", ["int8", "a tensor more", "cut in the weights", "outside", "pickled", "layers"])
def test_a_model_that_is_not_converted(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    change, message = WRONG[name]
    change(model)
    capsys.readouterr()
    assert tool(model, tmp_path / "out", "--to-megatron") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to_megatron", [True, False])
def test_what_was_written_is_compared_with_what_was_read(
    tmp_path: Path,
    model: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    to_megatron: bool,
) -> None:
    """One bit of one tensor is wrong on its way."""

    def flipped(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(torch.uint8).view(-1)[0] ^= 1
        return changed

    if to_megatron:
        real = convert._Convert.resolve_data
        monkeypatch.setattr(convert._Convert, "resolve_data", lambda self, item: flipped(real(self, item)))
    else:
        save = hf.save_file
        wrong = lambda tensors, *options: save(tensors | {NORM: flipped(tensors[NORM])}, *options)  # noqa: E731
        monkeypatch.setattr(hf, "save_file", wrong)
    arguments = [model, "--to-megatron"] if to_megatron else [checkpoint, "--model", model]
    capsys.readouterr()
    assert tool(*arguments, tmp_path / "out") == 2
    assert "differs from the source when read back" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
