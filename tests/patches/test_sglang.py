"""Stand-ins for modules that SGLang lacks on a CPU: used only if missing, and numerically correct."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_collab.patches import sgl_kernel, sglang

MASK = 0xFFFFFFFF
REPOSITORY = Path(sglang.__file__).parents[2]


def murmur3(blocks: list[int]) -> int:
    """MurmurHash3_x86_32 of whole 32-bit blocks with seed 0, from its definition."""

    def rotate(value: int, bits: int) -> int:
        return ((value << bits) | (value >> (32 - bits))) & MASK

    state = 0
    for block in blocks:
        block = rotate(block * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK
        state = (rotate(state ^ block, 13) * 5 + 0xE6546B64) & MASK
    state ^= 4 * len(blocks)
    state = (state ^ state >> 16) * 0x85EBCA6B & MASK
    state = (state ^ state >> 13) * 0xC2B2AE35 & MASK
    return state ^ state >> 16


def test_the_hash_is_murmur3_of_seed_position_and_column() -> None:
    seeds = [0, 1, 2**32 - 1, 2**63 + 12345, 2**64 - 1]
    positions = [0, 1, 77, 2**20, 4095]
    columns = [0, 1, 511, 151935]
    hashes = torch.ops.sgl_kernel.murmur_hash32_cpu(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    assert hashes.dtype == torch.uint32
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        expected = [murmur3([seed & MASK, seed >> 32, position, column]) for column in columns]
        assert hashes[row].tolist() == expected


def test_requests_get_their_cache_slots() -> None:
    table = torch.zeros(3, 6, dtype=torch.int32)
    sgl_kernel.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 4]), torch.tensor([7, 8, 1, 2, 3, 4])
    )
    assert table.tolist() == [[1, 2, 3, 4, 0, 0], [0] * 6, [0, 7, 8, 0, 0, 0]]
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.moe_align"):
        sgl_kernel.moe_align()


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("sizes", [(128, 256), (64, 512), (256, 128), (1024, 300)])
def test_a_row_of_a_product_does_not_depend_on_the_others(sizes: tuple[int, int]) -> None:
    inner, outer = sizes
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, inner, generator=generator), torch.randn(outer, inner, generator=generator)
    full = sglang.linear(x, weight)
    for rows in (1, 2, 3, 4, 5, 7, 16, 33):
        assert torch.equal(sglang.linear(x[:rows], weight), full[:rows])
        assert torch.equal(sglang.matmul(x[:rows], weight.T), full[:rows])


def run_python(code: str, *paths: Path) -> str:
    code = f"import sys; sys.path[:0] = {[str(path) for path in paths]}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("on_cpu", "modules"), [("0", ["triton", "sgl_kernel"]), ("1", ["sgl_kernel"])])
def test_a_real_module_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: str, modules: list[str]) -> None:
    """On GPUs; on a CPU the stand-in wins, since the real module has no kernels for it."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", on_cpu)
    for name in modules:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("REAL = True\n")
    code = (
        "from megatron_collab import patches\npatches.apply('sglang')\n"
        f"import {', '.join(modules)}\nprint('REAL' in vars({modules[-1]}), 'REAL' in vars({modules[0]}))"
    )
    assert run_python(code, tmp_path, REPOSITORY).split() == [str(on_cpu == "0")] * 2


@pytest.mark.slow
@pytest.mark.processes
def test_kernels_can_be_defined_without_triton() -> None:
    """As with a CPU build of torch, which lacks triton."""
    code = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find_spec(name, package)
from megatron_collab import patches
patches.apply("sglang")
import triton, triton.language

@triton.jit
def kernel(rows, block: triton.language.constexpr):
    pass

print(triton.cdiv(7, 4), triton.next_power_of_2(5))
"""
    assert run_python(code, REPOSITORY).split() == ["2", "8"]


SERVER = """
import multiprocessing, sys
from megatron_collab import patches
from megatron_collab.patches.sglang import hide_unused_packages
hide_unused_packages()
patches.apply("sglang")
multiprocessing.set_start_method("spawn", force=True)
print(multiprocessing.get_start_method())
from sglang.srt.debug_utils import dumper
from sglang.srt.entrypoints import engine
print(dumper._MegatronPlugin._available, sys.modules["sklearn"])
print([name for name in ("scipy.stats", "torch._inductor.compile_fx") if name in sys.modules])
import torch
from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode
enable_batch_invariant_mode()
print(torch.matmul.__module__, torch.nn.functional.linear.__module__, torch.get_device_module().__name__)
"""


@pytest.fixture(scope="module")
def server_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What SERVER prints, which imports as a server does, where an import of Megatron raises an OSError."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "__init__.py").write_text("raise OSError('libcuda.so.1')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        return run_python(SERVER, folder, REPOSITORY).splitlines()[-4:]


@pytest.mark.slow
@pytest.mark.processes
def test_servers_import_only_what_they_use(server_on_cpu: list[str]) -> None:
    """An OSError from Megatron's import, for example without a driver, would end every process of a server."""
    assert server_on_cpu[1:3] == ["False None", "[]"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_server_on_cpu_forks_and_computes_row_by_row(server_on_cpu: list[str]) -> None:
    module = sglang.__name__
    assert server_on_cpu[0] == "fork" and server_on_cpu[3].split() == [module, module, "torch.cpu"]
