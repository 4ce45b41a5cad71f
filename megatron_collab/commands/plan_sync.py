"""How a run would publish its weights: who sends what which way, in how many buckets, how long it takes on paper.

    python tools/plan_publish.py experiment=train_70b [option=value …] [--bandwidth MEMORY NODE NETWORK]

Takes the options of megatron_collab.train. Nothing of the run need be there: the model's shape comes from model.path,
else from conf/shapes. Colocated servers stand on the trainer's devices in order, others on devices of their own: of the
trainer's node where that is the only one, else of further nodes. Seconds are those of the links alone: a round takes
as long as the busiest link of a device in one direction. The floor is the time in which the links of all server ranks
could take in what they receive. Exit code 2 for settings that cannot work.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_collab.config import Config, ConfigError, parse
from megatron_collab.config.refuse import ArgumentParser, require

if TYPE_CHECKING:
    from megatron_collab.planning.weight_sync_cost import Cost
    from megatron_collab.weight_sync.plan import Plan

EXIT_BAD_INPUT = 2
GB, MIB = 1e9, 1 << 20
BANDWIDTHS = [1500.0, 400.0, 45.0]  # H100: HBM3 copied to itself, NVLink 4 and a 400 Gbit/s adapter, nine tenths each


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="+", metavar="OPTION=VALUE", help="the run, as for megatron_collab.train")
    parser.add_argument(
        "--bandwidth",
        nargs=3,
        type=_gb,
        default=BANDWIDTHS,
        metavar=("MEMORY", "NODE", "NETWORK"),
        help="GB/s of a device, one direction: within its memory, to others of its node, to other nodes [1500 400 45]",
    )
    given = parser.parse_args(arguments)
    try:
        print(planned(given.options, given.bandwidth))
    except ConfigError as error:
        print(f"megatron-collab: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


def _gb(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no bandwidth; give GB a second, as 45")
    return speed


def planned(options: Sequence[str], bandwidths: Sequence[float]) -> str:
    import torch

    from megatron_collab.launch import validate
    from megatron_collab.planning import shapes
    from megatron_collab.planning.weight_sync_cost import Link, cost
    from megatron_collab.weight_sync import plan as publishing

    config = parse(options)
    require(config.train.stage == "rl", f"train.stage={config.train.stage}: publishes nothing; set train.stage=rl")
    validate.check_settings(config)
    shape = validate.check_model(config, shapes.described(Path(config.model.path)))
    trainer, server = publishing.trainer_layout(config), publishing.server_layout(config)
    found = publishing.plan(shape, trainer, server, getattr(torch, config.model.dtype).itemsize)
    speeds = {link: GB * speed for link, speed in zip(Link, bandwidths, strict=True)}
    return report(config, found, cost(config, shape, found, speeds))


def report(config: Config, found: Plan, paper: Cost) -> str:
    """The plan as text."""
    from megatron_collab.models.parallel_layout import ranks
    from megatron_collab.planning.weight_sync_cost import Cut, Link

    parallel, server, gpus = config.parallel, config.rollout.server, ranks(config)
    sizes = [bucket.size for row in found.rounds for bucket in row]
    slices = sum(len(bucket.slices) for row in found.rounds for bucket in row)
    total = sum(paper.paths.values())
    where = "on the trainer's devices" if server.colocated else "on devices of their own"
    lines = [
        f"{Path(config.model.path).name}: trainer of {gpus} ranks, tp={parallel.tp} pp={parallel.pp} "
        f"vpp={parallel.vpp} cp={parallel.cp} ep={parallel.ep}",
        f"-> {server.replicas} servers of tp={server.tp} ep={server.ep} {'FP8' if server.fp8 else config.model.dtype} "
        f"{where}",
        "",
        f"{len(found.rounds)} rounds, a bucket of at most {max(sizes) / MIB:.1f} MiB for each rank of a server, "
        f"{slices:,} slices",
        "",
        f"{'GB to all servers':24}{Cut.SAME.value:>12}{Cut.OTHER.value:>12}",
        *(
            f"{link.value:24}{paper.paths.get((Cut.SAME, link), 0) / GB:12.2f}"
            f"{paper.paths.get((Cut.OTHER, link), 0) / GB:12.2f}"
            for link in Link
        ),
        "",
        f"{'GB sent by a rank':24}{'mean':>12}{'most':>12}",
    ]
    size = gpus // parallel.pp
    for stage in range(parallel.pp):
        sent = [paper.sent.get(rank, 0) for rank in range(stage * size, (stage + 1) * size)]
        lines.append(f"{f'pipeline stage {stage}':24}{sum(sent) / size / GB:12.2f}{max(sent) / GB:12.2f}")
    fullest = max(paper.sent, key=paper.sent.__getitem__)
    target = max(paper.received, key=paper.received.__getitem__)
    return "\n".join(
        [
            *lines,
            "",
            f"Trainer rank {fullest} sends the most, {paper.sent[fullest] / GB:.2f} GB; rank {target[1]} of server "
            f"{target[0]} receives the most, {paper.received[target] / GB:.2f} GB.",
            f"{total / GB:.2f} GB take {paper.seconds:.2f} s, {paper.seconds / paper.floor:.1f} times the floor of "
            f"{paper.floor:.2f} s.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
