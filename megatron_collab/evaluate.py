"""Evaluation without training: `python -m megatron_collab.evaluate experiment=NAME run.dir=OUT [option=value …]`.

Plays the tasks of data.eval with the users, judges and metrics of a run, and writes the same files and a report. The
assistant is model.path (a Hugging Face folder, or a checkpoint as RUN, RUN@STEP or RUN@best), or with assistant.model
any model of LiteLLM's, also a running server by assistant.api_base. A checkpoint is played and scored as its run was,
where nothing else is given. Settings of training are ignored. Interrupted, the same command goes on.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from megatron_collab.runtime import gpu_environment, process, signals

if __name__ == "__main__":
    signals.begin()
    gpu_environment.reload()
    process.imports_begin()  # those below take seconds

from megatron_collab import patches
from megatron_collab.config import Config
from megatron_collab.launch import evaluation, inherited, prepare, program

# Imported in the function: what needs Megatron, Ray or SGLang, which only a rank does.


def evaluate(config: Config, serving: Config, step: int, builds: bool = False) -> None:
    """Evaluate the sets of data.eval that are not recorded yet; every rank runs it, and the first one does the work.

    `serving` is `config` with the model as servers load it; `step`: of its weights in their run. `builds`:
    conversations are built, see build_dataset.py.
    """
    patches.apply("megatron")
    from megatron_collab.observability.folder import RunFolder
    from megatron_collab.rollout.evaluation import Evaluator
    from megatron_collab.rollout.servers import Servers
    from megatron_collab.rollout.synthesis import Synthesis
    from megatron_collab.trainer.megatron.parallel import init_parallel
    from megatron_collab.trainer.session import Session

    with Session(serving) as session:
        servers = session.enter(Servers(serving))
        session.enter(init_parallel(serving))
        run = session.enter(RunFolder(config, start=step, steps=step))
        serve = partial(servers.serve_loaded, version=step)
        evaluator = (Synthesis if builds else Evaluator)(serving, run, restore=serve)
        if run.leader:
            session.enter(evaluator.alone(servers, step))
        serve()
        evaluator.evaluate(step)
        if run.leader:
            run.finish({"model": config.assistant.model or config.model.path, "step": step, **run.scalars()})
            shutil.rmtree(Path(config.run.dir) / evaluation.FOLDER, ignore_errors=True)


def prepared(arguments: list[str], held: ExitStack) -> program.Prepared | str:
    """The settings of an evaluation and what its ranks do, all checked; or that it is done. Raises ConfigError.

    `held` then has run.dir's lock.
    """
    with inherited.settings(arguments) as defaults:
        config = evaluation.load(arguments, defaults)
        held.enter_context(prepare.locked(config))
        evaluation.pin(config)
        if evaluation.done(config):
            what = config.assistant.model or config.model.path
            there = "see report.html there, or choose another run.dir"
            return f"{config.run.dir}: all sets are evaluated of {what}; {there}"
        serving, step = evaluation.prepared(config)
    return config, partial(evaluate, config, serving, step)


def main(arguments: list[str]) -> int:
    return program.run("megatron_collab.evaluate", __doc__, arguments, prepared)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
