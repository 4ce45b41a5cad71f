"""The training loop: `python -m megatron_collab.train experiment=NAME [option=value …]`.

Checks the configuration, starts itself under torchrun unless torchrun started it, and trains: every rank runs
`train_rl` or `train_sft`. Rank 0 also holds the SGLang servers and the Ray workers.
"""

from __future__ import annotations

import os
import sys

from megatron_collab.runtime import process

if __name__ == "__main__":
    process.imports_begin()  # those below take seconds

from megatron_collab import patches
from megatron_collab.algo.advantages import with_advantages
from megatron_collab.config import Config, ConfigError
from megatron_collab.launch import prepare
from megatron_collab.launch.help import composed, help_text
from megatron_collab.launch.validate import load
from megatron_collab.observability.run import Stopwatch
from megatron_collab.runtime import network
from megatron_collab.runtime.redact import redact

# Imported in the functions: what needs Megatron, Ray or SGLang, which only a rank does.


def train_rl(config: Config) -> None:
    """Sample from the policy, score, learn: from the last checkpoint in run.dir, or from model.path, to train.steps."""
    patches.apply("megatron")
    from megatron_collab.rollout.manager import RolloutManager
    from megatron_collab.rollout.servers import Servers
    from megatron_collab.trainer.megatron.parallel import init_parallel
    from megatron_collab.trainer.session import Session
    from megatron_collab.trainer.trainer import PolicyTrainer
    from megatron_collab.weight_sync.sync import WeightSync

    with Session(config) as session:
        servers = session.enter(Servers(config))  # colocated ones have given the devices back by then
        session.enter(init_parallel(config))
        trainer = PolicyTrainer(config)  # policy, reference, critic
        step = session.resume(trainer)
        weights = session.enter(WeightSync(config, trainer.chunks, trainer.shape, servers.pool))
        rollouts = session.enter(RolloutManager(config, servers, weights, session.run, session.state("collector")))
        clock = Stopwatch()

        while step < config.train.steps:
            with session.saved_when_stopped(step, trainer, collector=rollouts.state()):
                # 1. Sample: the optimizer leaves the devices, the servers take them
                with trainer.offloaded(), servers.awake():
                    weights.sync(version=step)
                    clock.lap("publish")
                    if rollouts.evaluation_due(step):
                        rollouts.evaluate(step)
                        clock.lap("evaluation")
                    batch = rollouts.collect(step)  # turns -> futures -> rewards -> credits
                    clock.lap("rollout")
                clock.lap("publish")  # memory that moves between servers and trainer counts as that
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


def train_sft(config: Config) -> None:
    """Learn from conversations: from the last checkpoint in run.dir, or from model.path, to train.steps."""
    patches.apply("megatron")
    from megatron_collab.data.datasets import SupervisedData
    from megatron_collab.trainer.megatron.parallel import init_parallel
    from megatron_collab.trainer.session import Session
    from megatron_collab.trainer.trainer import PolicyTrainer

    with Session(config) as session:
        session.enter(init_parallel(config))
        trainer, data = PolicyTrainer(config), SupervisedData(config)
        step = session.resume(trainer)
        clock = Stopwatch()

        while step < config.train.steps:
            with session.saved_when_stopped(step, trainer):
                if session.validate(step, trainer, data):
                    clock.lap("evaluation")
                stats = trainer.update(data.batch(step))
            clock.lap("update")
            session.record(step, {**stats, **clock.read()})
            step += 1
            if session.save_due(step):
                session.save(step, trainer)
                clock.lap("save")

        session.checkpoints.finish()
        session.validate(step, trainer, data)
        session.finish(trainer)


def main(arguments: list[str]) -> int:
    if "--help" in arguments:
        print(help_text(__doc__))
        return 0
    try:
        if "--cfg" in arguments:
            print(composed([argument for argument in arguments if argument != "--cfg"]))
            return 0
        config = load(arguments)
        prepare.prepare(config)
    except ConfigError as error:
        if process.first_on_node():  # what is missing may be missing on this node only
            print(f"megatron-collab: {redact(str(error))}", file=sys.stderr)
        return process.EXIT_BAD_INPUT
    if done := prepare.finished(config):
        print(f"{config.run.dir}: all {done} steps are done; raise train.steps to train on, or choose another run.dir")
        return 0
    if not process.under_torchrun():
        prepare.replace_by_torchrun(config, arguments)
    os.environ |= network.variables(config)
    process.die_with_parent(int(os.environ.get(process.LAUNCHER, "0")))  # 0: torchrun was started by hand
    process.take_signals(process.global_rank())
    try:
        (train_sft if config.train.stage == "sft" else train_rl)(config)
    except process.Preempted:
        return process.EXIT_PREEMPTED
    except process.RunStopped as error:
        return process.EXIT_HUNG if isinstance(error, process.Hung) else process.EXIT_STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
