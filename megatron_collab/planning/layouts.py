"""Searches for the fastest layouts of the trainer that fit: step_time.py ranks them, memory.py says which ones fit.

Varied are tensor, pipeline, virtual, context and expert parallel sizes, recomputation, and the tokens of a micro-batch;
numbers of GPUs, precision, servers and everything else stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter

from megatron_collab.config import Config
from megatron_collab.launch import servers, validate
from megatron_collab.launch.layout import check_layout, check_layout_of_model
from megatron_collab.launch.trainer_specs import trainer_layout
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.parallel_layout import TrainerLayout
from megatron_collab.planning.memory import GIB, peak, plan_memory, server_parts, trainer_parts
from megatron_collab.planning.step_time import StepTime, step_time
from megatron_collab.settings import ConfigError, replaced

# Doubling them halves the bubble and doubles the number of messages.
_VIRTUAL = (1, 2, 4)
_RECOMPUTE = ("none", "selective", "full")
# Tokens of a micro-batch, beside those of the run. h100.LAYERS was measured with 8,192; the rate of much smaller
# products is unknown.
_TOKENS = (4096, 8192, 16384)
_SIZES = ("tp", "pp", "vpp", "cp", "ep", "sequence_parallel", "recompute")
_VARIED = (*(f"parallel.{name}" for name in _SIZES), "train.tokens_per_micro_batch")
UNCOUNTED = 8 * GIB  # left free: contexts of CUDA, NCCL, graphs and workspace of SGLang, temporaries


@dataclass(frozen=True)
class Layout:
    """Settings of the trainer's layout, the bytes that they take on the fullest GPU, and the time of a step."""

    config: Config
    peak: float
    time: StepTime

    @property
    def options(self) -> list[str]:
        """The varied settings, as options of the command line."""
        return [f"{name}={str(attrgetter(name)(self.config)).lower()}" for name in _VARIED]

    def changes(self, config: Config) -> list[str]:
        """The options that differ from those of `config`."""
        before = Layout(config, self.peak, self.time).options
        return [option for option, old in zip(self.options, before, strict=True) if option != old]


def layout_of(config: Config, shape: ModelShape, gpu_bytes: float, sample_tokens: float) -> Layout:
    """The layout of `config` itself, whether it fits or not."""
    most = max(peak(parts) for parts in plan_memory(config, shape, gpu_bytes))
    return Layout(config, most, step_time(config, shape, sample_tokens))


def fastest_layouts(
    config: Config, shape: ModelShape, gpu_bytes: float, sample_tokens: float, count: int
) -> list[Layout]:
    """The `count` fastest layouts that leave UNCOUNTED of `gpu_bytes` free, fastest first.

    Each has the micro-batches and the recomputation that suit it best. A layout with context parallelism is listed only
    if the same layout with less of it is slower or does not fit. `sample_tokens` as for `step_time`. `config` must be
    valid.
    """
    spec = validate.check_settings(config)
    if spec.serving and spec.serving.policy.placement.colocated:
        server = server_parts(spec.serving.policy, shape, gpu_bytes)
        if sum(part.sampling for part in server) > gpu_bytes - UNCOUNTED:  # it does not fit even without a trainer
            return []
    tokens = config.train.tokens_per_micro_batch

    def rank(ranked: tuple[StepTime, Config]) -> tuple[float, int, bool, float]:
        time, candidate = ranked
        changed = candidate.train.tokens_per_micro_batch != tokens
        return round(time.seconds, 2), candidate.parallel.cp, changed, time.network_bytes + time.node_bytes

    timed = [(step_time(candidate, shape, sample_tokens), candidate) for candidate in _candidates(config, shape)]
    layouts, listed, can_fit = list[Layout](), set[TrainerLayout](), dict[TrainerLayout, bool]()
    for time, candidate in sorted(timed, key=rank):
        if len(layouts) == count:
            break
        layout = trainer_layout(candidate)
        if layout not in can_fit:  # else each of its recomputations and sizes would be counted in vain
            can_fit[layout] = _trainer_fits(_smallest(candidate), shape, gpu_bytes)
        if not can_fit[layout]:
            continue
        if any(replace(layout, cp=cp) in listed for cp in range(1, layout.cp + 1)):
            continue
        if (most := _peak(candidate, shape, gpu_bytes)) is not None:
            layouts.append(Layout(candidate, most, time))
            listed.add(layout)
    return layouts


def _candidates(config: Config, shape: ModelShape) -> Iterator[Config]:
    """Layouts that pass the cheap checks; a tensor parallel group stays within a node.

    Context parallelism, which shares no prefixes, is tried only for sequences that are longer than a micro-batch.
    """
    width, ranks, tokens = config.launch.nproc_per_node, config.launch.ranks, config.train.tokens_per_micro_batch
    longest = max(config.rollout.context_length if config.train.stage == "rl" else 0, tokens * config.parallel.cp)
    contexts = [cp for cp in _divisors(ranks) if (cp - 1) * tokens < longest]
    sizes = _divisors(width), _divisors(ranks), _VIRTUAL, contexts, _divisors(ranks)
    for tp, pp, vpp, cp, ep in product(*sizes):
        parallel = replace(config.parallel, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, sequence_parallel=tp > 1)
        layout = replace(config, parallel=parallel)
        try:
            check_layout(layout)
            check_layout_of_model(layout, shape)
        except ConfigError:
            continue
        for recompute, size in product(_RECOMPUTE, sorted({*_TOKENS, tokens})):
            yield replaced(layout, {"parallel.recompute": recompute, "train.tokens_per_micro_batch": size})


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _peak(config: Config, shape: ModelShape, gpu_bytes: float) -> float | None:
    """Bytes of the fullest GPU; None if they leave less than UNCOUNTED, or if validation refuses the layout."""
    if not _trainer_fits(config, shape, gpu_bytes):  # before the slower checks
        return None
    try:
        spec = validate.check_settings(config)
        if spec.serving:
            servers.check_servers_of_model(config, spec.serving.policy, shape, trainer_layout(config))
        size = max(peak(parts) for parts in plan_memory(config, shape, gpu_bytes))
    except ConfigError:
        return None
    return size if size <= gpu_bytes - UNCOUNTED else None


def _smallest(config: Config) -> Config:
    """The layout with the recomputation and the micro-batches that take the least memory."""
    tokens = min(*_TOKENS, config.train.tokens_per_micro_batch)
    return replaced(config, {"parallel.recompute": "full", "train.tokens_per_micro_batch": tokens})


def _trainer_fits(config: Config, shape: ModelShape, gpu_bytes: float) -> bool:
    """Whether the first and the last pipeline stage fit, without servers."""
    ends = {0, config.parallel.pp - 1}
    return all(peak(trainer_parts(config, shape, rank)) <= gpu_bytes - UNCOUNTED for rank in ends)
