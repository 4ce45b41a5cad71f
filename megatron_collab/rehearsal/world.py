"""Simulates one rank of a run without the others: fake process groups and fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.patches.rehearsal import paper_in_force
from megatron_collab.rehearsal.ledger import Ledger
from megatron_collab.rehearsal.te_cpu.paper import forget
from megatron_collab.trainer.megatron import parallel


@contextmanager
def rank_on_paper(config: Config, shape: ModelShape, rank: int) -> Iterator[Ledger]:
    """Make this process `rank` of all ranks of the run, on a simulated GPU."""
    experts = shape.experts
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.launch.ranks)
    with ExitStack() as stack:
        stack.callback(forget)
        stack.enter_context(paper_in_force())
        timeout = timedelta(seconds=config.launch.timeout)
        stack.enter_context(parallel.default_group(timeout))
        stack.enter_context(parallel.layout_groups(network_spec(config), timeout))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(Ledger(picked=experts.per_token / experts.count if experts else 1.0))
