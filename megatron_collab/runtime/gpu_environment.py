"""The environment of every process that imports torch: ranks, servers, workers.

Code compiled by torch is kept in the user's cache, not in the temporary folder. On GPUs, CUDA comes from torch's
wheels, whatever environment modules a cluster has loaded. CUDA and TransformerEngine read their variables at
initialization, so `enter` must be called before anything asks torch for devices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_collab.runtime import device, toolkit
from megatron_collab.runtime.files import COMPILE_CACHE

if TYPE_CHECKING:
    from megatron_collab.settings import ParallelConfig, TrainingModelConfig

# Variables that environment modules of another CUDA or cuDNN set. TransformerEngine prefers their cuDNN and NVRTC over
# the wheels' (transformer_engine/common/__init__.py) and loads them globally; kernel compilers read the others.
_MODULE_VARIABLES = ("CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_PATH", "CUDNN_PATH", "CUDNN_ROOT")


def environment(inherited: Mapping[str, str], defaults: Mapping[str, str] = {}) -> dict[str, str]:
    """`inherited`, adapted for a process with torch; `defaults` as from `rank_variables`.

    If torch has no CUDA wheels, as in NVIDIA's containers, the surrounding CUDA is used.
    """
    variables = dict(inherited)
    if home := toolkit.wheels():
        for name in _MODULE_VARIABLES:
            variables.pop(name, None)
        compiler = str(home) if (home / "bin" / "nvcc").is_file() else toolkit.cuda_home()
        variables["CUDA_HOME"] = compiler or str(home)
        variables["CUDNN_HOME"] = str(home.parent / "cudnn")
        variables["LD_LIBRARY_PATH"] = toolkit.library_path(inherited.get("LD_LIBRARY_PATH"))
    return dict([COMPILE_CACHE, *defaults.items()]) | variables


def enter(defaults: Mapping[str, str] = {}) -> None:
    """Apply `environment` to this process and its children; LD_LIBRARY_PATH affects only the children (`reload`)."""
    variables = environment(os.environ, defaults)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def reload() -> None:
    """Restart this program once (exec) if LD_LIBRARY_PATH differs from the one `environment` sets.

    TransformerEngine loads parts of cuDNN by name: parts of an environment module's cuDNN would mix with the wheels'.
    Called before slow imports. Blocked signals stay blocked, and pending ones stay pending.
    """
    path = toolkit.library_path(os.environ.get("LD_LIBRARY_PATH"))
    if toolkit.wheels() and path != os.environ.get("LD_LIBRARY_PATH"):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "LD_LIBRARY_PATH": path})


def rank_variables(setting: str, parallel: ParallelConfig, model: TrainingModelConfig) -> dict[str, str]:
    """Variables of a trainer rank on GPUs; `setting`: launch.device.

    Before Blackwell, a single hardware queue is needed to keep a collective and the matrix product that overlaps it
    in Megatron's launch order (megatron/core/tensor_parallel/layers.py).
    TransformerEngine loads the history of delayed scaling, a pickle, only if that is allowed; it is safe here because a
    run reads its own checkpoints.
    """
    if setting == "cpu" or device.select("auto").type != device.GPU:
        return {}
    variables = dict[str, str]()
    if max(parallel.tp, parallel.cp) > 1 and (device.capability() or (0, 0)) < (10, 0):
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if model.fp8 and model.fp8_recipe == "delayed":
        variables["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
    return variables
