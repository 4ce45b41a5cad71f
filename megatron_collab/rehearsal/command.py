"""Rehearse a run rank by rank without a device: its own code builds, loads, steps, publishes and saves.

    megatron-collab rehearse experiment=train_70b [option=value …] [--ranks all] [--gpu-gib 79.6]

Takes the options of train. It needs neither GPU nor data nor weights: the model's shape is read from model.path, else
from conf/shapes. The layers are TransformerEngine's own Python over kernels that only return shapes; with
launch.device=cpu they are those of a CPU. Ranks that hold the same form a class, and one rank of each class is
rehearsed. A table shows the counted size of every part of the memory beside the estimate of `doctor --plan`. Exit code
2 with the first rank and tensor if it does not fit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatron_collab import patches
from megatron_collab.commands import ArgumentParser, positive
from megatron_collab.config import compose
from megatron_collab.planning import GPU_GIB
from megatron_collab.rehearsal.te_cpu.install import install
from megatron_collab.runtime import files
from megatron_collab.settings import ConfigError
from megatron_collab.settings.documents import parse_settings


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("rehearse", __doc__)
    parser.add_argument("settings", nargs="+", metavar="OPTION=VALUE", help="settings of the run, as for train")
    parser.add_argument("--ranks", choices=("distinct", "all"), default="distinct", help="one per class, or all")
    parser.add_argument("--gpu-gib", type=positive, default=GPU_GIB, help=f"memory of a GPU in GiB [{GPU_GIB}]")
    options = parser.parse_args(arguments)
    if compose(options.settings).launch.device != "cpu":
        # Before Megatron is imported: it takes the layers and the optimizer of TransformerEngine, as on a GPU.
        try:
            install()
        except (RuntimeError, ModuleNotFoundError) as error:
            raise ConfigError(str(error)) from error
    patches.apply("megatron")
    from megatron_collab.planning.memory import GIB, model_config_file, plan_memory, read_run
    from megatron_collab.rehearsal import compare
    from megatron_collab.rehearsal.run import rehearse

    began = time.monotonic()
    config, shape = read_run(options.settings)
    hf = dict(parse_settings(files.read_text(model_config_file(config.model.path))))
    plan, count = plan_memory(config, shape, options.gpu_gib * GIB), 0
    for rehearsed in rehearse(config, shape, hf, all_ranks=options.ranks == "all"):
        print(compare.table(rehearsed, plan[rehearsed.kind.stage]), end="\n\n", flush=True)
        count += 1
        needed = max(rehearsed.peak, sum(part.sampling for part in rehearsed.parts))
        if needed > options.gpu_gib * GIB:
            largest = max(rehearsed.parts, key=lambda part: max(part.training, part.sampling)).name
            raise ConfigError(
                f"rank {rehearsed.rank} needs {needed / GIB:.1f} GiB, and a GPU has {options.gpu_gib:g}; "
                f"the largest part is {largest}"
            )
    print(f"{count} {'ranks' if options.ranks == 'all' else 'classes of ranks'}, {time.monotonic() - began:.0f} s.")
    return 0
