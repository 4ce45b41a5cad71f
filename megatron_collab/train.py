"""Entry and loop: `python -m megatron_collab.train experiment=NAME [option=value …]`.

Checks the configuration, starts itself under torchrun unless torchrun started it, and trains. Every rank
runs `fit`; rank 0 also holds the SGLang servers and the Ray workers.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path

from megatron_collab import patches
from megatron_collab.runtime.process import block_preemption_signal

if __name__ == "__main__":
    block_preemption_signal()  # what is imported below takes seconds, in which the signal would end us
    gc.disable()  # until `fit` has what it needs: imports make no garbage, and looking for it takes a quarter of them

from megatron_collab.config import Config, ConfigError
from megatron_collab.launch import prepare
from megatron_collab.launch.help import composed, help_text
from megatron_collab.launch.validate import load
from megatron_collab.runtime import network
from megatron_collab.runtime.process import (
    EXIT_BAD_INPUT,
    EXIT_HUNG,
    EXIT_PREEMPTED,
    EXIT_STOPPED,
    Hung,
    Preempted,
    RunStopped,
    die_with_parent,
    first_on_node,
    global_rank,
    parent,
    seconds_since_notice,
    under_torchrun,
    watch_for_preemption,
)
from megatron_collab.runtime.redact import redact


def fit(config: Config) -> None:
    """Train from the last checkpoint in run.dir, or from model.path, to train.steps."""
    patches.apply("megatron")
    from megatron_collab.checkpoint import hf
    from megatron_collab.checkpoint.checkpointer import Checkpoints
    from megatron_collab.observability.progress import Stopwatch
    from megatron_collab.observability.run import Run
    from megatron_collab.rollout.manager import Collector
    from megatron_collab.rollout.session import Engine
    from megatron_collab.runtime import hang_detector, rank0
    from megatron_collab.trainer.critic import Critic
    from megatron_collab.trainer.megatron import model, parallel
    from megatron_collab.trainer.trainer import Actor

    gc.freeze()
    gc.enable()
    supervised = config.train.stage == "sft"
    with ExitStack() as stack:
        stack.enter_context(hang_detector.armed(config))
        stack.enter_context(parallel.leader_ends_first(config.launch.timeout, partial(_explain, config)))
        engine = None if supervised else stack.enter_context(Engine(config))
        stack.enter_context(parallel.init_parallel(config))
        policy, shape = model.load(config)
        reference = model.frozen_copy(policy) if engine and config.algo.kl_coef > 0 else None
        critic = Critic(config) if engine and config.algo.advantage == "gae" else None
        actor = Actor(config, policy, reference, critic)
        checkpoints = stack.enter_context(
            Checkpoints(Path(config.run.dir) / "checkpoints", config.train.keep_checkpoints, config.launch.timeout)
        )
        start, state = checkpoints.load_latest(actor) or (0, {})
        run = stack.enter_context(Run(config, start, state))
        if engine:
            publisher = stack.enter_context(engine.publisher(policy, shape))
            collector = engine.collector(run, publisher, state.get("collector", {}))
            source: Collector | Supervised = stack.enter_context(collector)
            sampling: Callable[[int], AbstractContextManager[object]] = partial(engine.sampling, publisher)
        else:
            from megatron_collab.data.sft import Supervised

            source, sampling = Supervised(config), nullcontext

        clock = Stopwatch()
        sampled = clock.lap if engine else lambda stage: None  # the supervised stage does nothing then
        for step in range(start, config.train.steps):
            state = source.state()
            try:
                with actor.offloaded(), sampling(step):  # servers hold the weights of `step`
                    sampled("publish")
                    if step == 0:
                        source.evaluate("before", step=0)
                        sampled("evaluation")
                    batch = source.next(step)
                    sampled("rollout")
                sampled("publish")  # memory that moves between servers and trainer counts as that
                stats = actor.update(batch)
                clock.lap("update")
            except RunStopped:
                if step > start and step % config.train.checkpoint_every:  # what was learned since the last one
                    checkpoints.save(step, actor, {**run.state(), "collector": state})
                raise
            source.learned(stats)
            counters = engine.take_counters() if engine else {}
            metrics = {**batch.metrics, **stats, **counters, **clock.read()}
            rank0.shared(partial(run.record, step, metrics))
            if (step + 1) % config.train.checkpoint_every == 0 or step + 1 == config.train.steps:
                checkpoints.save(step + 1, actor, {**run.state(), "collector": source.state()})
                source.forget(checkpoints.on_disk)
                clock.lap("save")
        checkpoints.finish()
        with actor.offloaded(), sampling(config.train.steps):
            source.evaluate("after", step=config.train.steps)
        hf.save_hf(policy, Path(config.run.dir) / "hf", Path(config.model.path), shape)
        run.finish()


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
        if first_on_node():  # what is missing may be missing on this node only
            print(f"megatron-collab: {redact(str(error))}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if done := prepare.finished(config):
        print(
            f"{config.run.dir}: all {done} steps are done; raise train.steps to train on, or choose another run.dir to "
            "train anew"
        )
        return 0
    if not under_torchrun():
        prepare.replace_by_torchrun(config, arguments)
    os.environ |= network.variables(config)
    die_with_parent(parent())
    if global_rank() == 0:  # the one that decides, and has something to put away
        watch_for_preemption()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    else:  # Python would see Ctrl-C only after the collective that it waits in
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        fit(config)
    except Preempted:
        return EXIT_PREEMPTED
    except RunStopped as error:
        return EXIT_HUNG if isinstance(error, Hung) else EXIT_STOPPED
    return 0


def _explain(config: Config, error: RunStopped) -> None:
    """Why the run ends, in one line."""
    why = str(error)
    if isinstance(error, Preempted):
        saved = f"{prepare.saved(config)} and all groups that were finished since are saved"
        why += f"; {saved}, {seconds_since_notice():.1f} s after it came"
    print(f"megatron-collab: {redact(why)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
