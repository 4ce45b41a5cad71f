"""What `megatron-collab doctor --plan` prints: memory and time of a run, and layouts of the trainer that suit it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_collab.config import Config
from megatron_collab.launch.servers import idle_gpus
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.planning import h100
from megatron_collab.planning.activations import engine
from megatron_collab.planning.layouts import UNCOUNTED, Layout, fastest_layouts, layout_of
from megatron_collab.planning.memory import GIB, host_memory, peak, plan_memory, read_run
from megatron_collab.planning.step_time import StepTime, step_samples, step_time
from megatron_collab.runtime.console import show
from megatron_collab.settings import require

_COUNT = 5  # layouts that a search prints
_FASTER = 0.95  # a plan names another layout if its step takes at most this part of the time


def print_plan(overrides: Sequence[str], gpu_gib: float, sample_tokens: float) -> int:
    """Print the plan: the GPUs, the parts of the fullest one, the sums of the others, the host's memory."""
    config, shape = read_run(overrides)
    stages, gpus = plan_memory(config, shape, gpu_gib * GIB), config.launch.ranks
    peaks = [peak(parts) / GIB for parts in stages]
    fullest = peaks.index(max(peaks))
    launch, parallel, parts = config.launch, config.parallel, stages[fullest]
    print(
        f"{Path(config.model.path).name} on {gpus} GPUs: launch.nodes={launch.nodes} x "
        f"launch.nproc_per_node={launch.nproc_per_node}\n"
        f"tp={parallel.tp} pp={parallel.pp} vpp={parallel.vpp} cp={parallel.cp} ep={parallel.ep}, "
        f"data parallel {gpus // (parallel.tp * parallel.pp * parallel.cp)}, recompute={parallel.recompute}\n\n"
        f"{f'GiB on a GPU of pipeline stage {fullest}':34}  training  sampling"
    )
    rows = [(part.name, part.training, part.sampling) for part in parts]
    for name, training, sampling in [*rows, ("sum", sum(row[1] for row in rows), sum(row[2] for row in rows))]:
        print(f"{name:34}  {training / GIB:8.2f}  {sampling / GIB:8.2f}")
    print(f"\nat most, by pipeline stage: {', '.join(f'{peak:.1f}' for peak in peaks)}")
    if pinned := host_memory(config, stages):
        print(
            f"pinned in host memory of a node until the run ends: {pinned / GIB:.1f} GiB, for the optimizer state that "
            "is offloaded while the run samples"
        )
    print(f"The largest part is {max(parts, key=lambda part: max(part.training, part.sampling)).name}.")
    for line in idle_gpus(config) if launch.device != "cpu" else ():
        print(line)
    headroom = gpu_gib - peaks[fullest]
    if engine(config):
        _print_time(config, shape, gpu_gib, sample_tokens, fits=headroom >= 0)
    if headroom < 0:
        print(f"Does not fit a GPU of {gpu_gib:g} GiB: needs {-headroom:.1f} GiB more.")
        return 1
    print(
        f"Fits a GPU of {gpu_gib:g} GiB: {headroom:.1f} GiB remain for what is not counted "
        "(CUDA contexts, NCCL, SGLang's graphs and workspace, temporaries)."
    )
    return 0


def print_layouts(overrides: Sequence[str], gpu_gib: float, sample_tokens: float) -> int:
    """Print the run's layout and the fastest ones that fit, with the time and the memory of each."""
    config, shape = read_run(overrides)
    message = "--search: times are those of GPUs in bfloat16; set launch.device=cuda and model.dtype=bfloat16"
    require(engine(config), message)
    layouts = fastest_layouts(config, shape, gpu_gib * GIB, sample_tokens, _COUNT)
    show(
        f"{Path(config.model.path).name} on {config.launch.ranks} GPUs of {gpu_gib:g} GiB; a layout fits if "
        f"{UNCOUNTED / GIB:g} GiB remain for what is not counted.\n{_assumption(config, sample_tokens)}\n\n"
        "seconds  bubble   mfu  micro-batches    GiB  GB to GPUs of the node  to other nodes"
    )
    _print_row("as set", layout_of(config, shape, gpu_gib * GIB, sample_tokens))
    for number, layout in enumerate(layouts, 1):
        _print_row(str(number), layout)
    if not layouts:
        show("No layout fits; use more GPUs, adapters (model.lora.rank), or servers of their own.")
    return 0 if layouts else 1


def _print_row(name: str, layout: Layout) -> None:
    time = layout.time
    show(
        f"{time.seconds:7.2f}  {time.bubble:6.0%}  {time.mfu:4.2f}  {time.micro_batches:13}  {layout.peak / GIB:5.1f}  "
        f"{time.node_bytes / 1e9:22.1f}  {time.network_bytes / 1e9:14.1f}  {name}: {' '.join(layout.options)}"
    )


def _assumption(config: Config, sample_tokens: float) -> str:
    samples = step_samples(config)
    return (
        f"Learning part of a step, estimated with the rates of an H100 (docs/gpu.md), if {samples} samples add "
        f"{sample_tokens:g} tokens each (--sample-tokens); mfu is of {h100.PEAK / 1e12:g} TFLOP/s, in bfloat16"
    )


def _print_time(config: Config, shape: ModelShape, gpu_gib: float, sample_tokens: float, fits: bool) -> None:
    """Print seconds, bubble and mfu of the run's layout, and a faster one that fits; any one if the run's does not."""
    time = step_time(config, shape, sample_tokens)
    print(f"{_assumption(config, sample_tokens)}: {_summary(time)}.")
    for layout in fastest_layouts(config, shape, gpu_gib * GIB, sample_tokens, 1):
        if not fits or layout.time.seconds <= _FASTER * time.seconds:
            better = "Faster" if fits else "Fits"
            print(f"{better}, {_summary(layout.time)}: {' '.join(layout.changes(config))} (--search: five layouts)")


def _summary(time: StepTime) -> str:
    return (
        f"{time.seconds:.2f} s, pipeline bubble {time.bubble:.0%} with {time.micro_batches} micro-batches, "
        f"mfu {time.mfu:.2f}"
    )
