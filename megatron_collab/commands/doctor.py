"""What this machine provides, how much GPU memory a run needs, or how data is read.

`megatron-collab doctor` prints one row for each library and device: whether it was found, what it enables and what is
used without it; a run uses the same probes. Exit code 1 if something required is missing.

`megatron-collab doctor --plan experiment=NAME [option=value …]` takes the options of train and prints the memory of the
fullest GPU by part. It needs neither GPU nor data nor weights: the model's shape is read from model.path, else from
conf/shapes. Exit code 1 if the run does not fit, 2 for settings that cannot work.

`megatron-collab doctor --data SOURCE` reads every row of a file, a folder, a glob or a name of the Hub, or of settings
as '{source: NAME, subset: NAME, split: NAME}', and prints which format it is in and why, how many rows are taken and
left out, and five of them as tasks, or as conversations where they are no tasks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_collab import patches
from megatron_collab.commands import ArgumentParser, positive
from megatron_collab.config import ConfigError
from megatron_collab.runtime import device

_SHOWN, _WIDTH = 5, 200  # rows, and characters of each of their texts


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("doctor", __doc__)
    parser.add_argument("--plan", nargs="+", metavar="OPTION=VALUE", help="print the GPU memory that this run needs")
    parser.add_argument("--gpu-gib", type=positive, default=80.0, help="memory of a GPU in GiB [80]")
    parser.add_argument("--data", metavar="SOURCE", help="print how these rows are read")
    given = parser.parse_args(arguments)
    if given.data is not None:
        return print_data(given.data)
    return print_probes() if given.plan is None else print_plan(given.plan, given.gpu_gib)


def print_probes() -> int:
    """A table of the probes; the last column says what is used in place of a missing one."""
    found = device.probes()
    rows = [("", "found", "enables", "without it")]
    for probe in found:
        used = "-" if probe.found else f"-> {probe.fallback or 'nothing: required'}"
        state = probe.detail if probe.found else f"missing: {probe.detail}"
        rows.append((probe.name, state, probe.enables, used))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    lacking = [probe.name for probe in found if not probe.found and not probe.fallback]
    if lacking:
        print(f"\nRequired and missing: {', '.join(lacking)}. Run make setup.")
        return 1
    selected = device.select("auto")
    print(f"\nChanges to libraries in force (megatron_collab/patches):\n{patches.table()}")
    print(f"\nlaunch.device=auto selects {selected.type}, with torch.distributed over {selected.backend}.")
    return 0


def print_plan(overrides: Sequence[str], gpu_gib: float) -> int:
    """The plan: the GPUs, the parts of the fullest one, the sums of the others, the host's memory."""
    try:
        patches.apply("megatron")
        from megatron_collab.models.parallel_layout import ranks
        from megatron_collab.planning.memory import GIB, peak, plan_memory, read_run
    except Exception as error:  # libraries raise anything where they cannot work, as OSError without their driver
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"--plan: torch or Megatron-Core cannot be imported on this machine: {text}") from error

    config, shape = read_run(overrides)
    stages, gpus = plan_memory(config, shape), ranks(config)
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
    if host := sum(part.host for part in parts) * launch.nproc_per_node:
        print(f"in host memory of each node, while sampling: {host / GIB:.1f} GiB of optimizer state")
    print(f"The largest part is {max(parts, key=lambda part: max(part.training, part.sampling)).name}.")
    left = gpu_gib - peaks[fullest]
    if left < 0:
        print(f"Does not fit a GPU of {gpu_gib:g} GiB: needs {-left:.1f} GiB more.")
        return 1
    print(
        f"Fits a GPU of {gpu_gib:g} GiB: {left:.1f} GiB remain for what is not counted "
        "(CUDA contexts, NCCL, SGLang's graphs and workspace, temporaries)."
    )
    return 0


def print_data(text: str) -> int:
    """Format, counts and the first rows of a source."""
    # Hugging Face's library takes seconds to import.
    from megatron_collab.data.examples import load_conversations, load_tasks
    from megatron_collab.data.formats import natural_use
    from megatron_collab.data.rows import open_rows
    from megatron_collab.data.sources import given_source
    from megatron_collab.data.survey import survey
    from megatron_collab.types import Task

    source = given_source(text, "--data")
    try:
        table = open_rows(source, "--data").table
        use = natural_use(table.column_names, table[0])
        examples: Any = (load_tasks if use == "task" else load_conversations)(source, "--data")
        found = survey(examples, 0, lambda messages: 0, lambda example: 0)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    examples.leave_out(found.left_out)
    print(f"{source.source}: read as {examples.format}, since {examples.why}; columns {', '.join(table.column_names)}")
    left_out = "".join(f"; left out: {count} {reason}" for reason, count in found.dropped.items())
    print(f"{len(table)} rows, {len(examples)} {use}s{left_out}")
    for example in examples[:_SHOWN]:
        if isinstance(example, Task):
            metadata = f", metadata {', '.join(example.metadata)}" if example.metadata else ""
            print(f"\ntask {example.id}: user {example.user or 'llm'}{metadata}")
            lines = [("goal", example.goal), ("answer", example.answer)]
        else:
            print("\nconversation:")
            lines = []
        messages = example.messages if isinstance(example, Task) else example
        for name, content in [*((message.role, message.content) for message in messages), *lines]:
            print(f"  {name + ':':10} {textwrap.shorten(content, _WIDTH, placeholder=' …')}")
    return 0
