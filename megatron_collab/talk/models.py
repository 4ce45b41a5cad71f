"""The models that a run's folder holds, as Hugging Face folders: the one that it began with, its checkpoints."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from megatron_collab.checkpoint import storage
from megatron_collab.config import Config, read_settings, recorded_value
from megatron_collab.observability import records
from megatron_collab.runtime import hub, keys
from megatron_collab.runtime.files import CACHE
from megatron_collab.settings import ConfigError, require

BEFORE, AFTER, BEST = "before", "after", "best"  # the model that the run began with, its newest one, train.keep_best
EXPORTED = "hf"  # in run.dir: the trained model of a finished run
CONVERTED = CACHE / "megatron-collab" / "converted"  # checkpoints as Hugging Face folders, also of read-only runs
MOST_CONVERTED = 4  # folders there, besides those in use; the ones that were not used for longest are removed


@dataclass(frozen=True)
class RunModel:
    """A model of a run after `step` steps, 0 for the one that it began with.

    `folder`: a Hugging Face folder, or that of a checkpoint, which is converted with the other files of `source`.
    """

    name: str
    step: int
    folder: Path
    source: Path

    @property
    def is_checkpoint(self) -> bool:
        return (self.folder / storage.STATE).is_file()


def models_of(run: Path) -> list[RunModel]:
    """The models of the run in folder `run`, by step: before, step_20, step_40, …; the last one is the newest.

    Raises ConfigError if the folder holds no training run, or its files cannot be read.
    """
    settings = read_settings(run)
    require(settings is not None, f"{run}: holds no run; give the folder of a training run")
    program = recorded_value(settings, "program", Config.program)
    message = f"{run}: holds a run of `megatron-collab {program}`, which trains no model; give the folder of a training"
    require(program == Config.program, message)
    path, steps = (recorded_value(settings, name, None) for name in ("model.path", "train.steps"))
    require(isinstance(path, str) and isinstance(steps, int), f"{run}: its settings name no model; restore config.json")
    source = hub.folder(path)
    folders = {int(folder.name.removeprefix("step_")): folder for folder in storage.candidates(run / "checkpoints")}
    if records.finished(run) and (run / EXPORTED / "config.json").is_file():
        folders[steps] = run / EXPORTED
    trained = [RunModel(f"step_{step}", step, folder, source) for step, folder in sorted(folders.items())]
    return [RunModel(BEFORE, 0, source, source), *trained]


def find_model(run: Path, name: str) -> RunModel:
    """The model of a run that `name` denotes: before, after (the newest), best, N or step_N.

    Raises ConfigError if there is none, or its files are missing.
    """
    models = models_of(run)
    names = ", ".join(model.name for model in models)
    if name == AFTER:
        require(len(models) > 1, f"{run}: has no checkpoint yet; take {BEFORE}, or wait for train.checkpoint_every")
        name = models[-1].name
    elif name == BEST:
        best = storage.best(run)
        require(best is not None, f"{run}: keeps no best checkpoint (train.keep_best); it has {names}")
        name = f"step_{best}"
    known = {model.name: model for model in models}
    model = known.get(name) or known.get(f"step_{name}")
    if model is None:
        raise ConfigError(f"{run}: has no model {name}; it has {names}")
    message = f"{run}: it began with the model {model.source}, which no longer exists; restore it"
    require((model.source / "config.json").is_file() or model.folder == run / EXPORTED, message)
    return model


@contextmanager
def hf_folder(model: RunModel, progress: Callable[[str], None]) -> Iterator[Path]:
    """The model as a Hugging Face folder, which is not removed within the block.

    A checkpoint is converted in a process of its own, and kept in CONVERTED for the next time. Raises ConfigError if
    it is damaged.
    """
    if not model.is_checkpoint:
        yield model.folder
        return
    written = (model.folder / storage.STATE).stat().st_mtime_ns
    identity = f"{model.folder.resolve()} {model.source.resolve()} {written}"
    folder = CONVERTED / hashlib.sha256(identity.encode()).hexdigest()[:16]
    CONVERTED.mkdir(parents=True, exist_ok=True)
    with FileLock(CONVERTED / ".lock"):
        if not folder.is_dir():
            _make_room()
            progress(f"{model.name}: converting {model.folder}")
            _convert(model, folder)
        os.utime(folder)
        in_use = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(in_use, fcntl.LOCK_SH)
    try:
        yield folder
    finally:
        os.close(in_use)


def _convert(model: RunModel, folder: Path) -> None:
    """Write `folder`. In a process of its own: Megatron-Core is large, and its patches must precede other imports."""
    command = [sys.executable, "-m", "megatron_collab.commands", "--quiet", "convert", str(model.folder), str(folder)]
    command += ["--model", str(model.source)]
    done = subprocess.run(
        command, env=keys.without(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()[-1:] or [f"the conversion ended with code {done.returncode}"]
        raise ConfigError(lines[0].removeprefix("megatron-collab: "))


def _make_room() -> None:
    """Remove converted models until there is room for one, but none that a process uses."""
    kept = sorted((path for path in CONVERTED.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for folder in kept[: max(0, len(kept) - MOST_CONVERTED + 1)]:
        in_use = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(BlockingIOError):
            fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        os.close(in_use)
