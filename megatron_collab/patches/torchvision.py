"""torchvision beside a torch of another build; transformers imports it with its models."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import torch

from megatron_collab.patches import Patch


def _declare_operators() -> None:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@cache
def _lacks_operators() -> bool:
    """Whether torchvision's own library, which defines the operators, does not fit this torch."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            return True
    return not hasattr(torch.ops.torchvision, "nms")


PATCHES = (
    Patch(
        "torchvision",
        "operators of torchvision",
        why="A torchvision built for CUDA cannot load its library beside a CPU torch, yet registers shapes for these "
        "operators at its import, which then fails.",
        upstream="torchvision/_meta_registrations.py",
        until="the CPU environment has a torchvision built for CPU",
        test="tests/patches/test_sglang.py::test_torchvision_imports_once_its_operators_are_declared",
        apply=_declare_operators,
        when=_lacks_operators,
    ),
)
