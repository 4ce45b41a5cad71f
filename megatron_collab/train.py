"""The training loop: `python -m megatron_collab.train experiment=NAME [option=value …]`.

Checks the configuration, starts itself under torchrun unless torchrun started it, and trains: every rank runs
`train_rl` or `train_supervised`. Rank 0 also holds the SGLang servers and the Ray workers.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial

from megatron_collab.runtime import gpu_environment, process, signals

if __name__ == "__main__":
    signals.begin()
    gpu_environment.reload()
    process.imports_begin()  # the imports below take seconds

from megatron_collab import patches
from megatron_collab.algo.advantages import with_advantages
from megatron_collab.config import Config
from megatron_collab.data.spec import DataSpec
from megatron_collab.inference.spec import ServingSpec
from megatron_collab.launch import prepare, program
from megatron_collab.launch.validate import load
from megatron_collab.observability.run import Stopwatch
from megatron_collab.rollout.player import PlaySpec

# Modules that need Megatron, Ray or SGLang are imported in the functions, since only ranks need them.


def train_rl(config: Config, play: PlaySpec, data: DataSpec, serving: ServingSpec) -> None:
    """Sample from the policy, score, update: from the last checkpoint in run.dir, or model.path, to train.steps."""
    patches.apply("megatron")
    from megatron_collab.launch.session import TrainingSession
    from megatron_collab.rollout.manager import RolloutManager
    from megatron_collab.rollout.servers import Servers
    from megatron_collab.trainer.megatron.parallel import init_parallel
    from megatron_collab.trainer.trainer import PolicyTrainer
    from megatron_collab.weight_sync.sync import WeightSync

    with TrainingSession(config) as session:
        servers = session.enter(Servers(play, serving))  # colocated ones have released the GPUs afterwards
        session.enter(init_parallel(config))
        trainer = PolicyTrainer(config)  # policy, reference, critic
        step = session.resume(trainer)
        weights = session.enter(WeightSync(config, serving.policy, trainer.chunks, trainer.shape, servers.pool))
        rollouts = RolloutManager(config, data, servers, weights, session.run, session.state("collector"))
        session.enter(rollouts)
        clock = Stopwatch()
        while step < config.train.steps:
            with session.save_if_stopped(step, trainer, collector=rollouts.state()):
                # 1. Sample: the optimizer leaves the devices, the servers take them
                with trainer.offloaded(), servers.awake():
                    weights.sync(version=step)
                    clock.lap("publish")
                    if rollouts.evaluation_due(step):
                        rollouts.evaluate(step)
                        clock.lap("evaluation")
                    batch = rollouts.collect(step)  # turns -> futures -> rewards -> credits
                    clock.lap("rollout")
                clock.lap("publish")  # memory transfers between servers and trainer count as publish
                # 2. Learn
                scored = trainer.score(batch)  # old and reference log-probs, values
                scored = with_advantages(scored, config.algo)
                stats = trainer.update(scored)  # mini-batches: loss, gradient, optimizer
                clock.lap("update")
            # 3. Record
            rollouts.learned(stats)
            session.record(step, {**batch.metrics, **stats, **servers.take_counters(), **clock.read()})
            step += 1
            if session.save_due(step):
                session.save(step, trainer, collector=rollouts.state())
                rollouts.forget(session.checkpoints.on_disk)
                clock.lap("save")

        session.checkpoints.finish()
        if rollouts.evaluation_due(step):
            with trainer.offloaded(), servers.awake():
                weights.sync(version=step)
                rollouts.evaluate(step)
        session.finish(trainer)


def train_supervised(config: Config, data: DataSpec) -> None:
    """Train on conversations (sft) or pairs (dpo), from the last checkpoint or from model.path to train.steps."""
    patches.apply("megatron")
    from megatron_collab.data.datasets import SupervisedData
    from megatron_collab.launch.session import TrainingSession
    from megatron_collab.trainer.megatron.parallel import init_parallel
    from megatron_collab.trainer.trainer import PolicyTrainer

    with TrainingSession(config) as session:
        session.enter(init_parallel(config))
        trainer, batches = PolicyTrainer(config), SupervisedData(data)
        trainer.keep_reference(batches)  # dpo: log-probs of the first policy, before it learns
        step = session.resume(trainer)
        clock = Stopwatch()

        while step < config.train.steps:
            with session.save_if_stopped(step, trainer):
                if session.validate(step, trainer, batches):
                    clock.lap("evaluation")
                scored = trainer.score(batches.batch(step))  # dpo: reference log-probs
                stats = trainer.update(scored)
            clock.lap("update")
            session.record(step, {**stats, **clock.read()})
            step += 1
            if session.save_due(step):
                session.save(step, trainer)
                clock.lap("save")

        session.checkpoints.finish()
        session.validate(step, trainer, batches)
        session.finish(trainer)


def prepared(arguments: list[str], stack: ExitStack) -> program.Prepared | str:
    """The checked configuration and the function that ranks run; or a message if the run is done. Raises ConfigError.

    Enters the lock of run.dir into `stack`.
    """
    config = load(arguments)
    stack.enter_context(prepare.run_lock(config))
    spec = prepare.prepare(config)
    if done := prepare.finished_steps(config):
        return f"{config.run.dir}: all {done} steps are done; raise train.steps to train on, or choose another run.dir"
    ranks = config.launch.nproc_per_node
    if spec.play and spec.serving:
        return config, ranks, partial(train_rl, config, spec.play, spec.data, spec.serving)
    return config, ranks, partial(train_supervised, config, spec.data)


def main(arguments: list[str]) -> int:
    return program.run("megatron_collab.train", __doc__, Config, arguments, prepared)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
