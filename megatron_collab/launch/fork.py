"""run.fork: a new run that continues from the training state of another run, with other settings."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from filelock import FileLock

from megatron_collab.algo.advantages import advantage_class
from megatron_collab.checkpoint import storage
from megatron_collab.config import Config, read_settings
from megatron_collab.models import hf_config, lora
from megatron_collab.observability.run_record import SETTINGS
from megatron_collab.runtime import hub
from megatron_collab.runtime.files import replace
from megatron_collab.settings import ConfigError, LoraConfig, require
from megatron_collab.settings.values import leaves

FORKED = "fork.json"  # in run.dir: the run and the step that it continues from


def fork(config: Config) -> None:
    """Copy the checkpoint that run.fork names into run.dir as its first one, unless an earlier start has done so.

    The new run resumes from it: weights, optimizer, random states and step number. Files are hard links if the file
    system supports them, so neither run loses a file that the other deletes. Raises ConfigError.
    """
    source, folder = config.run.fork, Path(config.run.dir)
    if source is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".fork.lock"):
        checkpoints = folder / "checkpoints"
        if storage.candidates(checkpoints):
            message = f"run.fork={source}: run.dir={folder} already has checkpoints; choose another run.dir"
            return require((folder / FORKED).is_file(), message)
        checkpoint = _fork_checkpoint(config, source)
        saved = storage.read_state(checkpoint) or {}
        row = {"from": str(checkpoint.parent.parent.resolve()), "step": saved["step"]}
        replace(folder / FORKED, json.dumps(row) + "\n")
        new = storage.begin(checkpoints, saved["step"])
        for file in checkpoint.iterdir():
            if file.name != storage.STATE:
                _share(file, new / file.name)
        # Without the other run's groups in flight and its elapsed time.
        state = {name: value for name, value in saved.items() if name != "files"} | {"state": {}}
        storage.commit(new, state, saved["files"])


def _fork_checkpoint(config: Config, source: str) -> Path:
    """The checkpoint to continue from. Raises ConfigError if the run cannot continue from it."""
    setting = f"run.fork={source}"
    try:
        checkpoint = storage.find_checkpoint(Path(source))
    except ConfigError as error:
        raise ConfigError(f"run.fork={error}") from error
    run = checkpoint.parent.parent
    saved = storage.read_state(checkpoint)
    require(saved is not None and "files" in saved, f"{setting}: {checkpoint} is damaged; give another step")
    settings = read_settings(run)
    require(settings is not None, f"{setting}: {run} has no {SETTINGS}; give the folder of a run")
    before = dict(leaves(settings))
    stage, advantage, model = (before.get(name) for name in ("train.stage", "algo.advantage", "model.path"))
    require(isinstance(model, str), f"{setting}: {run / SETTINGS} contains no run settings; give the folder of a run")
    message = f"{setting}: its optimizer is of train.stage={stage}; start from its model, model.path="
    require(stage == config.train.stage, f"{message}{run}/hf")
    if stage == "rl":
        critic = [advantage_class(str(name)).critic for name in (advantage, config.algo.advantage)]
        message = f"{setting}: its run has algo.advantage={advantage}, and only one of both has a critic; keep it"
        require(critic[0] == critic[1], message)
    refreshes = [bool(refresh) for refresh in (before.get("algo.dpo.refresh"), config.algo.dpo.refresh)]
    message = f"{setting}: its reference is of algo.dpo.refresh={before.get('algo.dpo.refresh', 0)}; keep it"
    require(refreshes[0] == refreshes[1], message)
    _check_adapters(setting, run, lora.from_state(saved or {}), config.model.lora)
    step = (saved or {})["step"]
    message = f"{setting}: is at step {step} already, and train.steps={config.train.steps}; raise it"
    require(step < config.train.steps, message)
    described = hub.folder(str(model)) / "config.json"
    if described.is_file():
        same = hf_config.read(described) == hf_config.read(hub.folder(config.model.path) / "config.json")
        message = f"{setting}: its architecture differs from model.path={config.model.path}; give {model}"
        require(same, message)
    return checkpoint


def _check_adapters(setting: str, run: Path, before: LoraConfig | None, after: LoraConfig) -> None:
    """Raises ConfigError unless the run has the same adapters as the checkpoint: rank, alpha and targets."""
    if before is None:
        message = f"{setting}: trained all weights, not adapters (model.lora.rank={after.rank}); start from its model, "
        return require(after.rank is None, f"{message}model.path={run}/hf")
    for name in ("rank", "alpha", "targets"):
        old, new = getattr(before, name), getattr(after, name)
        same = sorted(old) == sorted(new) if name == "targets" else old == new
        require(same, f"{setting}: its adapters have model.lora.{name}={old}, not {new}; give the same")


def _share(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # on another file system, or one without links
        shutil.copyfile(file, target)
