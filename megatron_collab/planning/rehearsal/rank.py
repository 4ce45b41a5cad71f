"""What one rank of a run does before and in a step, by the run's own code, and what it holds meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from megatron_collab.checkpoint.hf import HFTensors, fill, unwrap
from megatron_collab.config import Config
from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import Index
from megatron_collab.models.parallel_layout import ranks
from megatron_collab.planning.activations import micro_batch_tokens
from megatron_collab.planning.memory import MemoryPart
from megatron_collab.planning.rehearsal.ledger import HOST, PASSING, PINNED, Ledger
from megatron_collab.trainer import network
from megatron_collab.trainer import trainer as trainers
from megatron_collab.trainer.megatron import model
from megatron_collab.trainer.megatron.te_cpu import paper
from megatron_collab.trainer.microbatches import MicroBatch, make_micro_batches
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch, Sample, Scored

ACTIVATIONS, HEAD, WORKSPACES = "activations", "head", "workspaces"
GATHERED = "gathered sequence"  # one buffer for all layers: Megatron's of sequence parallelism, not TransformerEngine's


class PaperTensors(HFTensors):
    """A Hugging Face folder of this shape, whose tensors are read as any others and hold nothing."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        self._shapes, self._dtype = hf_to_megatron.hf_shapes(shape), dtype

    def read(self, tensor: str, index: Index) -> Tensor:
        return torch.empty(self._shapes[tensor], dtype=self._dtype)[index]


def make_trainer(config: Config, shape: ModelShape, ledger: Ledger) -> PolicyTrainer:
    """The trainer of a run, with everything loaded, and its memory booked by part."""

    def load(config: Config) -> list[torch.nn.Module]:
        chunks = model.build(config, shape)
        with ledger.booking(HOST):
            fill(chunks, PaperTensors(shape, next(chunks[0].parameters()).dtype))
        return chunks

    trainer = PolicyTrainer(config, load)
    with _sampling(trainer):  # a run samples before its first step, when AdamW has no moments yet
        pass
    for name, trainable in trainer.trainables.items():
        prefix = _prefix(name)
        for optimizer in trainable.optimizer.chained_optimizers:
            optimizer._init_optimizer_states_with_dummy_values()  # else the first step would be without moments
        ledger.claim(f"{prefix}parameters", _held(trainable.chunks))
        paper.on_copies(trainable.chunks, partial(ledger.claim, f"{prefix}parameters"))
        ledger.claim(f"{prefix}gradients", trainable.gradients())
        ledger.claim(f"{prefix}optimizer", trainable.optimizer_storages())
    ledger.claim("reference", _held(trainer.reference or ()))
    paper.on_copies(trainer.reference or (), partial(ledger.claim, "reference"))
    return trainer


def _held(chunks: Iterable[torch.nn.Module]) -> Iterator[Tensor]:
    """The tensors that hold the parameters."""
    return chain.from_iterable(paper.parts(parameter) for chunk in chunks for parameter in chunk.parameters())


def one_batch(config: Config, shape: ModelShape, micro_batches: int) -> Batch:
    """As many full micro-batches for every data parallel rank, each one sequence of which every token is trained, or a
    pair of them that share nothing."""
    parallel = config.parallel
    groups = ranks(config) // (parallel.tp * parallel.pp * parallel.cp)
    sides = 2 if config.objective == "dpo" else 1
    length = micro_batch_tokens(config) * parallel.cp // sides + 1
    mask = (np.arange(length) > 0).astype(np.float32)
    begun: list[np.ndarray] = [(np.arange(length) + side) % shape.vocab for side in range(sides)]
    samples = tuple(Sample(ids, mask, np.zeros(length, np.float32)) for ids in begun) * (micro_batches * groups)
    if config.objective == "sft":
        return Batch(samples)
    rows = [sample.log_probs for sample in samples]
    values = rows if config.algo.advantage == "gae" else None
    return Scored(
        samples,
        old_log_probs=rows if config.algo.mini_batches * config.algo.epochs > 1 else None,
        reference_log_probs=rows if config.refers else None,
        values=values,
        advantages=rows,
        returns=values,
    )


def passes(config: Config, stage: int) -> int:
    """The fewest micro-batches with which a pipeline stage holds as much as with any number of them.

    As many as it has under way, and one after a backward pass, whose gradients stages still exchange. With virtual
    stages until the last that came in the warm-up has gone backward: see planning/activations.py.
    """
    parallel = config.parallel
    return parallel.pp - stage + 1 if parallel.vpp == 1 else 4 * parallel.pp


@contextmanager
def activations_booked(ledger: Ledger, trainer: PolicyTrainer) -> Iterator[None]:
    """Within it what autograd saves, and what is left of a forward pass, is booked as activations.

    The last stage's hidden states, and what is made from them until their gradient is there, as the head's.
    """

    def saved(tensor: Tensor) -> Tensor:
        ledger.claim(ACTIVATIONS, [tensor], booked=PASSING)
        return tensor

    def passed(policy: torch.nn.Module, inputs: object, output: Tensor) -> None:
        last = policy.post_process and output.requires_grad
        if last:
            ledger.claim(HEAD, [output], booked=PASSING)
        claim_lasting(ledger)
        ledger.claim_all(ACTIVATIONS, booked=PASSING)
        if last:
            ledger.part = HEAD
            output.register_hook(done)

    def done(gradient: Tensor) -> None:
        ledger.part = PASSING

    def exchanged(stages: P2PCommunicator, **what: Any) -> Any:
        with ledger.booking(ACTIVATIONS):
            return communicate(stages, **what)

    communicate = P2PCommunicator._communicate
    chunks = [chunk for trainable in trainer.trainables.values() for chunk in trainable.chunks]
    hooks = [unwrap(chunk).register_forward_hook(passed) for chunk in chunks]
    try:
        with (
            saved_tensors_hooks(saved, lambda tensor: tensor),
            mock.patch.object(P2PCommunicator, "_communicate", exchanged),
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def claim_lasting(ledger: Ledger) -> None:
    """Book what a first pass has made for all."""
    ledger.claim(WORKSPACES, paper.workspaces())
    ledger.claim(GATHERED, parallel_state.get_global_memory_buffer().buffer.values())


def _prefix(name: str) -> str:
    """Of the parts of a trained network."""
    return "" if name == "policy" else f"{name}: "


def step(trainer: PolicyTrainer, config: Config, micro_batches: int, ledger: Ledger) -> None:
    """One step of a run, of so many micro-batches: its batch is scored and learnt from, by the policy and the critic.

    Each micro-batch is full. Only one is scored, as no pass without a gradient keeps anything.
    """

    def made(*given: Any, **named: Any) -> list[MicroBatch]:
        """Of real numbers: the lengths of sequences are read from them."""
        with _disable_current_modes():
            return make_micro_batches(*given, **named)

    ledger.reset()
    with (
        mock.patch.object(trainers, "make_micro_batches", made),
        mock.patch.object(network, "make_micro_batches", made),
        # One optimizer step, which has all micro-batches: another holds the same.
        mock.patch.object(trainers, "_split", lambda count, *_: [range(count)]),
    ):
        if config.objective != "sft":
            trainer.score(one_batch(config, trainer.shape, 1))
        with activations_booked(ledger, trainer):
            trainer.update(one_batch(config, trainer.shape, micro_batches))
        claim_lasting(ledger)
        ledger.claim_all(WORKSPACES, booked=ACTIVATIONS)  # what is left, as the rotary embedding, is kept for the next


def _sampling(trainer: PolicyTrainer) -> AbstractContextManager[None]:
    """Within it the trainer is as while the run samples, which supervised training never does."""
    return trainer.offloaded() if trainer.config.train.stage == "rl" else nullcontext()


def parts_of(trainer: PolicyTrainer, ledger: Ledger) -> list[MemoryPart]:
    """What the step and the time after it have held, as the plan has it."""
    for name, trainable in trainer.trainables.items():
        ledger.claim(f"{_prefix(name)}optimizer", trainable.optimizer_storages())
    training = dict(ledger.held.most)
    for part in [part for part in ledger.held.now if part.endswith("optimizer")]:
        training[part] = ledger.held.now[part]
    with _sampling(trainer):
        sampling: Mapping[str, int] = dict(ledger.resized().now)
    ledger.resized()
    networks = trainer.trainables.items()
    pieces = {f"{_prefix(name)}optimizer": len(trainable.host_memory.pieces) for name, trainable in networks}
    reserved = ledger.held.now[PINNED] / max(sum(pieces.values()), 1)  # bytes for a piece
    return [
        MemoryPart(part, size, sampling.get(part, 0), reserved * pieces.get(part, 0))
        for part, size in training.items()
        if part not in (HOST, PINNED)
    ]
