"""How a run would sync its weights to the servers: bytes by path and rank, rounds, estimated seconds.

    megatron-collab plan-sync experiment=train_70b [option=value …] [--bandwidth MEMORY NODE NETWORK]

Takes the options of train. It needs neither GPU nor data nor weights: the model's shape is read from model.path, else
from conf/shapes. Colocated servers use the trainer's devices in order, others use further devices: of the same node if
the trainer has only one, else of further nodes. Only transfers are counted: a round takes as long as the busiest link
of a device in one direction. The floor is the time that the links of all server ranks need for what they receive.
Exit code 2 for settings that cannot work.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_collab import patches
from megatron_collab.commands import ArgumentParser, positive, refusing
from megatron_collab.config import Config, require

if TYPE_CHECKING:
    from megatron_collab.planning.weight_sync_cost import SyncCost
    from megatron_collab.weight_sync.plan import SyncPlan

GB, MIB = 1e9, 1 << 20
BANDWIDTHS = [1500.0, 400.0, 45.0]  # H100: 90% of HBM3 (device to itself), NVLink 4, 400 Gbit/s


@refusing
def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("plan-sync", __doc__)
    parser.add_argument("options", nargs="+", metavar="OPTION=VALUE", help="settings of the run, as for train")
    parser.add_argument(
        "--bandwidth",
        nargs=3,
        type=positive,
        default=BANDWIDTHS,
        metavar=("MEMORY", "NODE", "NETWORK"),
        help="GB/s of a device in one direction: within its memory, within its node, to other nodes [1500 400 45]",
    )
    given = parser.parse_args(arguments)
    print(estimate(given.options, given.bandwidth))
    return 0


def estimate(options: Sequence[str], bandwidths: Sequence[float]) -> str:
    patches.apply("megatron")
    from megatron_collab.planning.memory import read_run
    from megatron_collab.planning.weight_sync_cost import Bandwidth, sync_cost
    from megatron_collab.trainer.megatron.config import DTYPES
    from megatron_collab.weight_sync.plan import plan_sync, server_layout, trainer_layout

    config, shape = read_run(options)
    stage = config.train.stage
    require(stage == "rl", f"train.stage={stage}: has no servers to sync weights to; set train.stage=rl")
    found = plan_sync(shape, trainer_layout(config), server_layout(config), DTYPES[config.model.dtype].itemsize)
    speeds = {link: GB * speed for link, speed in zip(Bandwidth, bandwidths, strict=True)}
    return report(config, found, sync_cost(config, shape, found, speeds))


def report(config: Config, plan: SyncPlan, cost: SyncCost) -> str:
    """The plan as text."""
    from megatron_collab.models.parallel_layout import ranks
    from megatron_collab.planning.weight_sync_cost import Bandwidth, Sharding

    parallel, server, gpus = config.parallel, config.rollout.server, ranks(config)
    sizes = [bucket.size for row in plan.rounds for bucket in row]
    slices = sum(len(bucket.slices) for row in plan.rounds for bucket in row)
    total = sum(cost.paths.values())
    where = "on the trainer's devices" if server.colocated else "on further devices"
    lines = [
        f"{Path(config.model.path).name}: trainer of {gpus} ranks, tp={parallel.tp} pp={parallel.pp} "
        f"vpp={parallel.vpp} cp={parallel.cp} ep={parallel.ep}",
        f"-> {server.replicas} servers of tp={server.tp} ep={server.ep} {'FP8' if server.fp8 else config.model.dtype} "
        f"{where}",
        "",
        f"{len(plan.rounds)} rounds, a bucket of at most {max(sizes) / MIB:.1f} MiB for each rank of a server, "
        f"{slices:,} slices",
        "",
        f"{'GB to all servers':24}{Sharding.SAME.value:>12}{Sharding.OTHER.value:>12}",
        *(
            f"{link.value:24}{cost.paths.get((Sharding.SAME, link), 0) / GB:12.2f}"
            f"{cost.paths.get((Sharding.OTHER, link), 0) / GB:12.2f}"
            for link in Bandwidth
        ),
        "",
        f"{'GB sent by a rank':24}{'mean':>12}{'most':>12}",
    ]
    size = gpus // parallel.pp
    for stage in range(parallel.pp):
        sent = [cost.sent.get(rank, 0) for rank in range(stage * size, (stage + 1) * size)]
        lines.append(f"{f'pipeline stage {stage}':24}{sum(sent) / size / GB:12.2f}{max(sent) / GB:12.2f}")
    fullest = max(cost.sent, key=cost.sent.__getitem__)
    target = max(cost.received, key=cost.received.__getitem__)
    return "\n".join(
        [
            *lines,
            "",
            f"Trainer rank {fullest} sends the most, {cost.sent[fullest] / GB:.2f} GB; rank {target[1]} of server "
            f"{target[0]} receives the most, {cost.received[target] / GB:.2f} GB.",
            f"{total / GB:.2f} GB take {cost.seconds:.2f} s, {cost.seconds / cost.floor:.1f} times the floor of "
            f"{cost.floor:.2f} s.",
        ]
    )
