"""Evaluation without training: `python -m megatron_collab.evaluate experiment=NAME run.dir=OUT [option=value …]`.

Plays the tasks of data.eval with the users, judges and metrics of a run, and writes the same files and a report. The
assistant is model.path (a Hugging Face folder, or a checkpoint as RUN, RUN@STEP or RUN@best), or with assistant.model
any LiteLLM model, including a running server at assistant.api_base. If it is a checkpoint, its run's settings of
conversations and rewards are the defaults. Settings of training are ignored. After an interruption, the same command
resumes.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from megatron_collab.runtime import gpu_environment, process, signals

if __name__ == "__main__":
    signals.begin()
    gpu_environment.reload()
    process.imports_begin()  # the imports below take seconds

from megatron_collab import patches
from megatron_collab.config import EvaluateConfig, run_record
from megatron_collab.launch import evaluation, inherited, inputs, prepare, program
from megatron_collab.launch.spec import RunSpec, evaluation_spec

MODULE = "megatron_collab.evaluate"
# Modules that need Megatron, Ray or SGLang are imported in the function, since only ranks need them.


def evaluate(
    config: EvaluateConfig,
    serving: EvaluateConfig,
    spec: RunSpec,
    step: int,
    evaluator_class: Callable[..., Any] | None = None,
) -> None:
    """Evaluate the sets of data.eval that are not recorded yet; runs on every rank, and rank 0 does the work.

    `serving`: `config` with the model in the form that servers load, `spec`: its settled settings; `step`: the training
    step of its weights. `evaluator_class`: what plays the sets, if not Evaluator itself; building of conversations
    hands in its own.
    """
    patches.apply("megatron")
    from megatron_collab.launch.session import Session
    from megatron_collab.observability.folder import RunFolder
    from megatron_collab.rollout.evaluation import Evaluator
    from megatron_collab.rollout.lead import Lead
    from megatron_collab.rollout.servers import Servers
    from megatron_collab.trainer.megatron.parallel import connected

    assert spec.play and spec.serving
    with Session(serving) as session:
        servers = session.enter(Servers(spec.play, spec.serving))
        session.enter(connected(serving.launch))
        run = session.enter(RunFolder(run_record(config), start=step, steps=step))
        serve = partial(servers.serve_loaded, version=step)
        lead = Lead.standalone(servers, step)
        evaluator = (evaluator_class or Evaluator)(spec.play, spec.data, run, serve, lead)
        if run.leader:
            inputs.record_inputs(run.folder)
            session.enter(evaluator.standalone())
        serve()
        evaluator.evaluate(step)
        if run.leader:
            run.finish({"model": config.assistant.model or config.model.path, "step": step, **run.scalars()})
            shutil.rmtree(Path(config.run.dir) / evaluation.FOLDER, ignore_errors=True)


def prepared[Program: EvaluateConfig](
    module: str,
    load: Callable[[list[str], Mapping[str, Any]], Program],
    settle: Callable[[Program], RunSpec],
    work: Callable[[Program, Program, RunSpec, int], None],
    when_done: Callable[[Program], program.Prepared | str],
    arguments: list[str],
    stack: ExitStack,
) -> program.Prepared | str:
    """The checked configuration and the function that ranks run, `work`; or `when_done`. Raises ConfigError.

    Enters the lock of run.dir into `stack`. `load`, `settle`: as `evaluation.load` and `evaluation_spec`, for the
    program's own settings.
    """
    with inherited.settings(arguments) as defaults:
        config = load(arguments, defaults)
        stack.enter_context(prepare.run_lock(config))
        config, data = evaluation.pinned(config, module)
        if evaluation.is_done(config, data):
            return when_done(config)
        serving, spec, step = evaluation.prepared(config, settle)
        inputs.draft_inputs(config, data)
    return config, 1, partial(work, config, serving, spec, step)


def _when_done(config: EvaluateConfig) -> str:
    model = config.assistant.model or config.model.path
    return f"{config.run.dir}: all evaluations of {model} are done; see report.html there, or choose another run.dir"


prepared_evaluation = partial(prepared, MODULE, evaluation.load, evaluation_spec, evaluate, _when_done)


def main(arguments: list[str]) -> int:
    return program.run(MODULE, __doc__, EvaluateConfig, arguments, prepared_evaluation)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
