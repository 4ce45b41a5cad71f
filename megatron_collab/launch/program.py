"""Common main function of the programs that torchrun runs, e.g. train.py: errors, torchrun, signals, exit codes."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from megatron_collab.config import PlayConfig
from megatron_collab.launch import prepare
from megatron_collab.launch.help import composed_settings, help_text
from megatron_collab.runtime import console, keys, network, process, signals
from megatron_collab.settings import ConfigError, require

logger = logging.getLogger(__name__)

_FIRST_RANK_SECONDS = 30.0  # time for the first rank of a node to explain why all of them end
# The settings, the number of ranks on a node, and the function that every rank runs.
Prepared = tuple[PlayConfig, int, Callable[[], None]]
Prepare = Callable[[list[str], ExitStack], Prepared | str]


def run(
    module: str, description: str | None, program: type[PlayConfig], arguments: list[str], prepared: Prepare
) -> int:
    """Run `python -m module arguments`, under torchrun unless torchrun already started it; returns the exit code.

    `program`: the class of its options. `prepared` checks the arguments (ConfigError) and returns the work, or a
    message if there is none. Contexts that it enters (run.dir's lock) stay open until the program ends, also as
    torchrun.
    """
    arguments = console.take_flags(arguments)
    console.begin(f"rank {process.global_rank()}" if process.global_rank() else "")
    os.environ |= network.without_proxy()
    if process.under_torchrun():
        keys.put_away()  # launch.torchrun has done so, another torchrun has not
    if "--help" in arguments:
        print(help_text(description, program))
        return 0
    with ExitStack() as resources:
        try:
            return _run(module, program, arguments, partial(prepared, arguments, resources))
        except SystemExit as error:  # a program that an extension ends with 0 would look like one that is done
            places = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
            place = [place for place in places if "site-packages" not in place] or places  # libraries wrap sys.exit
            logger.error(f"{place[-1]}: ends the run by SystemExit({error.code}); raise an error instead")
            return process.EXIT_BAD_INPUT


def _run(module: str, program: type[PlayConfig], arguments: list[str], prepared: Callable[[], Prepared | str]) -> int:
    if fault := process.leftover_rank():
        logger.error(fault)
        return process.EXIT_BAD_INPUT
    try:
        if "--cfg" in arguments:
            print(composed_settings([argument for argument in arguments if argument != "--cfg"], program))
            return 0
        with keys.in_environment():  # settings refer to keys, and the Hub needs one
            outcome = prepared()
            if process.under_torchrun() and not isinstance(outcome, str):
                _check_ranks(outcome[0].launch.nodes, outcome[1])
    except (ConfigError, OSError) as error:
        if process.first_on_node():  # once per node: something may be missing on this node only
            logger.error(str(error))
        else:
            time.sleep(_FIRST_RANK_SECONDS)  # the launcher ends the node's ranks with the first that exits
        return process.EXIT_BAD_INPUT
    if isinstance(outcome, str):
        logger.info(outcome)
        return 0
    config, ranks, work = outcome
    if not process.under_torchrun():
        os.environ |= prepare.variables_of_ranks(config)
        logger.info(f"starting {ranks} rank{'s' if ranks > 1 else ''}")  # torchrun and they import for seconds
        prepare.replace_by_torchrun(ranks, module, arguments)
    os.environ |= network.variables(config.launch.interface)
    process.die_with_parent(int(os.environ.get(process.LAUNCHER, "0")))  # 0: torchrun was started by hand
    signals.keep_notices(process.global_rank(), config.launch.grace)
    try:
        work()
    except process.Preempted as error:
        return signals.EXIT_INTERRUPTED if isinstance(error, process.Interrupted) else signals.EXIT_PREEMPTED
    except process.RunStopped as error:
        return process.EXIT_HUNG if isinstance(error, process.Hung) else process.EXIT_STOPPED
    return 0


def _check_ranks(nodes: int, ranks: int) -> None:
    """Raises ConfigError if torchrun, started by hand, has other numbers of nodes and ranks than the settings.

    `ranks`: ranks of a node.
    """
    started, local = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    message = f"torchrun has started {started} ranks, {local} of them on this node; start it with"
    out = f"--nnodes={nodes} --nproc-per-node={ranks}, or change the settings"
    require((started, local) == (nodes * ranks, ranks), f"launch.nodes={nodes}: {message} {out}")
