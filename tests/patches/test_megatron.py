"""Faults of Megatron-Core are repaired."""

from __future__ import annotations

import importlib
import inspect
import logging
import pickle
import subprocess
import sys

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import layers

from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec
from megatron_collab.patches import megatron
from megatron_collab.trainer.megatron import model as policies
from tests.trainer.megatron.test_model import packed
from tests.trainer.shapes import SHAPE


def test_fused_gradient_accumulation_needs_no_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    (patch,) = (patch for patch in megatron.PATCHES if patch.name == "gradient accumulation fusion without apex")
    patch.put_in_force()
    assert layers._grad_accum_fusion_available


@pytest.mark.processes
def test_importing_megatron_prints_nothing() -> None:
    """It skips Megatron's loggers, which can still be imported later."""
    program = """
from megatron_collab import patches
patches.apply("megatron")
import megatron_collab.trainer.trainer
import sys
assert not {"wandb", "torch.utils.tensorboard"} & sys.modules.keys()
import torch.utils.tensorboard, wandb
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("logger", "message"), megatron._MESSAGES.items())
def test_messages_that_are_known_are_not_printed(logger: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger(logger).warning(f"{message} on this machine")
    logging.getLogger(logger).warning("anything else")
    assert caplog.messages == ["anything else"]
    assert message in inspect.getsource(importlib.import_module(logger))


def trained_optimizer(config: Config) -> DistributedOptimizer:
    """A distributed optimizer after two steps."""
    (model,) = policies.build(network_spec(config), SHAPE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(model.config, settings, model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), [model])
    for _ in range(2):
        model.zero_grad_buffer()
        model(*packed(8)).square().mean().backward()
        model.finish_grad_sync()
        optimizer.step()
    (inner,) = optimizer.chained_optimizers
    return inner


def test_a_loaded_optimizer_counts_steps_for_each_parameter(one_rank: Config) -> None:
    optimizer = trained_optimizer(one_rank)
    optimizer.load_state_dict(optimizer.state_dict())
    steps = [state["step"] for state in optimizer.optimizer.state.values()]
    assert len({id(step) for step in steps}) == len(steps) > 1
    assert {float(step) for step in steps} == {2.0}


def test_an_optimizer_state_without_step_can_be_set(one_rank: Config) -> None:
    optimizer = trained_optimizer(one_rank)
    for parameter in optimizer.model_param_group_index_map:
        state = dict(optimizer._get_main_param_and_optimizer_states(parameter))
        state.pop("step", None)
        with torch.no_grad():
            optimizer._set_main_param_and_optimizer_states(parameter, state)
        assert float(optimizer._get_main_param_and_optimizer_states(parameter)["step"]) == 2.0


def test_a_pickled_tensor_names_torch_alone() -> None:
    """Otherwise only processes with Megatron could read it."""
    import megatron.core  # noqa: F401

    pickled = pickle.dumps(torch.arange(3.0))
    assert b"megatron" not in pickled and b"_load_from_bytes" in pickled
    assert torch.equal(pickle.loads(pickled), torch.arange(3.0))
