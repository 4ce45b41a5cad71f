"""The ranks of a run: their store, process groups and seeds, and the order in which they exit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed.rendezvous import rendezvous

from megatron_collab.patches.megatron import refuse_visible_cuda
from megatron_collab.runtime import affinity, device, hang_detector, rank0
from megatron_collab.runtime.files import full_disk
from megatron_collab.runtime.process import RunStopped, beat, lost_process
from megatron_collab.settings import LaunchConfig, TrainingLaunchConfig
from megatron_collab.trainer.spec import NetworkSpec

_GROUPS = count()
_LEADER_ENDED = "leader_ended"  # a key of the store
# By which Megatron chooses TransformerEngine's attention for a model. It refuses a model that needs other values.
_ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@cache
def run_store() -> tuple[dist.Store, int, int]:
    """Store, rank and number of ranks from torchrun's environment; the store lives as long as the process."""
    return next(rendezvous("env://"))


@contextmanager
def leader_ends_first(timeout: float, explain: Callable[[RunStopped], None]) -> Iterator[None]:
    """If the run stops inside the block, the other ranks leave it after rank 0, or after `timeout` seconds.

    torchrun ends all ranks once one has failed, and rank 0 must still shut down servers and Ray, and `explain`. A rank
    that fills its disk explains that itself, and a rank that loses rank 0 in a collective needs no explanation.
    """
    try:
        yield
    except Exception as error:
        store, rank, _ = run_store()
        stop = error if isinstance(error, RunStopped) else full_disk(error) or lost_process(error)
        if stop and (rank == 0 or stop is not error):
            explain(stop)
            store.set(_LEADER_ENDED, "")
        elif stop:
            with suppress(dist.DistStoreError, dist.DistNetworkError):  # rank 0 is late, or its node is down
                store.wait([_LEADER_ENDED], timedelta(seconds=timeout))
        elif rank and store.check([_LEADER_ENDED]):
            stop = RunStopped("rank 0 has ended")
        if stop is None or stop is error:
            raise
        raise stop from error


@contextmanager
def connected(launch: LaunchConfig) -> Iterator[timedelta]:
    """Torch's default process group of the ranks, from torchrun's environment; can be entered again after its end.

    The value is the timeout of collectives.
    """
    selected = device.select(launch.device)
    refuse_visible_cuda(selected.type)
    if selected.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    beat("rendezvous of the ranks")
    timeout = hang_detector.collective_timeout(launch.timeout)
    store, rank, world_size = run_store()
    # A new prefix: keys of an earlier group of this process must not be read again.
    store = dist.PrefixStore(f"parallel/{next(_GROUPS)}", store)
    dist.init_process_group(selected.backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    with default_group(timeout):
        yield timeout


@contextmanager
def default_group(timeout: timedelta) -> Iterator[None]:
    """Rank 0's own group beside torch's default group, which is destroyed at the end."""
    with rank0.dedicated_group(timeout):
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def init_parallel(launch: TrainingLaunchConfig, network: NetworkSpec) -> Iterator[None]:
    """As `connected`, with the layout's process groups and the seeds, on the CPUs beside the rank's GPU."""
    with connected(launch) as timeout:
        if launch.numa_binding and device.select(launch.device).type != "cpu":
            affinity.bind(device.pci_address())
        with layout_groups(network, timeout):
            yield


@contextmanager
def layout_groups(network: NetworkSpec, timeout: timedelta) -> Iterator[None]:
    """The layout's process groups and the seeds, in torch's default group.

    The choice of attention for an earlier layout, or by the shell, is forgotten: the configuration decides it.
    """
    parallel = network.parallel
    for name in _ATTENTION_VARIABLES:
        os.environ.pop(name, None)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=timeout.total_seconds() / 60,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(network.seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()
