"""Time of a rehearsal, and how close `doctor --plan` is to the counted memory: train_70b on 128 GPUs, or another run.

`python tools/bench/rehearse.py [--smoke] [OPTION=VALUE …]`: planned over counted bytes, maximum and minimum over all
parts of all classes of ranks, and seconds. Options are those of `megatron-collab rehearse`. --smoke: supervised
training on two stages, without servers. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time

from megatron_collab import patches
from megatron_collab.rehearsal.te_cpu.install import install
from megatron_collab.settings import ConfigError

EXPERIMENT = "experiment=train_70b"
SMOKE = ["train.stage=sft", "model.path=models/Llama-3.1-8B-Instruct", "parallel.pp=2", "launch.nodes=2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a smaller run: shows that it works, no figures")
    parser.add_argument("settings", nargs="*", metavar="OPTION=VALUE", help="settings of a run [experiment=train_70b]")
    arguments = parser.parse_args()
    install()
    patches.apply("megatron")
    from megatron_collab.planning.memory import model_config_file, plan_memory, read_run
    from megatron_collab.rehearsal.compare import ratios
    from megatron_collab.rehearsal.run import rehearse

    began = time.monotonic()
    config, shape = read_run([*(arguments.settings or [EXPERIMENT]), *(SMOKE if arguments.smoke else [])])
    plan, rehearsals, failed = plan_memory(config, shape), [], 0
    try:
        for rehearsed in rehearse(config, shape, json.loads(model_config_file(config.model.path).read_text())):
            rehearsals.append((rehearsed, plan[rehearsed.kind.stage]))
    except ConfigError as error:
        print(error)
        failed = 1
    ratio_list = ratios(rehearsals)
    values = {
        "rank_classes": len(rehearsals),
        "failed": failed,
        "plan_over_counted_max": round(max(ratio_list, default=0.0), 4),
        "plan_over_counted_min": round(min(ratio_list, default=0.0), 4),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps({"name": "rehearse", "values": values}))


if __name__ == "__main__":
    main()
