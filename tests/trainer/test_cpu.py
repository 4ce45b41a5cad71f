"""A machine without a CUDA device where the libraries of GPU machines are installed: the trainer does without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers import free_port

REPOSITORY = Path(__file__).resolve().parents[2]

# Importable, like the real one without a device: any name of any of its modules is there. What is built or called is
# refused.
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
from megatron_collab.actor import model
from megatron_collab.config import Config
from tests.actor.test_model import trained_optimizer

config = Config()
config.launch.device, config.model.dtype = "cpu", "float32"
with model.init_parallel(config):
    optimizer = trained_optimizer(config).optimizer
print(type(optimizer).__module__, *{float(state["step"]) for state in optimizer.state.values()})
"""


def test_training_on_a_cpu_leaves_transformer_engine_alone(tmp_path: Path) -> None:
    """Layers, optimizer and gradient norm are those of a machine where it is not installed."""
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
