"""Megatron-Core on a machine without a CUDA device: its calls reach the CPU, and GPU libraries are left alone."""

from __future__ import annotations

import pytest
import torch
from megatron.core.jit import jit_fuser
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_collab import patches
from megatron_collab.config import Config
from megatron_collab.patches import cpu
from megatron_collab.runtime import device


def test_device_names_reach_the_device(one_rank: Config) -> None:
    patches.apply("megatron")  # a second time: nothing happens
    expected = device.select("auto").type
    assert torch.zeros(1, device="cuda").device.type == expected
    assert torch.zeros(1).cuda().device.type == expected
    assert torch.zeros(1, device="cuda").type() == "torch.cuda.FloatTensor"


def test_a_cpu_run_refuses_a_visible_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.refuse_visible_cuda("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match=r"launch\.device=cpu.*CUDA_VISIBLE_DEVICES"):
        cpu.refuse_visible_cuda("cpu")


def test_model_parallel_random_stream_is_apart(one_rank: Config) -> None:
    state = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(4, device="cuda")
    assert torch.equal(torch.get_rng_state(), state)
    with get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(4, device="cuda"), first)


def test_streams_and_synchronisation_do_nothing_on_a_cpu() -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    stream.record_event().synchronize()
    assert stream == torch.cuda.default_stream()
    torch.cuda.set_device(torch.cuda.current_device())
    torch.cuda.nvtx.range_push("here")
    torch.cuda.nvtx.range_pop()
    torch.cuda.synchronize()


def test_megatron_is_not_compiled_on_a_cpu() -> None:
    def function() -> None: ...

    assert jit_fuser(function) is function
    assert torch.compile(function) is not function
