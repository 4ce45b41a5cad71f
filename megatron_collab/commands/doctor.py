"""What this machine has, or what memory a run would need.

`python tools/doctor.py` prints one row a probe: what is there, what that enables and what is used where something is
missing; the same probes decide at run time. Exit code 1 where something is missing that nothing replaces.

`python tools/doctor.py --plan experiment=NAME [option=value …]` takes the options of megatron_collab.train and prints
the memory of the fullest GPU by part. Nothing of the run need be there: the model's shape comes from model.path, else
from conf/shapes. Exit code 1 where the run does not fit, 2 for settings that cannot work.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_collab.config import Config, ConfigError, parse
from megatron_collab.config.refuse import ArgumentParser
from megatron_collab.runtime import device

if TYPE_CHECKING:
    from megatron_collab.planning.memory import Plan

TITLES = {
    "cuda": "CUDA device",
    "torch": "torch",
    "megatron": "Megatron-Core",
    "transformer_engine": "TransformerEngine",
    "apex": "apex",
    "flash_attn": "flash-attn",
    "sglang": "SGLang",
    "memory_saver": "torch-memory-saver",
    "ray": "Ray",
    "slurm": "Slurm",
}
EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", nargs="+", metavar="OPTION=VALUE", help="print the memory that this run needs")
    parser.add_argument("--gpu-gib", type=_gib, default=80.0, help="memory of a GPU in GiB [80]")
    given = parser.parse_args(arguments)
    if given.plan is None:
        return probe()
    try:
        return planned(given.plan, given.gpu_gib)
    except ConfigError as error:
        print(f"megatron-collab: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _gib(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no memory of a GPU; give its GiB, as 80")
    return size


def probe() -> int:
    found = device.probes()
    print(table(found))
    lacking = [TITLES[probe.name] for probe in found if not probe.found and not probe.fallback]
    if lacking:
        print(f"\nRequired and missing: {', '.join(lacking)}. Run make setup.")
        return 1
    selected = device.select("auto")
    print(f"\nlaunch.device=auto takes {selected.type}, torch.distributed {selected.backend}.")
    return 0


def table(found: Sequence[device.Probe]) -> str:
    """The probes as a table of text; the last column says what is used where one is missing."""
    rows = [("", "found", "enables", "without it")]
    for probe in found:
        used = "-" if probe.found else f"-> {probe.fallback or 'nothing: required'}"
        state = probe.detail if probe.found else f"missing: {probe.detail}"
        rows.append((TITLES[probe.name], state, probe.enables, used))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3])) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def planned(overrides: Sequence[str], gpu_gib: float) -> int:
    try:
        from megatron_collab.launch import validate
        from megatron_collab.planning import shapes
        from megatron_collab.planning.memory import GIB, plan
    except Exception as error:  # whatever a library raises that cannot work here: OSError without its driver
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"--plan: torch or Megatron-Core cannot be imported on this machine: {text}") from error

    config = parse(overrides)
    validate.check_settings(config)
    found = plan(config, validate.check_model(config, shapes.described(Path(config.model.path))))
    print(report(config, found))
    need = found.peak(found.fullest) / GIB
    if need > gpu_gib:
        print(f"Does not fit a GPU of {gpu_gib:g} GiB: {need - gpu_gib:.1f} GiB too much.")
        return 1
    print(
        f"Fits a GPU of {gpu_gib:g} GiB: {gpu_gib - need:.1f} GiB are left for what is not counted "
        "(CUDA contexts, NCCL, SGLang's graphs and workspace, the moments of a pass)."
    )
    return 0


def report(config: Config, found: Plan) -> str:
    """The plan as text: the GPUs, the parts of the fullest one, the sums of the others, the host's memory."""
    from megatron_collab.planning.memory import GIB

    launch, parallel = config.launch, config.parallel
    parts = found.stages[found.fullest]
    rows = [(part.name, part.training, part.sampling) for part in parts]
    sums = ("sum", sum(part.training for part in parts), sum(part.sampling for part in parts))
    lines = [
        f"{Path(config.model.path).name} on {found.gpus} GPUs: launch.nodes={launch.nodes} x "
        f"launch.nproc_per_node={launch.nproc_per_node}",
        f"tp={parallel.tp} pp={parallel.pp} vpp={parallel.vpp} cp={parallel.cp} ep={parallel.ep}, "
        f"data parallel {found.dp}, recompute={parallel.recompute}",
        "",
        f"{f'GiB on a GPU of pipeline stage {found.fullest}':34}  training  sampling",
        *(f"{name:34}  {training / GIB:8.2f}  {sampling / GIB:8.2f}" for name, training, sampling in [*rows, sums]),
        "",
        "at most, by pipeline stage: "
        + ", ".join(f"{found.peak(stage) / GIB:.1f}" for stage in range(len(found.stages))),
    ]
    host = sum(part.host for part in parts) * launch.nproc_per_node
    if host:
        lines.append(f"on the host of each node, while sampling: {host / GIB:.1f} GiB of optimizer")
    largest = max(parts, key=lambda part: max(part.training, part.sampling))
    return "\n".join([*lines, f"The largest part is {largest.name}."])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
