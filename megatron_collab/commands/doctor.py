"""What this machine provides, how much GPU memory a run needs, how data is read, or whether users and judges answer.

`megatron-collab doctor` prints one row for each library and device: whether it was found, what it enables and what is
used without it; a run uses the same probes. If the GPU libraries are half installed, it names every part that is
missing, of another version or broken, and how to mend it. Exit code 1 if there is one, or a required part is missing.

`megatron-collab doctor --plan experiment=NAME [option=value …]` takes the options of train and prints the memory of the
fullest GPU by part; seconds, pipeline bubble and mfu of the learning part of a step, estimated with the rates of an
H100; and a faster layout that fits, if there is one. It needs neither GPU nor data nor weights: the model's shape is
read from model.path, else from conf/shapes. Exit code 1 if the run does not fit, 2 for settings that cannot work. With
--search it prints the five fastest layouts that fit, among all tensor, pipeline, virtual, context and expert parallel
sizes, recomputation, and micro-batches of 4,096 to 16,384 tokens; exit code 1 if none fits.

`megatron-collab doctor --data SOURCE` takes what data.train and data.eval take: a file, a folder, a glob, a name of the
Hub, settings as '{source: NAME, subset: NAME, split: NAME}', or a list of these. It reads every row and prints for each
source which format it is in and why, how many rows are taken and left out, and five of them: as pairs, as tasks, or as
conversations if they are neither.

`megatron-collab doctor --model FOLDER` reads a model (a folder or a name of the Hub) as training reads it, prints its
sizes, vocabulary, rotary embedding and chat template, and compares log-probabilities of random tokens with those of
transformers, in float32 on the CPU. Exit code 1 if one differs by more than 2e-4, 2 for a model that cannot be trained.

`megatron-collab doctor --llm experiment=NAME [option=value …]` makes one real call to each language model that the run
would call (users, judge, metrics' own), and prints latency, tokens and price. Exit code 1 if one does not answer.

`megatron-collab doctor --from FILE` reads a shell script or a .yaml of verl, slime, TRL, OpenRLHF or CollabLLM and
prints the command that does the same here, what it is made of, what is not needed and why, and what has no counterpart.
The script is not run.
"""

from __future__ import annotations

import asyncio
import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_collab import patches
from megatron_collab.commands import SAMPLE_TOKENS, ArgumentParser, positive
from megatron_collab.config import Config
from megatron_collab.planning import GPU_GIB
from megatron_collab.runtime import device, gpu_environment, gpu_set, toolkit
from megatron_collab.runtime.console import show
from megatron_collab.settings import ConfigError, EndpointConfig, UserConfig, replaced
from megatron_collab.settings.schema import JSON
from megatron_collab.types import Message, Task

if TYPE_CHECKING:
    from megatron_collab.data.sources import Source
    from megatron_collab.data.spec import DataSpec
    from megatron_collab.launch.spec import RunSpec
    from megatron_collab.rollout.llm_endpoints import NamedEndpoint
    from megatron_collab.rollout.users import UserDirectory

_SHOWN, _WIDTH = 5, 200  # rows, and characters of each of their texts
_TOOL = {  # for a user with tools, whose endpoint has to take them
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("doctor", __doc__)
    parser.add_argument("--plan", nargs="+", metavar="OPTION=VALUE", help="print the GPU memory that this run needs")
    parser.add_argument("--search", action="store_true", help="with --plan: print the five fastest layouts that fit")
    parser.add_argument(
        "--sample-tokens",
        type=positive,
        default=SAMPLE_TOKENS,
        help=f"with --plan: mean tokens of a sample, without prefixes that others have [{SAMPLE_TOKENS}]",
    )
    parser.add_argument("--gpu-gib", type=positive, default=GPU_GIB, help=f"memory of a GPU in GiB [{GPU_GIB}]")
    parser.add_argument("--data", metavar="SOURCE", help="print how these rows are read")
    parser.add_argument("--model", metavar="FOLDER", help="compare this model's log-probs with transformers'")
    parser.add_argument("--llm", nargs="+", metavar="OPTION=VALUE", help="call the users and judges of this run once")
    parser.add_argument("--from", dest="foreign", metavar="FILE", help="print our command for another system's script")
    options = parser.parse_args(arguments)
    if options.foreign is not None:
        from megatron_collab.commands.translation import print_translation

        return print_translation(options.foreign)
    if options.data is not None:
        return print_data(options.data)
    if options.llm is not None:
        return print_endpoints(options.llm)
    if options.model is not None:
        return print_model(options.model)
    if options.plan is not None:
        try:
            patches.apply("megatron")
            from megatron_collab.commands.run_plan import print_layouts, print_plan
        except Exception as error:  # libraries raise anything if they cannot work, OSError without their driver
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"--plan: torch or Megatron-Core cannot be imported on this machine: {text}") from error
        return (print_layouts if options.search else print_plan)(options.plan, options.gpu_gib, options.sample_tokens)
    if options.search:
        parser.error("--search: needs --plan with the options of a run")
    return print_probes()


def print_probes() -> int:
    """Print a table of the probes; its last column says what is used if a library or device is missing."""
    device.probe("nvcc")  # says which compilers of modules are passed over; a run's processes do not have them
    gpu_environment.enter()
    probes = device.probes()
    rows = [("", "found", "enables", "without it"), ("python", platform.python_version(), "everything", "-")]
    for probe in probes:
        fallback = "-" if probe.available else f"-> {probe.fallback or 'nothing: required'}"
        state = probe.detail if probe.available else f"missing: {probe.detail}"
        rows.append((probe.name, state, probe.enables, fallback))
    _print_table(rows)
    lacking = [probe.name for probe in probes if not probe.available and not probe.fallback]
    if lacking:
        print(f"\nRequired and missing: {', '.join(lacking)}. Run make setup.")
        return 1
    faults = gpu_set.faults()
    for fault in faults:
        print(f"\n{fault.part} {fault.detail}\n  -> {fault.mend}")
    if not any(fault.part in ("torch", "torch-memory-saver") for fault in faults):
        _print_libraries()
    selected = device.select("auto")
    print(f"\nChanges to libraries in force (megatron_collab/patches):\n{patches.table()}")
    print(f"\nlaunch.device=auto selects {selected.type}, with torch.distributed over {selected.backend}.")
    return 1 if faults else 0


def _print_libraries() -> None:
    """Print CUDA's files in a process of a run, and in one started as colocated servers start their schedulers."""
    if not toolkit.torch_cuda():
        return
    print("\nCUDA's libraries in a process of a run:")
    _print_table([(name, ", ".join(files) or "none") for name, files in gpu_set.mapped().items()])
    if (hook := gpu_set.saver_hook()) is None:
        return
    preload_result = gpu_set.preload(hook)
    runtime = ", ".join(library for library in preload_result.libraries if "libcudart" in library)
    detail = (
        "not tried, as it needs the driver's library"
        if preload_result.skipped
        else f"a process started, with {runtime}"
    )
    print(f"\ntorch-memory-saver preloaded, as in servers: {detail}")


def print_data(text: str) -> int:
    """Print format, counts and the first rows of each source."""
    from megatron_collab.data.evaluation import EvaluationSet
    from megatron_collab.data.sources import TrainingSource, parse_sources

    for number, source in enumerate(parse_sources(text, "--data", (TrainingSource, EvaluationSet))):
        show("\n" * (number > 0), end="")
        _print_source(source)
    return 0


def _print_source(source: Source) -> None:
    # Hugging Face's library takes seconds to import.
    from megatron_collab.data.examples import load_any
    from megatron_collab.data.pairs import Pair
    from megatron_collab.data.survey import survey

    try:
        examples = load_any(source, "--data")
        report = survey(examples, 0, lambda messages: 0, lambda example: 0)
    except (ValueError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    examples.leave_out(report.left_out)
    columns = ", ".join(examples.rows.column_names)
    split = "+".join(examples.splits)
    show(f"{source.source}: read as {examples.format}, since {examples.why}; split {split}, columns {columns}")
    left_out = "".join(f"; left out: {count} {reason}" for reason, count in report.dropped.items())
    show(f"{len(examples.rows)} rows, {len(examples)} {examples.use}s{left_out}")
    for note in filter(None, (report.repeated, report.unread)):
        show(note)
    for example in examples[:_SHOWN]:
        if isinstance(example, Task):
            user = example.user or "llm"
            user = f"{user[:-1]} if users has it, else llm" if user.endswith("?") else user
            show(f"\ntask {example.id}: user {user}")
            _print_texts(example.messages)
            _print_texts([Message("goal", example.goal), Message("answer", example.answer)])
            for name, value in example.metadata.items():
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
                _print_texts([Message(f"metadata.{name}", text)])
        elif isinstance(example, Pair):
            show(f"\npair{' with scores {:g} and {:g}'.format(*example.scores) if example.scores else ''}:")
            _print_texts(example.prompt)
            for side, messages in (("chosen", example.chosen), ("rejected", example.rejected)):
                show(f" {side}")
                _print_texts(messages)
        else:
            show("\nconversation:")
            _print_texts(example)


def _print_texts(messages: Sequence[Message]) -> None:
    for message in messages:
        text = " ".join(message.content.split())
        show(f"  {message.role + ':':10} {text if len(text) <= _WIDTH else text[:_WIDTH] + ' …'}")


def print_model(path: str) -> int:
    """Print the facts of a model that often are not as expected, and how far its log-probs are from transformers'."""
    patches.apply("megatron")
    from megatron_collab.checkpoint import hf
    from megatron_collab.commands import verify
    from megatron_collab.launch import models
    from megatron_collab.launch.data_specs import evaluation_data
    from megatron_collab.launch.spec import RunSpec
    from megatron_collab.models.hf_to_megatron import hf_shapes
    from megatron_collab.runtime import hub

    folder = hub.download(path, "--model") if hub.parse(path) else Path(path)
    shape, config = hf.read_shape(folder), replaced(Config(), {"model.path": str(folder)})
    spec = RunSpec(evaluation_data(config))
    models.check_models(config, spec, shape)
    dtype, renderer = hf.HFTensors(folder, shape).dtype, spec.data.prompt.renderer(())
    parameters, tokenizer = sum(map(math.prod, hf_shapes(shape).values())), renderer.tokenizer
    scaling = "".join(f", {name} {value}" for name, value in (shape.rope.scaling or {}).items())
    _print_table(
        [
            ("model", f"{shape.family}, {shape.layers} layers, {parameters:,} parameters, stored in {dtype}"),
            ("output layer", "the embedding (tied)" if shape.tied else "separate"),
            ("rotary embedding", f"theta {shape.rope.theta:g}{scaling}; up to {shape.max_positions} positions"),
            ("vocabulary", f"{shape.vocab} rows for {len(tokenizer)} tokens of the tokenizer"),
            ("chat template", f"ends a turn with {tokenizer.decode([renderer.end_id])!r}"),
        ]
    )
    return verify.report(folder)


def print_endpoints(overrides: Sequence[str]) -> int:
    """Call each language model of the run once; print a row for each when it answers, and a line if it failed."""
    from megatron_collab.launch import endpoints, validate

    config = validate.composed(overrides)
    spec = validate.check_settings(config)
    try:
        targets = _endpoints(config, spec)
    except (ValueError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if not targets:
        show("This run calls no language model.")
        return 0
    endpoints.check_recordings(config.llm, Path(config.run.dir))
    if config.llm.offline:
        models = ", ".join(dict.fromkeys(str(target.endpoint.model) for target in targets))
        show(f"Recorded calls replace {models} (llm.replay={config.llm.replay}); nothing is called.")
        return 0
    unpriced = endpoints.check_prices(config, targets)
    endpoints.check_support(config, targets)
    show("".join(f"{line}\n" for line in unpriced), end="")
    labels = [("", "model"), *((target.setting, str(target.endpoint.model)) for target in targets)]
    widths = [*(max(map(len, column)) for column in zip(*labels, strict=True)), 7, 6, 0]
    _print_row((*labels[0], "seconds", "tokens", "USD"), widths)

    async def call(setting: str, endpoint: EndpointConfig) -> str | None:
        cells, fault = await _call(endpoint, config.llm.prices)
        _print_row((setting, str(endpoint.model), *cells), widths)
        return fault and f"{setting}: {fault}"

    async def call_all() -> list[str | None]:
        return await asyncio.gather(*(call(target.setting, target.endpoint) for target in targets))

    faults = [fault for fault in asyncio.run(call_all()) if fault]
    for line in faults:
        show(f"\n{line}")
    return 1 if faults else 0


def _endpoints(config: Config, spec: RunSpec) -> list[NamedEndpoint]:
    """The language models of users and judges. Raises ConfigError and ValueError."""
    from megatron_collab.launch import tasks

    if spec.play is None:
        return []
    users = spec.play.users
    surveys = _surveys(spec.data, users, makes_world=config.data.world is not None)
    names = tasks.users_of_tasks(users, surveys)
    if not surveys and config.user.model:  # there are no tasks yet
        names[config.user.name or "llm"] = "user"
    tasks.check_users(users, names)
    return [*spec.endpoints_of(names), *spec.judges]


def _surveys(data: DataSpec, users: UserDirectory, makes_world: bool) -> list[tuple[UserDirectory, str, Any]]:
    """(users, label, survey) of the tasks of data.train and data.eval; none if the first run makes their world."""
    from megatron_collab.data.examples import load_tasks
    from megatron_collab.data.survey import survey

    inputs: list[tuple[UserDirectory, str, Source]] = [(users, "data.train", source) for source in data.train]
    inputs += [(users.for_set(eval_set.user), eval_set.setting, eval_set) for eval_set in data.eval_sets]
    if makes_world and not all(Path(source.source).exists() for _, _, source in inputs):
        return []
    surveys: list[tuple[UserDirectory, str, Any]] = []
    for source_users, option, source in inputs:
        tasks = load_tasks(source, option, data.format)
        report = survey(tasks, 0, lambda messages: 0, lambda task: 0)
        surveys.append((source_users, f"{option}={source.source}", report))
    return surveys


async def _call(
    endpoint: EndpointConfig, prices: Mapping[str, Sequence[float]]
) -> tuple[tuple[str, str, str], str | None]:
    """(seconds, tokens, price) of one call in the form that a run uses, and the error if it failed."""
    from megatron_collab.llm.answer import Field, LlmError
    from megatron_collab.llm.client import LlmClient
    from megatron_collab.llm.endpoint import served_by_run
    from megatron_collab.rollout.users.forms import chat_request

    if served_by_run(endpoint.model):
        return ("-", "-", "the run's own servers"), None
    client, began, fault = LlmClient(prices=prices), time.monotonic(), None
    question = [{"role": "user", "content": 'Answer with this JSON object and nothing else: {"answer": "yes"}'}]
    form = endpoint.form if isinstance(endpoint, UserConfig) else JSON
    tools = [_TOOL] if isinstance(endpoint, UserConfig) and endpoint.tools else []
    try:
        # As if there were a fallback: the client does not wait for a server that is down.
        once = replace(endpoint, attempts=1, deadline=endpoint.timeout)
        if form == JSON:
            await client.ask(once, question, [Field("answer", str)], has_fallback=True)
        else:
            await client.reply(once, chat_request(form, "You want an egg.", ()), tools=tools, has_fallback=True)
    except LlmError as error:
        fault = str(error)
    price = "unknown" if client.totals["unpriced"] else f"{client.totals['usd']:.6f}"
    return (f"{time.monotonic() - began:.2f}", f"{client.totals['tokens']:.0f}", "failed" if fault else price), fault


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        _print_row(row, widths)


def _print_row(row: Sequence[str], widths: Sequence[int]) -> None:
    show("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
