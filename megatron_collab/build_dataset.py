"""Conversations built turn by turn: `python -m megatron_collab.build_dataset experiment=NAME run.dir=OUT …`.

About each task of data.eval a conversation is played: at every turn build.candidates replies are sampled, each is
played on in rollout.futures futures and scored, and the best one goes on, with the user's answer in one of them.
The assistant is that of an evaluation (model.path, or assistant.model), and so are users, judges, limits and budget.
OUT/built has all candidates as rows with the columns of CollabLLM's data, and a card. Interrupted, the same command
goes on.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial

from megatron_collab.runtime import process, signals

if __name__ == "__main__":
    signals.begin()
    process.imports_begin()  # those below take seconds

from megatron_collab.evaluate import evaluate
from megatron_collab.launch import evaluation, inherited, prepare, program

MODULE = "megatron_collab.build_dataset"


def prepared(arguments: list[str], held: ExitStack) -> program.Prepared | str:
    """The settings and what the ranks do, all checked; or that it is done. Raises ConfigError.

    `held` then has run.dir's lock.
    """
    with inherited.settings(arguments) as defaults:
        config = evaluation.load(arguments, defaults, builds=True)
        held.enter_context(prepare.locked(config))
        evaluation.pin(config, MODULE)
        if evaluation.done(config):
            return (
                f"{config.run.dir}: all conversations are built; see built/README.md there, or choose another run.dir"
            )
        serving, step = evaluation.prepared(config)
    return config, partial(evaluate, config, serving, step, builds=True)


def main(arguments: list[str]) -> int:
    return program.run(MODULE, __doc__, arguments, prepared)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
