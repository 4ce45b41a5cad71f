"""The frame of the programs that torchrun runs, train.py and evaluate.py: refusals, torchrun, signals, exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from megatron_collab.config import Config, ConfigError
from megatron_collab.launch import prepare
from megatron_collab.launch.help import composed, help_text
from megatron_collab.runtime import device, network, process
from megatron_collab.runtime.redact import redact

Prepared = tuple[Config, Callable[[], None]]  # the settings, and what every rank runs


def run(
    module: str, description: str | None, arguments: list[str], prepared: Callable[[list[str]], Prepared | str]
) -> int:
    """The exit code of `python -m module arguments`, which starts itself under torchrun unless torchrun started it.

    `prepared` checks the arguments (ConfigError) and gives what is to be run, or says why nothing is.
    """
    if "--help" in arguments:
        print(help_text(description))
        return 0
    try:
        if "--cfg" in arguments:
            print(composed([argument for argument in arguments if argument != "--cfg"]))
            return 0
        found = prepared(arguments)
    except ConfigError as error:
        if process.first_on_node():  # what is missing may be missing on this node only
            print(f"megatron-collab: {redact(str(error))}", file=sys.stderr)
        return process.EXIT_BAD_INPUT
    if isinstance(found, str):
        print(found)
        return 0
    config, work = found
    if not process.under_torchrun():
        prepare.replace_by_torchrun(config, module, arguments)
    os.environ |= device.variables(config) | os.environ | network.variables(config)
    process.die_with_parent(int(os.environ.get(process.LAUNCHER, "0")))  # 0: torchrun was started by hand
    process.take_signals(process.global_rank())
    try:
        work()
    except process.Preempted:
        return process.EXIT_PREEMPTED
    except process.RunStopped as error:
        return process.EXIT_HUNG if isinstance(error, process.Hung) else process.EXIT_STOPPED
    return 0
