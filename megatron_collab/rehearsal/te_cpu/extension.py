"""The stand-in for TransformerEngine's compiled module: its enums and reference kernels; other names raise errors."""

from __future__ import annotations

import importlib.util
import re
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from megatron_collab.rehearsal.te_cpu import attention, context_parallel, layers, masters, optimizer, quantize

EXTENSION = "transformer_engine_torch"

# From the headers of TransformerEngine 2.20 (transformer_engine.h, fused_attn.h, fused_router.h, comm_gemm_overlap.h),
# which are not in its wheel. Only the numbers of DType (some are omitted) are ever stored in a file.
_ENUMS = {  # name: (prefix of the members, members, numbered from 0 or from an explicit number on)
    "DType": ("k", "Byte Int32=2 Float32=4 Float16 BFloat16 Float8E4M3 Float8E5M2 Float4E2M1=10"),
    "NVTE_Bias_Type": ("NVTE_", "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI"),
    "NVTE_Mask_Type": (
        "NVTE_",
        "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK "
        "PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    ),
    "NVTE_Softmax_Type": ("NVTE_", "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX"),
    "NVTE_Fused_Attn_Backend": ("NVTE_", "No_Backend=-1 F16_arbitrary_seqlen=1 FP8"),
    "NVTE_QKV_Format": ("NVTE_", "SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET"),
    "NVTE_QKV_Layout": (
        "NVTE_",
        "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD "
        "T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
        "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD "
        "Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD QKV_Layout_NOT_SET",
    ),
    "NVTEScalingMode": (
        "NVTE_",
        "DELAYED_TENSOR_SCALING MXFP8_1D_SCALING BLOCK_SCALING_1D BLOCK_SCALING_2D NVFP4_1D_SCALING "
        "INVALID_SCALING=100",
    ),
    "NVTERoutingMapFormat": ("", "BYTEMAP BITMAP_U8"),
    "NVTEQBHistogramMode": ("", "TWO_KERNEL FUSED_ATOMIC"),
    "Float8BlockScaleTensorFormat": ("", "GEMM_READY COMPACT INVALID"),
    "FP8FwdTensors": (
        "",
        " ".join(f"GEMM{number}_{role}" for number in (1, 2, 3) for role in ("INPUT", "WEIGHT", "OUTPUT")),
    ),
    "FP8BwdTensors": (
        "",
        " ".join(f"{role}{number}" for number in (1, 2, 3) for role in ("GRAD_OUTPUT", "GRAD_INPUT")),
    ),
    "CommOverlapType": ("", "RS AG"),
    "CommOverlapAlgo": (
        "",
        "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P "
        "ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
    ),
}
_HOOKS = ("flash_attention", "get_attention_backend")  # optional functions of a vendor's extension
CUBLAS, CUDNN = 130100, 92400  # versions of CUDA 13.1, in the format of these libraries


def kernels() -> dict[str, Any]:
    """The reference kernels, by the names of the compiled ones."""
    return {
        name: kernel
        for source in (layers, attention, context_parallel, quantize, masters, optimizer)
        for name, kernel in vars(source).items()
        if getattr(kernel, "__module__", None) == source.__name__ and not name.startswith("_")
    }


def module() -> ModuleType:
    """A new `transformer_engine_torch`."""
    stub = ModuleType(EXTENSION, __doc__)
    vars(stub).update({name: IntEnum(name, _numbers(*members), module=EXTENSION) for name, members in _ENUMS.items()})
    vars(stub).update({name: _missing(name) for name in _referenced_names()})
    vars(stub).update(kernels())
    vars(stub).update(
        REFERENCE=True, get_cublasLt_version=lambda: CUBLAS, get_cudnn_version=lambda: CUDNN, __getattr__=_missing
    )
    return stub


def _numbers(prefix: str, members: str) -> dict[str, int]:
    """The numbers of an enum's members, as assigned by C."""
    numbers, next_number = {}, 0
    for member in members.split():
        name, _, number = member.partition("=")
        numbers[prefix + name] = int(number or next_number)
        next_number = numbers[prefix + name] + 1
    return numbers


def _referenced_names() -> set[str]:
    """The names of the compiled module that TransformerEngine's Python code references (it uses `import *`)."""
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None and spec.origin is not None
    files = (Path(spec.origin).parent / "pytorch").rglob("*.py")
    return {name for file in files for name in re.findall(r"(?<![\w.])tex\.([a-z]\w+)", file.read_text())} - set(_HOOKS)


def _missing(name: str) -> type:
    """Placeholder for a name without a reference kernel: TransformerEngine may reference it, but not call it."""
    if name in _HOOKS or name.startswith("__"):
        raise AttributeError(f"{EXTENSION}.{name}")

    def refuse(cls: type, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{EXTENSION}.{name}: no reference kernel in megatron_collab/rehearsal/te_cpu")

    return type(name, (), {"__new__": refuse, "__module__": EXTENSION})
