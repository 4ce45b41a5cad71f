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
from megatron_collab.algo.credit import CreditSpec
from megatron_collab.config import Config
from megatron_collab.data.spec import DataSpec
from megatron_collab.inference.spec import ServingSpec
from megatron_collab.launch import prepare, program
from megatron_collab.launch.trainer_specs import sync_spec, trainer_spec
from megatron_collab.launch.validate import load
from megatron_collab.observability.run import Stopwatch
from megatron_collab.rollout.player import PlaySpec

# Modules that need Megatron, Ray or SGLang are imported in the functions, since only ranks need them.


def train_rl(config: Config, play: PlaySpec, data: DataSpec, serving: ServingSpec) -> None:
    """Sample from the policy, score, update: from the last checkpoint in run.dir, or model.path, to train.steps."""
    patches.apply("megatron")
    from megatron_collab.launch.session import Session, TrainingRun
    from megatron_collab.rollout.manager import RolloutManager
    from megatron_collab.rollout.servers import Servers
    from megatron_collab.trainer.megatron.parallel import init_parallel
    from megatron_collab.trainer.trainer import PolicyTrainer
    from megatron_collab.weight_sync.sync import WeightSync

    with Session(config) as session:
        servers = session.enter(Servers(play, serving))  # then colocated ones have released the GPUs
        spec = trainer_spec(config)
        session.enter(init_parallel(config.launch, spec.network))
        trainer = PolicyTrainer(spec)  # policy, reference, critic
        training = TrainingRun(config, session, trainer)  # from the newest checkpoint
        step = training.start
        sync, policy = sync_spec(config), serving.policy
        weights = session.enter(WeightSync(sync, policy, trainer.chunks, trainer.shape, servers.pool))
        credit, state = CreditSpec(config.algo, config.reward, config.rollout), training.state("collector")
        rollouts = RolloutManager(config.train, credit, data, servers, weights, training.run, state)
        session.enter(rollouts)
        clock = Stopwatch()
        while step < config.train.steps:
            with training.save_if_stopped(step, trainer, collector=rollouts.state()):
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
            if config.train.record_tokens:
                rollouts.record_tokens(scored, trainer.log_probs(trainer.chunks, scored, interruptible=False))
                clock.lap("tokens")
            seconds = clock.read()
            idle = servers.idle_shares(seconds)
            training.record(step, {**batch.metrics, **stats, **servers.take_counters(), **idle, **seconds})
            step += 1
            if training.save_due(step):
                training.save(step, trainer, collector=rollouts.state())
                rollouts.forget(training.checkpoints.on_disk)
                clock.lap("save")

        training.checkpoints.finish()
        if rollouts.evaluation_due(step):
            with trainer.offloaded(), servers.awake():
                weights.sync(version=step)
                rollouts.evaluate(step)
        training.finish(trainer)


def train_supervised(config: Config, data: DataSpec) -> None:
    """Train on conversations (sft) or pairs (dpo), from the last checkpoint or from model.path to train.steps."""
    patches.apply("megatron")
    from megatron_collab.data.datasets import SupervisedData
    from megatron_collab.launch.session import Session, TrainingRun
    from megatron_collab.trainer.megatron.parallel import init_parallel
    from megatron_collab.trainer.trainer import PolicyTrainer

    with Session(config) as session:
        spec = trainer_spec(config)
        session.enter(init_parallel(config.launch, spec.network))
        trainer, batches = PolicyTrainer(spec), SupervisedData(data)
        trainer.keep_reference(batches)  # dpo: log-probs of the first policy, before it learns
        training = TrainingRun(config, session, trainer)  # from the newest checkpoint
        step = training.start
        clock = Stopwatch()

        while step < config.train.steps:
            with training.save_if_stopped(step, trainer):
                if training.validate(step, trainer, batches):
                    clock.lap("evaluation")
                scored = trainer.score(batches.batch(step))  # dpo: reference log-probs
                stats = trainer.update(scored)
            clock.lap("update")
            training.record(step, {**stats, **clock.read()})
            step += 1
            if training.save_due(step):
                training.save(step, trainer)
                clock.lap("save")

        training.checkpoints.finish()
        training.validate(step, trainer, batches)
        training.finish(trainer)


def prepared(arguments: list[str], stack: ExitStack) -> program.Prepared | str:
    """The checked configuration and the function that ranks run; or a message if the run is done. Raises ConfigError.

    Enters the lock of run.dir into `stack`.
    """
    config = load(arguments)
    stack.enter_context(prepare.run_lock(config))
    config, spec = prepare.prepare(config)
    if done := prepare.finished_steps(config):
        length = "train.steps" if config.train.epochs is None else "train.epochs"
        return f"{config.run.dir}: all {done} steps are done; raise {length} to train on, or choose another run.dir"
    ranks = config.launch.nproc_per_node
    if spec.play and spec.serving:
        return config, ranks, partial(train_rl, config, spec.play, spec.data, spec.serving)
    return config, ranks, partial(train_supervised, config, spec.data)


def main(arguments: list[str]) -> int:
    return program.run("megatron_collab.train", __doc__, Config, arguments, prepared)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
