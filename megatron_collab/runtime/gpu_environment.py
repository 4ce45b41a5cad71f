"""The environment of every process that imports torch: ranks, servers, workers.

Code that torch compiles is kept in the user's cache, not in the temporary folder. On GPUs, CUDA is that of torch's
wheels, whatever a cluster's modules have loaded. What CUDA and TransformerEngine read when they begin is set before:
`enter` comes before anything that asks torch for devices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_collab.runtime import device, toolkit
from megatron_collab.runtime.files import COMPILE_CACHE

if TYPE_CHECKING:
    from megatron_collab.config import Config

# Set by modules of another CUDA or cuDNN. TransformerEngine loads cuDNN and NVRTC from their folders before the wheels'
# (transformer_engine/common/__init__.py), into the global scope; compilers of kernels read the others.
_OF_MODULES = ("CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_PATH", "CUDNN_PATH", "CUDNN_ROOT")


def environment(inherited: Mapping[str, str], config: Config | None = None) -> dict[str, str]:
    """`inherited` for a process with torch; with `config` for a rank of that run, unless `inherited` decides.

    A torch without CUDA's wheels, as in a container of NVIDIA's, goes with the CUDA that is around it.
    """
    variables = dict(inherited)
    if home := toolkit.wheels():
        for name in _OF_MODULES:
            variables.pop(name, None)
        compiler = str(home) if (home / "bin" / "nvcc").is_file() else toolkit.cuda_home()
        variables["CUDA_HOME"] = compiler or str(home)
        variables["CUDNN_HOME"] = str(home.parent / "cudnn")
        variables["LD_LIBRARY_PATH"] = toolkit.library_path(inherited.get("LD_LIBRARY_PATH"))
    return dict([COMPILE_CACHE]) | (_of_ranks(config) if config else {}) | variables


def enter(config: Config | None = None) -> None:
    """Give this process, and what it starts, that environment; but for LD_LIBRARY_PATH, which the loader has read."""
    variables = environment(os.environ, config)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def reload() -> None:
    """Start this program again, once, if the loader has read another LD_LIBRARY_PATH than that environment's.

    TransformerEngine names parts of cuDNN and has no path to them: those of a module's cuDNN would join the wheels'.
    Called before slow imports. Signals that are blocked stay so, and pending ones wait.
    """
    path = toolkit.library_path(os.environ.get("LD_LIBRARY_PATH"))
    if toolkit.wheels() and path != os.environ.get("LD_LIBRARY_PATH"):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "LD_LIBRARY_PATH": path})


def _of_ranks(config: Config) -> dict[str, str]:
    """What a trainer's rank on GPUs has.

    One hardware queue keeps the order in which Megatron launches a collective and the product that is to run beside it
    (megatron/core/tensor_parallel/layers.py); from Blackwell on it needs no help. Context parallelism over
    FlashAttention wants a second list of lengths, with padding, which packed micro-batches lack; cuDNN's does not.
    TransformerEngine loads the history of delayed scaling, a pickle, only if it is told that it may: a run's
    checkpoints are its own.
    """
    if config.launch.device == "cpu" or device.select("auto").type != device.GPU:
        return {}
    parallel, variables = config.parallel, dict[str, str]()
    if max(parallel.tp, parallel.cp) > 1 and (device.capability() or (0, 0)) < (10, 0):
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if parallel.cp > 1:
        variables["NVTE_FLASH_ATTN"] = "0"
    if config.model.fp8 and config.model.fp8_recipe == "delayed":
        variables["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
    return variables
