"""How long planning takes: Llama 3.1 405B from a trainer of TP8 and PP16 to servers of TP8.

`python tools/bench/plan_405b.py [--smoke]`: CPU seconds of `weight_sync.plan.plan_sync`, the median of 5.
--smoke: one. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

from megatron_collab.config import CONF
from megatron_collab.models import hf_config
from megatron_collab.models.hf_to_sglang import ServerLayout
from megatron_collab.models.parallel_layout import TrainerLayout
from megatron_collab.weight_sync.plan import plan_sync

REPEATS = 5
TRAINER, SERVER = TrainerLayout(tp=8, pp=16, ranks=128), ServerLayout(tp=8)
BFLOAT16 = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one plan: shows that it runs, no figures")
    repeats = 1 if parser.parse_args().smoke else REPEATS
    shape = hf_config.read(CONF / "shapes" / "Llama-3.1-405B-Instruct.json")
    times = []
    for _ in range(repeats):
        began = time.process_time()
        plan_sync(shape, TRAINER, SERVER, BFLOAT16)
        times.append(time.process_time() - began)
    print(json.dumps({"name": "plan_405b", "values": {"seconds": round(median(times), 4)}}))


if __name__ == "__main__":
    main()
