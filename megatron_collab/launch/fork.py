"""run.fork: a new run that goes on from the training state of another one, under other settings."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from filelock import FileLock

from megatron_collab.checkpoint import storage
from megatron_collab.config import SETTINGS, Config, ConfigError, LoraConfig, read_settings, require
from megatron_collab.config.load import leaves
from megatron_collab.models import hf_config, lora
from megatron_collab.runtime import hub
from megatron_collab.runtime.files import replace

FORKED = "fork.json"  # in run.dir: the run and the step that it goes on from


def fork(config: Config) -> None:
    """Give run.dir the checkpoint that run.fork names as its first one, unless an earlier start has done so.

    The new run resumes from it: weights, optimizer, random states and the number of the step. Files are shared with the
    other run where the file system can link them, so neither run loses one that the other discards. Raises ConfigError.
    """
    given, folder = config.run.fork, Path(config.run.dir)
    if given is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".fork.lock"):
        own = folder / "checkpoints"
        if storage.candidates(own):
            message = f"run.fork={given}: run.dir={folder} has checkpoints of its own; choose another run.dir"
            return require((folder / FORKED).is_file(), message)
        checkpoint = _checked(config, given)
        saved = storage.read_state(checkpoint) or {}
        row = {"from": str(checkpoint.parent.parent.resolve()), "step": saved["step"]}
        replace(folder / FORKED, json.dumps(row) + "\n")
        new = storage.begin(own, saved["step"])
        for file in checkpoint.iterdir():
            if file.name != storage.STATE:
                _share(file, new / file.name)
        # Not the other run's: what it had in flight, and the time that it took.
        state = {name: value for name, value in saved.items() if name != "files"} | {"state": {}}
        storage.commit(new, state, saved["files"])


def _checked(config: Config, given: str) -> Path:
    """The checkpoint that the run can go on from."""
    setting = f"run.fork={given}"
    try:
        checkpoint = storage.find_checkpoint(Path(given))
    except ConfigError as error:
        raise ConfigError(f"run.fork={error}") from error
    run = checkpoint.parent.parent
    saved = storage.read_state(checkpoint)
    require(saved is not None and "files" in saved, f"{setting}: {checkpoint} is damaged; give another step")
    settings = read_settings(run)
    require(settings is not None, f"{setting}: {run} has no {SETTINGS}; give the folder of a run")
    before = dict(leaves(settings))
    stage, advantage, model = (before.get(name) for name in ("train.stage", "algo.advantage", "model.path"))
    require(isinstance(model, str), f"{setting}: {run / SETTINGS} holds no settings of a run; give the folder of one")
    message = f"{setting}: a run of train.stage={stage}, and its optimizer with it; start from its model, model.path="
    require(stage == config.train.stage, f"{message}{run}/hf")
    critic = [settings == "gae" for settings in (advantage, config.algo.advantage)]
    message = f"{setting}: of algo.advantage={advantage}, and only gae has a critic; keep it"
    require(critic[0] == critic[1] or stage != "rl", message)
    moved = [bool(one) for one in (before.get("algo.dpo.refresh"), config.algo.dpo.refresh)]
    message = f"{setting}: of algo.dpo.refresh={before.get('algo.dpo.refresh', 0)}, and its reference with it; keep it"
    require(moved[0] == moved[1], message)
    _check_adapters(setting, run, lora.from_state(saved or {}), config.model.lora)
    step = (saved or {})["step"]
    message = f"{setting}: the run goes on from step {step}, and train.steps={config.train.steps}; raise it"
    require(step < config.train.steps, message)
    described = hub.folder(str(model)) / "config.json"
    if described.is_file():
        same = hf_config.read(described) == hf_config.read(hub.folder(config.model.path) / "config.json")
        message = f"{setting}: of another architecture than model.path={config.model.path}; give {model}"
        require(same, message)
    return checkpoint


def _check_adapters(setting: str, run: Path, before: LoraConfig | None, after: LoraConfig) -> None:
    """What a checkpoint has adapters of is added to the same model in the same way."""
    if before is None:
        message = f"{setting}: trained whole weights, and model.lora.rank={after.rank} adapters; start from its model, "
        return require(after.rank is None, f"{message}model.path={run}/hf")
    for name in ("rank", "alpha", "targets"):
        had, has = getattr(before, name), getattr(after, name)
        same = sorted(had) == sorted(has) if name == "targets" else had == has
        require(same, f"{setting}: has adapters of model.lora.{name}={had}, and here it is {has}; give the same")


def _share(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # on another file system, or one without links
        shutil.copyfile(file, target)
