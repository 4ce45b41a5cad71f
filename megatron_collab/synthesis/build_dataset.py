"""Conversations built turn by turn: `python -m megatron_collab.synthesis.build_dataset experiment=NAME run.dir=OUT …`.

Builds a conversation for each task of data.eval: at every turn, build.candidates replies are sampled, each is continued
in rollout.futures futures and scored, and the best one is kept, with the user's answer in one of its futures. The
assistant (model.path or assistant.model), users, judges, limits and budget are configured as for an evaluation.
OUT/built has all candidates as rows with the columns of CollabLLM's data, and a card; build.push_to_hub uploads it.
After an interruption, the same command resumes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_collab.runtime import gpu_environment, process, signals

if __name__ == "__main__":
    signals.begin()
    gpu_environment.reload()
    process.imports_begin()  # the imports below take seconds

from megatron_collab import patches
from megatron_collab.config import BuildDatasetConfig
from megatron_collab.evaluate import evaluate
from megatron_collab.launch import evaluation, inherited, prepare, program
from megatron_collab.launch.spec import RunSpec, building_spec
from megatron_collab.runtime import files, hub, keys
from megatron_collab.runtime.redact import redact
from megatron_collab.synthesis.built import FOLDER
from megatron_collab.synthesis.settings import load

if TYPE_CHECKING:
    from megatron_collab.synthesis.synthesis import Synthesis


logger = logging.getLogger("megatron_collab")  # __name__ is __main__ if this module is the program
MODULE = "megatron_collab.synthesis.build_dataset"
UPLOADED = "uploaded.json"  # in run.dir: the digests of the uploaded files


def prepared(arguments: list[str], stack: ExitStack) -> program.Prepared | str:
    """The checked configuration and the function that ranks run; or a message if all is done. Raises ConfigError.

    Enters the lock of run.dir into `stack`.
    """
    with inherited.settings(arguments) as defaults:
        config = load(arguments, defaults)
        stack.enter_context(prepare.run_lock(config))
        data = evaluation.pin(config, MODULE)
        if evaluation.is_done(config, data):
            if not _uploaded(config):
                return config, 1, partial(_upload, config)
            return (
                f"{config.run.dir}: all conversations are built; see built/README.md there, or choose another run.dir"
            )
        serving, spec, step = evaluation.prepared(config, building_spec)
    return config, 1, partial(_build, config, serving, spec, step)


def _build(config: BuildDatasetConfig, serving: BuildDatasetConfig, spec: RunSpec, step: int) -> None:
    evaluate(config, serving, spec, step, _synthesis(spec))
    _upload(config)


def _synthesis(spec: RunSpec) -> Callable[..., Synthesis]:
    """The evaluator that builds; only ranks import it, since it needs Ray."""
    patches.apply("megatron")
    from megatron_collab.synthesis.synthesis import Synthesis

    return partial(Synthesis, spec)


def _uploaded(config: BuildDatasetConfig) -> bool:
    """Whether build.push_to_hub is unset or already has the current files."""
    marker = Path(config.run.dir) / UPLOADED
    return config.build.push_to_hub is None or (marker.is_file() and json.loads(marker.read_text()) == _state(config))


def _state(config: BuildDatasetConfig) -> dict[str, Any]:
    """The target repository of the data set, and the digest of each file by name."""
    built = sorted((Path(config.run.dir) / FOLDER).iterdir())
    return {
        "repo": config.build.push_to_hub,
        "files": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in built},
    }


def _upload(config: BuildDatasetConfig) -> None:
    """Upload the data set if it is not uploaded yet. Raises RunStopped after printing the reason."""
    repo = config.build.push_to_hub
    if repo is None or process.global_rank() or _uploaded(config):
        return
    run_dir = Path(config.run.dir)
    try:
        with keys.in_environment():
            commit = hub.upload(run_dir / FOLDER, repo, private=not config.build.public)
    except hub.UploadFailed as error:
        logger.error(redact(str(error)))
        raise
    files.replace(run_dir / UPLOADED, json.dumps(_state(config)))
    logger.info(f"{run_dir / FOLDER}: uploaded to {repo} at {commit}")


def main(arguments: list[str]) -> int:
    return program.run(MODULE, __doc__, BuildDatasetConfig, arguments, prepared)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
