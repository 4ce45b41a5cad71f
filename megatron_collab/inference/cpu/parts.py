"""Supplies the parts that SGLang and transformers expect and a CPU machine lacks.

Each part is supplied only where it is missing: a real triton, sgl_kernel or torchvision wins. Nothing of
SGLang is copied or changed on disk.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch

_DETECTION_OPERATORS = ("nms", "qnms")


def install_torchvision_operators() -> None:
    """Declare the two operators without which torchvision cannot be imported.

    A torchvision built for CUDA cannot load its library beside a CPU torch, yet registers shapes for these
    operators. transformers imports torchvision with its models, so trainers call this too.
    """
    for name in _DETECTION_OPERATORS:
        if not hasattr(torch.ops.torchvision, name) and not _loads_torchvision_library():
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def install() -> None:
    """Make `sglang` importable and runnable; call before its first import, in each of its processes."""
    install_torchvision_operators()
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, _TritonStand())
    if importlib.util.find_spec("sgl_kernel") is None:
        from megatron_collab.inference.cpu import sgl_kernel

        sys.modules["sgl_kernel"] = sgl_kernel


def _loads_torchvision_library() -> bool:
    """Whether torchvision's own library, which defines the operators, fits this torch."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            return False
    return hasattr(torch.ops.torchvision, "nms")


class _TritonStand(MetaPathFinder, Loader):
    """Imports `triton` and everything below it as the stand-ins that SGLang ships for machines without it.

    SGLang installs them itself on macOS only. Kernels can then be defined, not run; on CPU none is.
    """

    def __init__(self) -> None:
        package = importlib.util.find_spec("sglang")
        if package is None or package.origin is None:
            raise ModuleNotFoundError("sglang: not installed; run make setup")
        file = Path(package.origin).parent / "_platform_stubs.py"
        spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", file)
        assert spec is not None and spec.loader is not None
        self.stubs = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self.stubs  # its dataclasses look themselves up there
        spec.loader.exec_module(self.stubs)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "triton" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules.get(spec.name) or self.stubs._MockModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "triton":
            names = {"cdiv": "_cdiv", "next_power_of_2": "_next_power_of_2", "Config": "_Config"}
            vars(module).update({name: getattr(self.stubs, stub) for name, stub in names.items()}, __version__="3.4.0")
        elif module.__name__ == "triton.language":
            constexpr = type("constexpr", (), {"__init__": lambda self, value=None: None})
            vars(module).update(constexpr=constexpr, core=self.stubs._MockModule("triton.language.core"))
