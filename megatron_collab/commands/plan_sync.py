"""How a run would sync its weights to the servers: bytes by path and rank, rounds, estimated seconds.

    megatron-collab plan-sync experiment=train_70b [option=value …] [--bandwidth MEMORY NODE NETWORK]

Takes the options of train. It needs neither GPU nor data nor weights: the model's shape is read from model.path, else
from conf/shapes. Colocated servers use the trainer's devices in order, others use further devices: of the same node if
the trainer has only one, else of further nodes. Only transfers are counted: a round takes as long as the busiest link
of a device in one direction. The floor is the time that the links of all server ranks need for what they receive.
With model.lora.serve=adapters this is the first sync; what later ones send is printed below it.
Exit code 2 for settings that cannot work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_collab import patches
from megatron_collab.commands import ArgumentParser, positive
from megatron_collab.planning import h100
from megatron_collab.settings import require

GB, MIB = 1e9, 1 << 20
BANDWIDTHS = [rate / GB for rate in (h100.COPY, h100.NODE, h100.NETWORK)]


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("plan-sync", __doc__)
    parser.add_argument("settings", nargs="+", metavar="OPTION=VALUE", help="settings of the run, as for train")
    parser.add_argument(
        "--bandwidth",
        nargs=3,
        type=positive,
        default=BANDWIDTHS,
        metavar=("MEMORY", "NODE", "NETWORK"),
        help="GB/s of a device in one direction: within its memory, within its node, to other nodes [1500 400 45]",
    )
    options = parser.parse_args(arguments)
    patches.apply("megatron")
    from megatron_collab.launch import server_specs
    from megatron_collab.launch.trainer_specs import trainer_layout
    from megatron_collab.planning.memory import read_run
    from megatron_collab.planning.weight_sync_cost import Bandwidth, Sharding, sync_cost
    from megatron_collab.trainer.megatron.config import DTYPES
    from megatron_collab.weight_sync.plan import first_round, plan_sync

    config, shape = read_run(options.settings)
    message = f"train.stage={config.train.stage}: has no servers to sync weights to; set train.stage=rl"
    require(config.train.stage == "rl", message)
    trainer, parallel, policy = trainer_layout(config), config.parallel, server_specs.training(config).policy
    layout, placement = policy.layout, policy.placement
    plan = plan_sync(shape, trainer, layout, DTYPES[config.model.dtype].itemsize)
    speeds = {link: GB * speed for link, speed in zip(Bandwidth, options.bandwidth, strict=True)}
    cost = sync_cost(config, placement, shape, plan, speeds)

    buckets = [bucket for row in plan for bucket in row]
    largest = max(bucket.size for bucket in buckets) / MIB
    location = "on the trainer's devices" if placement.colocated else "on further devices"
    print(
        f"{Path(config.model.path).name}: trainer of {trainer.ranks} ranks, tp={parallel.tp} pp={parallel.pp} "
        f"vpp={parallel.vpp} cp={parallel.cp} ep={parallel.ep}\n"
        f"-> {placement.replicas} servers of tp={layout.tp} ep={layout.ep} {'FP8' if layout.fp8 else policy.dtype} "
        f"{location}\n\n"
        f"{len(plan)} rounds, a bucket of at most {largest:.1f} MiB for each "
        f"rank of a server, {sum(len(bucket.slices) for bucket in buckets):,} slices\n\n"
        f"{'GB to all servers':24}{Sharding.SAME.value:>12}{Sharding.OTHER.value:>12}"
    )
    for link in Bandwidth:
        print(f"{link.value:24}" + "".join(f"{cost.paths.get((cut, link), 0) / GB:12.2f}" for cut in Sharding))
    _print_stages(cost.sent, trainer.ranks // parallel.pp, parallel.pp)
    fullest = max(cost.sent, key=cost.sent.__getitem__)
    target = max(cost.received, key=cost.received.__getitem__)
    print(
        f"\nTrainer rank {fullest} sends the most, {cost.sent[fullest] / GB:.2f} GB; rank {target[1]} of server "
        f"{target[0]} receives the most, {cost.received[target] / GB:.2f} GB.\n"
        f"{sum(cost.paths.values()) / GB:.2f} GB take {cost.seconds:.2f} s, {cost.seconds / cost.floor:.1f} times the "
        f"floor of {cost.floor:.2f} s."
    )
    if later := first_round(plan, layout, new=False):
        cost = sync_cost(config, placement, shape, plan[later:], speeds)
        print(f"Later syncs send only adapters: {sum(cost.paths.values()) / GB:.3f} GB take {cost.seconds:.3f} s.")
    return 0


def _print_stages(sent: Mapping[int, int], size: int, stages: int) -> None:
    """What the ranks of each pipeline stage send, `size` ranks a stage; `sent`: bytes by rank."""
    print(f"\n{'GB sent by a rank':24}{'mean':>12}{'most':>12}")
    for stage in range(stages):
        of_stage = [sent.get(rank, 0) for rank in range(stage * size, (stage + 1) * size)]
        print(f"{f'pipeline stage {stage}':24}{sum(of_stage) / size / GB:12.2f}{max(of_stage) / GB:12.2f}")
