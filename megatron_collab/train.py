"""Entry and loop: `python -m megatron_collab.train experiment=NAME [option=value …]`.

Checks the configuration, starts itself under torchrun unless torchrun started it, and trains. Every rank
runs `fit`; rank 0 also holds the SGLang server and the Ray workers.
"""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from megatron_collab import config as options
from megatron_collab import launch
from megatron_collab.config import Config, ConfigError
from megatron_collab.processes import RunStopped, die_with_parent

EXIT_BAD_INPUT, EXIT_STOPPED = 2, 3


def fit(config: Config) -> None:
    """Train from the last checkpoint in run.dir, or from model.path, to train.steps."""
    from megatron_collab.actor import model
    from megatron_collab.actor.actor import Actor
    from megatron_collab.actor.checkpoint import Checkpoints
    from megatron_collab.actor.critic import Critic
    from megatron_collab.observe.progress import Stopwatch
    from megatron_collab.observe.run import Run
    from megatron_collab.rollout.engine import Engine
    from megatron_collab.sft import Supervised

    sampling = config.train.stage == "rl"
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(config)) if sampling else None
        stack.enter_context(model.init_parallel(config))
        policy, shape = model.load(config)
        reference = model.frozen_copy(policy) if sampling and config.algo.kl_coef > 0 else None
        critic = Critic(config) if sampling and config.algo.advantage == "gae" else None
        actor = Actor(config, policy, reference, critic)
        checkpoints = stack.enter_context(
            Checkpoints(Path(config.run.dir) / "checkpoints", config.train.keep_checkpoints, config.launch.timeout)
        )
        start, state = checkpoints.load_latest(actor) or (0, {})
        run = stack.enter_context(Run(config, start, state))
        publisher = stack.enter_context(engine.publisher(policy, shape)) if engine else None
        source = engine.collector(run) if engine else Supervised(config)

        if publisher:
            publisher.publish(version=start)
        if start == 0:
            with actor.offloaded():
                source.evaluate("before", step=0)
        clock = Stopwatch()
        for step in range(start, config.train.steps):
            try:
                with actor.offloaded():
                    batch = source.next(step)
            except RunStopped:
                if step > start and step % config.train.checkpoint_every:  # what was learned since the last one
                    checkpoints.save(step, actor, run.state())
                raise
            clock.lap("rollout")
            stats = actor.update(batch)
            clock.lap("update")
            if publisher:
                publisher.publish(version=step + 1)
                clock.lap("publish")
            run.record(step, {**batch.metrics, **stats, **clock.read()})
            if (step + 1) % config.train.checkpoint_every == 0 or step + 1 == config.train.steps:
                checkpoints.save(step + 1, actor, run.state())
                clock.lap("save")
        checkpoints.finish()
        with actor.offloaded():
            source.evaluate("after", step=config.train.steps)
        model.save_hf(policy, Path(config.run.dir) / "hf", Path(config.model.path), shape)
        run.finish()


def main(arguments: list[str]) -> int:
    if "--help" in arguments:
        print(__doc__, "Options [default]:", *options.describe(), sep="\n")
        return 0
    try:
        config = options.load(arguments)
        launch.prepare(config)
    except ConfigError as error:
        if launch.global_rank() == 0:
            print(f"megatron-collab: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if launch.finished(config):
        print(f"{config.run.dir}: all {config.train.steps} steps are done; choose another run.dir to train anew")
        return 0
    if not launch.under_torchrun():
        launch.replace_by_torchrun(config, arguments)
    die_with_parent(launch.parent())
    if launch.global_rank() == 0:  # the one that has something to put away
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    else:  # Python would see Ctrl-C only after the collective that it waits in
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        fit(config)
    except RunStopped as error:
        if launch.global_rank() == 0:
            print(f"megatron-collab: {error}", file=sys.stderr)
        return EXIT_STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
