"""Commands for slurm/run.sh about a run and its nodes.

python -m megatron_collab.launch.slurm settings [option=value …]     # settings for its commands, one per line
python -m megatron_collab.launch.slurm address [option=value …]      # this node's address on launch.interface
python -m megatron_collab.launch.slurm wait ADDRESS SECONDS NODE…    # until Ray at ADDRESS has exactly these nodes
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

from megatron_collab.config import Config, compose
from megatron_collab.runtime import console, network
from megatron_collab.runtime.process import EXIT_BAD_INPUT, EXIT_STOPPED, RunStopped

logger = logging.getLogger("megatron_collab")  # __name__ is __main__ if this module is the program

_LOOK = 0.5  # seconds


def settings(config: Config) -> list[str]:
    """run.dir, launch.nodes, launch.nproc_per_node, and the number of CPUs to declare to Ray on a node."""
    # They import torch, which `address` and `wait` do not need.
    from megatron_collab.launch.extensions import check_extensions
    from megatron_collab.launch.validate import check_settings

    check_extensions(config, constructs=False)  # the ranks construct
    check_settings(config)
    # One per worker of a node: Ray starts one process per CPU in advance.
    cpus = -(-(config.rollout.workers + config.reward.workers) // config.launch.nodes)
    return [config.run.dir, str(config.launch.nodes), str(config.launch.nproc_per_node), str(cpus)]


def wait(address: str, seconds: float, names: Sequence[str]) -> None:
    """Return once exactly the nodes called `names` are alive in the Ray cluster at `address`, HOST:PORT.

    Raises RunStopped that names the missing nodes after `seconds`, or at once if there are nodes of another job.
    """
    import ray

    deadline = time.monotonic() + seconds
    host, _, port = address.rpartition(":")
    while True:
        try:
            # ray.init would end the process after two minutes without an answer.
            socket.create_connection((host, int(port)), timeout=_LOOK).close()
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
            break
        except OSError as error:  # nothing listens yet, or Ray's control store does not know its own node yet
            if time.monotonic() > deadline:
                why = f"Ray's head does not answer at {address} after {seconds:g} s; see its log"
                raise RunStopped(why) from error
            time.sleep(_LOOK)
    try:
        while True:
            alive = [node["NodeName"] for node in ray.nodes() if node["Alive"]]
            if strangers := sorted(set(alive) - set(names)):
                raise RunStopped(f"Ray at {address} has nodes of another job: {', '.join(strangers)}")
            missing = [name for name in names if name not in alive]
            if not missing:
                return
            if time.monotonic() > deadline:
                joined = f"{len(alive)} of {len(names)} Ray nodes joined within {seconds:g} s"
                raise RunStopped(f"{joined}; missing: {', '.join(missing)}; see their logs")
            time.sleep(_LOOK)
    finally:
        ray.shutdown()


@contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Within the block, also for native code; extensions may print as they are imported."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def main(arguments: Sequence[str]) -> int:
    console.begin()
    command, *operands = arguments
    try:
        if command == "settings":
            with _printing_to_stderr():
                values = settings(compose(operands))
            print(*values, sep="\n")
        elif command == "address":
            print(network.address(compose(operands).launch.interface))
        else:
            wait(operands[0], float(operands[1]), operands[2:])
    except (ValueError, RunStopped) as error:
        logger.error(str(error))
        return EXIT_STOPPED if isinstance(error, RunStopped) else EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
