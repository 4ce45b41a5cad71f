"""Importing TransformerEngine where Triton, ONNX and its compiled part are missing."""

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

_NAMED = {  # libraries that TransformerEngine imports, with the modules of theirs that it names
    "triton": ("triton", "triton.language", "triton.language.core", "triton.language.standard"),
    "onnx": ("onnx",),
    "onnxscript": ("onnxscript",),
}
_VARIABLES = {
    "NVTE_PROJECT_BUILDING": "1",  # else its import loads the shared libraries of its wheels for CUDA
    "NVTE_FRAMEWORK": "pytorch",
    "NVTE_TORCH_COMPILE": "0",
}


def import_over(extension: ModuleType) -> None:
    """Import TransformerEngine with `extension` as its compiled part."""
    import torch._dynamo  # noqa: F401  (asks whether Triton is there)

    sys.modules[extension.__name__] = extension
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None and spec.loader is not None
    package = sys.modules["transformer_engine"] = importlib.util.module_from_spec(spec)
    with patch.dict(os.environ, _VARIABLES), _named():
        common = importlib.import_module("transformer_engine.common")  # the package's own body is yet to run
        common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
        spec.loader.exec_module(package)
        importlib.import_module("transformer_engine.pytorch")  # the package hides why it could not be imported


class _Name(type):
    """Whatever is asked of it is another one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {"__init__": lambda self, *_, **__: None})


class _Library(ModuleType):
    """A module of a library that is missing: its names are empty types, its kernels can be named, not launched."""

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
    """A function in Triton's language."""

    def __init__(self, function: Any) -> None:
        self.name = f"{function.__module__}.{function.__name__}"

    def __getitem__(self, grid: Any) -> Any:
        raise NotImplementedError(f"{self.name}: no reference kernel in megatron_collab/trainer/megatron/te_cpu")


@contextmanager
def _named() -> Iterator[None]:
    """Within it the missing ones of _NAMED can be imported; who asks later finds them missing, as they are."""
    missing = [name for library in _NAMED if importlib.util.find_spec(library) is None for name in _NAMED[library]]
    sys.modules.update({name: _Library(name) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
