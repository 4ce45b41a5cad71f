"""CPU time of the store that serves the keys of a weight sync: one store for all nodes, or one on each node.

`python tools/bench/store.py [--smoke] [OPTION=VALUE …]`: the rounds of `experiment=train_70b`, with these settings, as
its ranks and servers coordinate them, each a thread with its own connection; no weights are sent. A store is a process
whose CPU time is measured (medians over syncs). `keys`: set in a sync; `one_ms`: of a store that serves all places;
`place_ms`: of a store that serves a single place, as every place has one. --smoke: two nodes, one sync.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_collab import patches
from megatron_collab.launch.trainer_specs import sync_spec, trainer_layout

patches.apply("megatron")

from megatron_collab.launch import server_specs  # noqa: E402
from megatron_collab.planning.memory import read_run  # noqa: E402
from megatron_collab.trainer.megatron.config import DTYPES  # noqa: E402
from megatron_collab.weight_sync.node_routing import hops, written  # noqa: E402
from megatron_collab.weight_sync.plan import plan_sync  # noqa: E402
from megatron_collab.weight_sync.store_protocol import PlaceStore, connect  # noqa: E402
from megatron_collab.weight_sync.transports.registry import places_of  # noqa: E402

SYNCS, SYNCS_OF_A_PLACE = 7, 41
SMOKE = ["launch.nodes=2", "rollout.server.replicas=2", "parallel.pp=2", "train.prompts_per_step=8"]
STORE = """
import sys, time
from megatron_collab.weight_sync.store_protocol import host
(_, port), store = host("bench", 600.0)
print(port, flush=True)
for _ in sys.stdin:
    print(time.process_time(), flush=True)
"""


class Traffic:
    """The keys of a run's weight sync that each rank waits for and sets, as in transports/shared_memory.py."""

    def __init__(self, options: Sequence[str]) -> None:
        config, shape = read_run(["experiment=train_70b", *options])
        policy = server_specs.training(config).policy
        layout = trainer_layout(config)
        plan = plan_sync(shape, layout, policy.layout, DTYPES[policy.dtype].itemsize)
        self.places = places_of(sync_spec(config), policy.placement, on_gpus=True)
        self.rounds = range(len(plan))
        crossing = hops(plan, self.places)
        ranks = ((server, target) for server in range(policy.placement.replicas) for target in range(len(plan[0])))
        self.readers = {reader: self.places.of_server(*reader) for reader in ranks}
        # By round: the writers of a server rank's bucket, and the server ranks whose buckets a trainer rank writes.
        self.sources = {
            (server, target): [
                {self.places.writer(place, target, piece) for piece in buckets[target].slices} for buckets in plan
            ]
            for (server, target), place in self.readers.items()
        }
        self.targets: dict[int, list[set[int]]] = {}
        for rank in range(layout.ranks):
            slices = written(plan, self.places, rank)
            keeps = [{hop.target for hop in row if hop.keeper == rank} for row in crossing]
            self.targets[rank] = [{t for t, _ in items} | more for items, more in zip(slices, keeps, strict=True)]

    def milliseconds(self, places: range, syncs: int) -> float:
        """CPU milliseconds of a store for a sync of these places."""
        ranks = [rank for rank in self.targets if self.places.of_rank(rank) in places]
        readers = [reader for reader, place in self.readers.items() if place in places]
        process = subprocess.Popen([sys.executable, "-c", STORE], stdin=-1, stdout=-1, text=True)
        assert process.stdin is not None and process.stdout is not None
        try:
            address = "127.0.0.1", int(process.stdout.readline())
            connections = {user: connect(address, "bench", 600.0) for user in (*ranks, *readers)}
            spent = []
            with ThreadPoolExecutor(len(connections)) as users:
                for number in range(syncs):
                    spent.append(-spent_by(process))
                    keys = {user: PlaceStore(connection, number) for user, connection in connections.items()}
                    done = [users.submit(self.write, keys[rank], rank) for rank in ranks]
                    done += [users.submit(self.read, keys[reader], *reader) for reader in readers]
                    for future in done:
                        future.result()
                    spent[-1] += spent_by(process)
                    keys[ranks[0]].clear()
            return 1e3 * statistics.median(spent)
        finally:
            process.kill()
            process.wait()

    def write(self, keys: PlaceStore, rank: int) -> None:
        """The keys of a trainer rank in a sync."""
        place = self.places.of_rank(rank)
        for number in self.rounds:
            if number >= 2:
                keys.wait_written(number - 2, self.places.members(place))
                targets = self.targets[rank][number]
                here = [
                    reader
                    for reader, reader_place in self.readers.items()
                    if reader_place == place and reader[1] in targets
                ]
                assert not keys.late(number - 2, here, 600.0)
            keys.set_written(number, rank)

    def read(self, keys: PlaceStore, server: int, rank: int) -> None:
        """The keys of a server's rank in a sync."""
        for number in self.rounds:
            keys.wait_written(number, self.sources[server, rank][number])
            keys.set_loaded(number, server, rank)


def spent_by(process: subprocess.Popen[str]) -> float:
    """Seconds of CPU time that the process of a store has used."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two nodes, once: shows that it runs, no figures")
    parser.add_argument("settings", nargs="*", metavar="OPTION=VALUE", help="settings of the run, as for train")
    arguments = parser.parse_args()
    traffic = Traffic([*(SMOKE if arguments.smoke else []), *arguments.settings])
    values = {
        "keys": len(traffic.rounds) * (len(traffic.targets) + len(traffic.readers)),
        "one_ms": traffic.milliseconds(range(traffic.places.count), 1 if arguments.smoke else SYNCS),
        "place_ms": traffic.milliseconds(range(1), 1 if arguments.smoke else SYNCS_OF_A_PLACE),
    }
    print(json.dumps({"name": "store", "values": values}))


if __name__ == "__main__":
    main()
