"""Megatron-Core on a machine without a CUDA device: its calls reach the CPU, and GPU libraries stay unused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.jit import jit_fuser
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_collab import patches
from megatron_collab.config import Config
from megatron_collab.patches import megatron as changes
from megatron_collab.runtime import device
from tests.helpers import free_port

REPOSITORY = Path(__file__).resolve().parents[2]

# Importable, like the real one without a device: any name of its modules exists, but construction and calls fail.
ENGINE = """
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "2.20.2"


class Names(type):
    def __getattr__(cls, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return Names(name, (NeedsCuda,), {})


class NeedsCuda(metaclass=Names):
    def __init__(self, *_, **__):
        raise RuntimeError("TransformerEngine needs CUDA")


class Part(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        return getattr(NeedsCuda, name)


class Parts(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Part(spec.name)

    def exec_module(self, module):
        setattr(sys.modules[__name__], module.__name__.split(".")[1], module)


sys.meta_path.insert(0, Parts())
from transformer_engine import common, pytorch
"""

TRAINED = """
from megatron_collab import patches

patches.apply("megatron")
from megatron_collab.config import Config
from tests.patches.test_megatron import trained_optimizer
from tests.ranks import init_parallel

config = Config()
config.launch.device, config.model.dtype = "cpu", "float32"
with init_parallel(config):
    optimizer = trained_optimizer(config).optimizer
print(type(optimizer).__module__, *{float(state["step"]) for state in optimizer.state.values()})
"""


def test_device_names_reach_the_device(one_rank: Config) -> None:
    patches.apply("megatron")  # a second time: nothing happens
    expected = device.select("auto").type
    assert torch.zeros(1, device="cuda").device.type == expected
    assert torch.zeros(1).cuda().device.type == expected
    assert torch.zeros(1, device="cuda").type() == "torch.cuda.FloatTensor"


def test_a_cpu_run_refuses_a_visible_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    changes.refuse_visible_cuda("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match=r"launch\.device=cpu.*CUDA_VISIBLE_DEVICES"):
        changes.refuse_visible_cuda("cpu")


@pytest.mark.processes
def test_model_parallel_random_stream_is_apart(one_rank: Config) -> None:
    state = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(4, device="cuda")
    assert torch.equal(torch.get_rng_state(), state)
    with get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(4, device="cuda"), first)


def test_streams_and_synchronization_do_nothing_on_a_cpu() -> None:
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
    assert torch.compile.__module__ == "torch", "the others compile; calling it would import the compiler for seconds"


@pytest.mark.slow
@pytest.mark.processes
def test_training_on_a_cpu_leaves_transformer_engine_alone(tmp_path: Path) -> None:
    """Layers, optimizer and gradient norm are the same as without TransformerEngine."""
    package, info = tmp_path / "transformer_engine", tmp_path / "transformer_engine-2.20.2.dist-info"
    package.mkdir()
    (package / "__init__.py").write_text(ENGINE)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n")
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{REPOSITORY}",
        "CUDA_VISIBLE_DEVICES": "",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = subprocess.run([sys.executable, "-c", TRAINED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["torch.optim.adamw", "2.0"]
