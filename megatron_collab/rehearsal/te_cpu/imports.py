"""Imports TransformerEngine without Triton, ONNX and its compiled part."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

_MODULES = {  # libraries that TransformerEngine imports, with the modules that it references
    "triton": ("triton", "triton.language", "triton.language.core", "triton.language.standard"),
    "onnx": ("onnx",),
    "onnxscript": ("onnxscript",),
}
_VARIABLES = {
    "NVTE_PROJECT_BUILDING": "1",  # else its import loads the CUDA libraries of its wheels
    "NVTE_FRAMEWORK": "pytorch",
    "NVTE_TORCH_COMPILE": "0",
}


def import_over(extension: ModuleType) -> None:
    """Import TransformerEngine with `extension` as its compiled part."""
    import torch._dynamo  # noqa: F401  (checks whether Triton is installed)

    sys.modules[extension.__name__] = extension
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None and spec.loader is not None
    package = sys.modules["transformer_engine"] = importlib.util.module_from_spec(spec)
    with patch.dict(os.environ, _VARIABLES), _placeholders():
        common = importlib.import_module("transformer_engine.common")  # before the package's __init__ runs
        common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
        spec.loader.exec_module(package)
        importlib.import_module("transformer_engine.pytorch")  # the package hides the reason of a failed import


class _Name(type):
    """A placeholder type whose attributes are placeholders too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {"__init__": lambda self, *_, **__: None})


class _Library(ModuleType):
    """A module of a missing library: its names are empty types; its kernels can be referenced, but not launched."""

    __version__ = "3.4.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        return getattr(_Name("names", (), {}), name)

    @staticmethod
    def jit(function: Any = None, **_: Any) -> Any:
        return _Kernel if function is None else _Kernel(function)

    @staticmethod
    def autotune(*_: Any, **__: Any) -> Any:
        return lambda kernel: kernel

    heuristics = autotune


class _Kernel:
    """A Triton kernel."""

    def __init__(self, function: Any) -> None:
        self.name = f"{function.__module__}.{function.__name__}"

    def __getitem__(self, grid: Any) -> Any:
        raise NotImplementedError(f"{self.name}: no reference kernel in megatron_collab/rehearsal/te_cpu")


@contextmanager
def _placeholders() -> Iterator[None]:
    """Makes missing libraries of _MODULES importable inside the block; afterwards they are missing again."""
    missing = [name for library in _MODULES if importlib.util.find_spec(library) is None for name in _MODULES[library]]
    sys.modules.update({name: _Library(name) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
