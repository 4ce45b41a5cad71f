"""Patches of SGLang for machines without a GPU: stand-ins for missing modules, forked processes, exact products.

With deterministic inference a request's seed determines its sample; SGLang refuses it on CPU because it lacks
batch-invariant kernels there. On one CPU thread two things depend on the batch. A matrix product of very few rows uses
another code path than one of many; here the rows are padded. The other is attention, see inference/cpu/attention.py.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from megatron_collab.patches import Patch

# Minimum number of rows from which a row of a float32 product does not depend on the number of rows.
MIN_ROWS = 4

_linear = F.linear
_matmul = torch.matmul


def on_cpu() -> bool:
    """Whether a server computes on the CPU: set by its environment, else true if this machine has no GPU."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE", "0" if torch.cuda.is_available() else "1") == "1"


def without_triton() -> bool:
    if any(isinstance(finder, _TritonStand) for finder in sys.meta_path):
        return True
    return importlib.util.find_spec("triton") is None


def without_sgl_kernel() -> bool:
    loaded = sys.modules.get("sgl_kernel")
    if loaded is not None:
        return loaded.__name__.startswith(__package__)
    return on_cpu() or importlib.util.find_spec("sgl_kernel") is None


class _TritonStand(MetaPathFinder, Loader):
    """Imports `triton` and its submodules as the stand-ins that SGLang ships for machines without triton."""

    def __init__(self) -> None:
        package = importlib.util.find_spec("sglang")
        if package is None or package.origin is None:
            raise ModuleNotFoundError("sglang: not installed; run make setup")
        file = Path(package.origin).parent / "_platform_stubs.py"
        spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", file)
        assert spec is not None and spec.loader is not None
        self.stubs = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self.stubs  # its dataclasses look up their module there
        spec.loader.exec_module(self.stubs)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
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


def _stand_in_for_sgl_kernel() -> None:
    from megatron_collab.patches import sgl_kernel

    sys.modules["sgl_kernel"] = sgl_kernel


def uncompiled(model: Any = None, **_: Any) -> Any:
    """In place of torch.compile: the function itself, also as a decorator with arguments."""
    return uncompiled if model is None else model


def hide_unused_packages() -> None:
    """Make imports of Megatron-Core and scikit-learn fail. The server calls this before it imports SGLang."""
    for name in ("megatron.core", "sklearn"):
        sys.modules[name] = None  # type: ignore[assignment]


def keep_loads_in_temporary_folder() -> None:
    """Put load snapshots into the temporary folder. The server calls this after its modules are imported."""
    from sglang.srt.managers import load_snapshot

    load_snapshot.shm_path_for = lambda name: f"{tempfile.gettempdir()}/loads-{name}"


def guard_from_clients() -> None:
    """Keep the settings, with the managing key among them, and the websocket from programs that have only a key to
    sample. A server for such programs calls this after its modules are imported.
    """
    from sglang.srt.entrypoints import http_server
    from starlette.routing import WebSocketRoute

    for answer in (http_server.server_info, http_server.get_server_info):
        http_server.auth_level(http_server.AuthLevel.ADMIN_OPTIONAL)(answer)
    routes = http_server.app.router.routes
    routes[:] = [route for route in routes if not isinstance(route, WebSocketRoute)]


def zero_biases_of_heads() -> None:
    """Zero the biases of reward models' heads. A server that scores calls this after its modules are imported."""
    from sglang.srt.models.qwen2_classification import Qwen2ForSequenceClassification
    from sglang.srt.models.qwen3_classification import Qwen3ForSequenceClassification

    def zeroed(load: Any) -> Any:
        def load_weights(model: Any, weights: Any) -> Any:
            model.score.bias.data.zero_()
            return load(model, weights)

        return load_weights

    for kind in (Qwen2ForSequenceClassification, Qwen3ForSequenceClassification):
        setattr(kind, "load_weights", zeroed(kind.load_weights))  # noqa: B010 (mypy refuses the assignment)


def load_adapters_at_start() -> None:
    """Load adapters at the start. A server with adapters calls this after its modules are imported."""
    from sglang.srt.lora.lora_manager import LoRAManager

    init_memory_pool = LoRAManager.init_memory_pool

    def with_adapters(manager: Any) -> None:
        init_memory_pool(manager)
        manager.fetch_new_loras(set(manager.loras))

    LoRAManager.init_memory_pool = with_adapters


def leave_offsets_unpinned() -> None:
    """Never pin host memory. A server with adapters on a CPU calls this after its modules are imported."""
    tensor = torch.tensor
    vars(torch)["tensor"] = lambda *values, pin_memory=False, **options: tensor(*values, **options)
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor


def _enable_batch_invariant_mode() -> None:
    vars(F)["linear"] = linear
    vars(torch)["matmul"] = matmul


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` of x [rows, in]; a row's result does not depend on the other rows."""
    if x.dim() != 2 or x.shape[0] >= MIN_ROWS:
        return _linear(x, weight, bias)
    return _linear(F.pad(x, (0, 0, 0, MIN_ROWS - x.shape[0])), weight, bias)[: x.shape[0]]


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`torch.matmul` of x [rows, in] and y [in, out]; a row's result does not depend on the other rows."""
    if x.dim() != 2 or y.dim() != 2 or x.shape[0] >= MIN_ROWS:
        return _matmul(x, y)
    return _matmul(F.pad(x, (0, 0, 0, MIN_ROWS - x.shape[0])), y)[: x.shape[0]]


_sglang = partial(Patch, "sglang")

PATCHES = (
    _sglang(
        "a stand-in for triton",
        why="SGLang imports triton everywhere, but installs the stand-ins that it ships only on macOS. Kernels can "
        "then be defined but not run; a CPU runs none.",
        upstream="sglang/_platform_stubs.py",
        until="SGLang installs them wherever triton is missing",
        test="tests/patches/test_sglang.py::test_kernels_can_be_defined_without_triton",
        apply=lambda: sys.meta_path.insert(0, _TritonStand()),
        when=without_triton,
    ),
    _sglang(
        "a stand-in for sgl_kernel",
        why="The two kernels that SGLang calls on CPU, in plain torch; others are imported by name and never called. "
        "The package for GPUs has neither, and cannot be imported without a driver.",
        upstream="sglang/srt/layers/sampler.py, sglang/srt/mem_cache",
        until="SGLang's CPU engine can be installed without kernels built from source",
        test="tests/patches/test_sglang.py::test_requests_get_their_cache_slots",
        apply=_stand_in_for_sgl_kernel,
        when=without_sgl_kernel,
    ),
    _sglang(
        "no compiler of torch",
        why="Decorators of kernels for GPUs import torch's compiler when SGLang is imported: 2 s. On a CPU nothing is "
        "compiled.",
        upstream="sglang/srt/layers/moe/moe_runner/deep_gemm.py (torch.compile)",
        until="torch.compile imports the compiler when a function is called",
        test="tests/patches/test_sglang.py::test_servers_import_only_what_they_use",
        wraps={"torch.compile": lambda _: uncompiled},
        when=on_cpu,
    ),
    _sglang(
        "forked processes",
        why="Spawned processes import everything again: two thirds of the start-up. CUDA could not be forked.",
        upstream="sglang/srt/entrypoints/engine.py:1995",
        until="SGLang takes the start method from a setting",
        test="tests/patches/test_sglang.py::test_a_server_on_cpu_forks_and_computes_row_by_row",
        wraps={
            "multiprocessing.set_start_method": lambda original: lambda _, force=False: original("fork", force),
        },
        when=on_cpu,
    ),
    _sglang(
        "the CPU's module of a torch for CUDA",
        why="Servers ask torch which device it was built for, not which one they compute on: one that releases its "
        "memory would wait for a GPU, and end. The meta device of a rehearsal has no module.",
        upstream="sglang/srt/managers/scheduler_components/weight_updater.py:379",
        until="SGLang names its device there",
        test="tests/patches/test_sglang.py::test_a_server_on_cpu_forks_and_computes_row_by_row",
        wraps={"torch.get_device_module": lambda original: lambda device="cpu": original("cpu")},
        when=on_cpu,
    ),
    _sglang(
        "batch-invariant products",
        why="SGLang's batch-invariant mode is made of triton kernels; on CPU padding the rows of F.linear and "
        "torch.matmul has the same effect, with inference.ROW_BY_ROW.",
        upstream="sglang/srt/model_executor/model_runner.py:844",
        until="SGLang has a batch-invariant mode for CPU",
        test="tests/patches/test_sglang.py::test_a_server_on_cpu_forks_and_computes_row_by_row",
        sets={"sglang.srt.batch_invariant_ops.enable_batch_invariant_mode": _enable_batch_invariant_mode},
        when=on_cpu,
    ),
    _sglang(
        "host memory that is not pinned",
        why="A server keeps the experts of every cached token in memory that CUDA's runtime pins, on a CPU too.",
        upstream="sglang/srt/state_capturer/base.py:68",
        until="SGLang pins host memory only on GPUs",
        test="tests/inference/test_routing.py::test_every_position_is_routed_once",
        sets={"sglang.srt.mem_cache.pool_host.common._cuda_host_register": lambda *_: None},
        when=on_cpu,
    ),
    _sglang(
        "no Megatron in servers",
        why="SGLang's dumper for debugging imports Megatron, and with it TransformerEngine, into every process of a "
        "server. That takes seconds, and ends it if an import raises anything but ImportError, as without a driver.",
        upstream="sglang/srt/debug_utils/dumper.py:1824",
        until="the dumper imports Megatron when it is used",
        test="tests/patches/test_sglang.py::test_servers_import_only_what_they_use",
    ),
    _sglang(
        "no scikit-learn in servers",
        why="Transformers imports it for assisted decoding if it is installed, and with it SciPy and pandas: 2 s.",
        upstream="transformers/generation/candidate_generator.py:30",
        until="Transformers imports it when a candidate is generated",
        test="tests/patches/test_sglang.py::test_servers_import_only_what_they_use",
    ),
    _sglang(
        "load snapshots in the temporary folder",
        why="A server's processes share their load in a file in /dev/shm that no one unlinks when they are killed; in "
        "the server's temporary folder it is removed with it.",
        upstream="sglang/srt/managers/load_snapshot.py:303",
        until="SGLang unlinks it, or takes its folder from a setting",
        test="tests/inference/test_server.py::test_a_server_that_dies_shows_its_last_words_and_leaves_no_files",
        uses=("sglang.srt.managers.load_snapshot.shm_path_for",),
    ),
    _sglang(
        "settings and websocket kept from clients",
        why="/server_info shows every setting, the key to manage the server among them, to programs that have only the "
        "key to sample; the websocket for transcriptions needs no key.",
        upstream="sglang/srt/entrypoints/http_server.py:863, sglang/srt/utils/auth.py:176",
        until="SGLang hides its keys there, and asks for one on websockets",
        test="tests/talk/test_commands.py::test_a_served_model_is_for_those_who_have_the_key",
        uses=("sglang.srt.entrypoints.http_server.server_info", "sglang.srt.entrypoints.http_server.get_server_info"),
    ),
    _sglang(
        "adapters in their slot from the start",
        why="SGLang puts adapters into the layers' A and B with the first request that names them, over what a weight "
        "sync has written there.",
        upstream="sglang/srt/lora/lora_manager.py:1016",
        until="SGLang loads pinned adapters when it starts",
        test="tests/e2e/test_adapters.py::test_a_run_samples_with_the_adapters_that_it_trains",
        uses=("sglang.srt.lora.lora_manager.LoRAManager.init_memory_pool",),
    ),
    _sglang(
        "offsets that are not pinned",
        why="Layers with adapters keep their offsets in memory that CUDA pins, on a CPU too.",
        upstream="sglang/srt/lora/layers.py:475",
        until="SGLang pins host memory only on GPUs",
        test="tests/weight_sync/test_engine_parity.py::test_log_probs_agree_after_every_publish_and_only_then",
        uses=("sglang.srt.lora.layers.ColumnParallelLinearWithLoRA.__init__",),
        when=on_cpu,
    ),
    _sglang(
        "no bias in the heads of Qwen's reward models",
        why="Their heads have a bias that no checkpoint fills: scores are off by a constant, another in each server.",
        upstream="sglang/srt/models/qwen3_classification.py, qwen2_classification.py",
        until="SGLang makes them without a bias, as transformers does",
        test="tests/inference/test_served.py::test_every_server_scores_as_transformers_does",
        uses=(
            "sglang.srt.models.qwen2_classification.Qwen2ForSequenceClassification.load_weights",
            "sglang.srt.models.qwen3_classification.Qwen3ForSequenceClassification.load_weights",
        ),
    ),
)
