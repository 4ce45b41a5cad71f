"""Runs a rank's work before and during a step with the run's own code, and books its memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from megatron_collab.algo.advantages import advantage_class
from megatron_collab.checkpoint.hf import HFTensors, fill, unwrap
from megatron_collab.config import Config
from megatron_collab.launch import teacher
from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import Index
from megatron_collab.planning.activations import micro_batch_tokens
from megatron_collab.planning.memory import MemoryPart, model_config_file
from megatron_collab.rehearsal.ledger import HOST, PASSING, PINNED, Ledger
from megatron_collab.rehearsal.te_cpu import paper
from megatron_collab.trainer.megatron import model
from megatron_collab.trainer.megatron.pipeline import PlannedCommunicator
from megatron_collab.trainer.microbatches import MicroBatch, make_micro_batches
from megatron_collab.trainer.spec import NetworkSpec
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch, Sample, ScoredBatch

ACTIVATIONS, HEAD, WORKSPACES = "activations", "head", "workspaces"
GATHERED = "gathered sequence"  # one for all layers: Megatron's for sequence parallelism, not TransformerEngine's


class PaperTensors(HFTensors):
    """A simulated Hugging Face folder of a model of `shape`; its tensors have no values."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        self._shapes, self._dtype = hf_to_megatron.hf_shapes(shape), dtype

    def read(self, tensor: str, index: Index) -> Tensor:
        return torch.empty(self._shapes[tensor], dtype=self._dtype)[index]


class BookedCommunicator(PlannedCommunicator):
    """A communicator that books what pipeline stages exchange as activations."""

    def __init__(self, ledger: Ledger, config: TransformerConfig, lengths: Sequence[int]) -> None:
        super().__init__(config, lengths)
        self._ledger = ledger

    def _communicate(self, **options: Any) -> Any:
        with self._ledger.booking(ACTIVATIONS):
            return super()._communicate(**options)


def make_trainer(config: Config, shape: ModelShape, ledger: Ledger) -> PolicyTrainer:
    """The trainer of a run, loaded, with its memory booked by part."""

    spec = trainer_spec(config)

    def load(network: NetworkSpec) -> list[torch.nn.Module]:
        network_shape = shape
        if network is spec.teacher:
            network_shape = teacher.read_shape(config, model_config_file(network.model.path, teacher.SETTING))
        chunks = model.build(network, network_shape)
        with ledger.booking(HOST):
            fill(chunks, PaperTensors(network_shape, next(chunks[0].parameters()).dtype))
        return chunks

    def pack(*arguments: Any, **options: Any) -> list[MicroBatch]:
        """make_micro_batches with real tensors, from which the lengths of sequences are read."""
        with _disable_current_modes():
            return make_micro_batches(*arguments, **options)

    # A single optimizer step with all micro-batches: further steps need the same memory.
    split, communicator = lambda count, *_: [range(count)], partial(BookedCommunicator, ledger)
    trainer = PolicyTrainer(spec, load, split, pack, communicator)
    with _sampling(trainer, config):  # a run samples before its first step, when AdamW has no moments yet
        pass
    for name, trainable in trainer.trainables.items():
        prefix = _prefix(name)
        for optimizer in trainable.optimizer.chained_optimizers:
            optimizer._init_optimizer_states_with_dummy_values()  # else the first step would have no moments
        ledger.claim(f"{prefix}parameters", _parameter_tensors(trainable.chunks))
        paper.claim_fp8_copies(trainable.chunks, partial(ledger.claim, f"{prefix}parameters"))
        ledger.claim(f"{prefix}gradients", trainable.gradients())
        ledger.claim(f"{prefix}optimizer", trainable.optimizer_storages())
    ledger.claim("reference", _parameter_tensors(trainer.reference or ()))
    paper.claim_fp8_copies(trainer.reference or (), partial(ledger.claim, "reference"))
    ledger.claim("teacher", _parameter_tensors(trainer.teacher or ()))
    if trainer.distribution and trainer.distribution.head_copy is not None:
        ledger.claim("teacher head", [trainer.distribution.head_copy])
    return trainer


def _parameter_tensors(chunks: Iterable[torch.nn.Module]) -> Iterator[Tensor]:
    """The tensors of the parameters; in FP8 data and scales."""
    return chain.from_iterable(paper.parts(parameter) for chunk in chunks for parameter in chunk.parameters())


def one_batch(config: Config, shape: ModelShape, micro_batches: int) -> Batch:
    """A batch of `micro_batches` full micro-batches per data parallel rank: each a sequence with all tokens trained, or
    a pair of sequences without a common prefix."""
    parallel = config.parallel
    groups = config.launch.ranks // (parallel.tp * parallel.pp * parallel.cp)
    sides = 2 if config.objective == "dpo" else 1
    length = micro_batch_tokens(config) * parallel.cp // sides + 1
    mask = (np.arange(length) > 0).astype(np.float32)
    token_ids: list[np.ndarray] = [(np.arange(length) + side) % shape.vocab for side in range(sides)]
    samples = tuple(Sample(ids, mask, np.zeros(length, np.float32)) for ids in token_ids) * (micro_batches * groups)
    if config.objective == "sft":
        return Batch(samples)
    rows = [sample.log_probs for sample in samples]
    values = rows if advantage_class(config.algo.advantage).critic else None
    return ScoredBatch(
        samples,
        old_log_probs=rows if config.algo.mini_batches * config.algo.epochs > 1 else None,
        reference_log_probs=rows if config.reference else None,
        teacher_log_probs=rows if config.algo.teacher.weight and not config.algo.teacher.full else None,
        values=values,
        advantages=rows,
        returns=values,
    )


def passes(config: Config, stage: int) -> int:
    """The smallest number of micro-batches with which a pipeline stage reaches its peak memory.

    The number in flight, plus one after a backward pass, whose gradients stages still exchange. With virtual stages
    enough that the last one of the warm-up has gone backward: see planning/activations.py.
    """
    parallel = config.parallel
    return parallel.pp - stage + 1 if parallel.vpp == 1 else 4 * parallel.pp


@contextmanager
def activations_booked(ledger: Ledger, trainer: PolicyTrainer) -> Iterator[None]:
    """Inside the block, book tensors that autograd saves or a forward pass leaves behind as activations.

    The last stage's hidden states, and tensors computed from them until their gradient is, are booked as the head's.
    """

    def saved(tensor: Tensor) -> Tensor:
        ledger.claim(ACTIVATIONS, [tensor], booked=PASSING)
        return tensor

    def passed(policy: torch.nn.Module, inputs: object, output: Tensor) -> None:
        last = policy.post_process and output.requires_grad
        if last:
            ledger.claim(HEAD, [output], booked=PASSING)
        claim_persistent(ledger)
        ledger.claim_all(ACTIVATIONS, booked=PASSING)
        if last:
            ledger.part = HEAD
            output.register_hook(done)

    def done(gradient: Tensor) -> None:
        ledger.part = PASSING

    chunks = [chunk for trainable in trainer.trainables.values() for chunk in trainable.chunks]
    hooks = [unwrap(chunk).register_forward_hook(passed) for chunk in chunks]
    try:
        with saved_tensors_hooks(saved, lambda tensor: tensor):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def claim_persistent(ledger: Ledger) -> None:
    """Book tensors that a first pass has allocated for all passes."""
    ledger.claim(WORKSPACES, paper.workspaces())
    ledger.claim(GATHERED, parallel_state.get_global_memory_buffer().buffer.values())


def _prefix(name: str) -> str:
    """Prefix of the parts of a trained network."""
    return "" if name == "policy" else f"{name}: "


def step(trainer: PolicyTrainer, config: Config, micro_batches: int, ledger: Ledger) -> None:
    """One step of a run of `micro_batches` full micro-batches: score a batch, update the policy and the critic.

    Scores only one micro-batch, since passes without a gradient save nothing.
    """
    ledger.reset()
    if config.objective != "sft":
        trainer.score(one_batch(config, trainer.shape, 1))
    with activations_booked(ledger, trainer):
        trainer.update(one_batch(config, trainer.shape, micro_batches))
    claim_persistent(ledger)
    ledger.claim_all(WORKSPACES, booked=ACTIVATIONS)  # remaining tensors, such as the rotary table, persist


def _sampling(trainer: PolicyTrainer, config: Config) -> AbstractContextManager[None]:
    """Puts the trainer into the state of sampling inside the block; a no-op in supervised training."""
    return trainer.offloaded() if config.train.stage == "rl" else nullcontext()


def parts_of(trainer: PolicyTrainer, config: Config, ledger: Ledger) -> list[MemoryPart]:
    """Memory of the step and of sampling after it, in the parts of the plan."""
    for name, trainable in trainer.trainables.items():
        ledger.claim(f"{_prefix(name)}optimizer", trainable.optimizer_storages())
    training = dict(ledger.usage.most)
    for part in [part for part in ledger.usage.now if part.endswith("optimizer")]:
        training[part] = ledger.usage.now[part]
    with _sampling(trainer, config):
        sampling: Mapping[str, int] = dict(ledger.update_sizes().now)
    ledger.update_sizes()
    networks = trainer.trainables.items()
    pieces = {f"{_prefix(name)}optimizer": len(trainable.host_memory.pieces) for name, trainable in networks}
    reserved = ledger.usage.now[PINNED] / max(sum(pieces.values()), 1)  # bytes per piece
    return [
        MemoryPart(part, size, sampling.get(part, 0), reserved * pieces.get(part, 0))
        for part, size in training.items()
        if part not in (HOST, PINNED)
    ]
