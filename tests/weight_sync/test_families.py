"""Servers of every model family receive weights, release their memory, resume it and sample with the new weights.

On GPUs in 16 bits, also with adapters beside the base, and in FP8, through CUDA IPC into memory that was released; on a
CPU in float32, by the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_collab.config import Config
from megatron_collab.inference.server import SGLangServer
from megatron_collab.launch.trainer_specs import sync_spec
from megatron_collab.models import hf_config
from megatron_collab.planning import memory
from megatron_collab.weight_sync.sync import WeightSync
from tests import gpus
from tests.helpers import configured, make_model, nats_apart, policy_servers
from tests.ranks import init_parallel, run_ranks
from tests.weight_sync.test_engine_parity import Case, Line

pytestmark = [pytest.mark.processes, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(2400)]

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
# Sides that are multiples of a block of FP8.
SIZES: dict[str, Any] = {"layers": 2, "hidden": 512, "ffn": 1024, "heads": 4, "kv_heads": 2, "head_dim": 128}
CASES = {
    "cpu": [("llama", "float32"), ("mistral", "float32"), ("qwen2", "float32")],  # others: test_engine_parity.py
    "cuda": [
        *((family, precision) for precision in ("bfloat16", "fp8") for family in FAMILIES),
        *((family, "adapters") for family in ("qwen2", "qwen3")),
    ],
}
PARAMETERS = [
    *(pytest.param("cpu", *case, id=" ".join(case)) for case in CASES["cpu"]),
    *(
        pytest.param(
            *("cuda", family, precision),
            marks=pytest.mark.gpu(1, gpus.HOPPER) if precision == "fp8" else pytest.mark.gpu,
            id=f"{family} {precision}",
        )
        for family, precision in CASES["cuda"]
    ),
]
# The part of `nats_apart` that rounding may explain; see tests/e2e/test_gpu.py.
BOUNDS = {"float32": 1e-6, "bfloat16": 0.02, "fp8": 0.25, "adapters": 0.02}
START = {"cpu": 400.0, "cuda": 1800.0}  # kernels are compiled at a first start
ROUNDS = 2
Measured = Callable[[str, str], dict[str, Any]]


def folder_of(root: Path, side: str, family: str) -> Path:
    return root / f"{side}-{family}"


def settings(root: Path, side: str, device_type: str, family: str, precision: str) -> Config:
    """Settings of the trainer, or of the server that it publishes to, which starts from another model."""
    names = {
        "launch.device": device_type,
        "launch.timeout": 240.0,
        "launch.nproc_per_node": 1,
        "model.path": str(folder_of(root, side, family)),
        "model.dtype": "float32" if precision == "float32" else "bfloat16",
        "rollout.server.fp8": precision == "fp8",
        "rollout.server.max_total_tokens": 32768,
        "publish.verify": 1,
        "train.steps": 100,
        "optim.lr": 1e-2,
        "algo.kl_coef": 0.0,
    }
    if precision == "adapters":  # the second publish is of them alone: the base must come back with the memory
        names |= {"model.lora.rank": 8, "model.lora.serve": "adapters"}
    return configured(Config(), names)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        experts = {"moe_intermediate_size": 256} if family == "qwen3_moe" else {}
        for seed, side in enumerate(["server", "trainer"]):
            make_model(folder_of(root, side, family), family=family, seed=seed, **SIZES, **experts)
    return root


@pytest.fixture(scope="module")
def measurements(root: Path) -> Measured:
    """Measurements by device and precision; the servers of all families start side by side, once."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def measured(device_type: str, precision: str) -> dict[str, Any]:
        if (device_type, precision) not in known:
            families = [family for family, other in CASES[device_type] if other == precision]
            known[device_type, precision] = publish(root, device_type, precision, families)
        return known[device_type, precision]

    return measured


def publish(root: Path, device_type: str, precision: str, families: list[str]) -> dict[str, Any]:
    with ExitStack() as stack:
        servers = {
            family: stack.enter_context(
                SGLangServer(
                    policy_servers(settings(root, "server", device_type, family, precision)),
                    root / f"{precision}-{family}.log",
                )
            )
            for family in families
        }
        for server in servers.values():
            server.wait_healthy(START[device_type])
        lines = {
            name: {"url": served.url, "api_key": served.api_key, "tp": served.tp} for name, served in servers.items()
        }
        return run_ranks(publish_to_each, 1, root, lines, device_type, precision, device_type=device_type)[0]


class Lender(Line):
    """A server of another process that releases memory and resumes it when it is published to."""

    release, resume = SGLangServer.release, SGLangServer.resume


class Alone:
    """A pool of one server, which must not fail."""

    def __init__(self, server: Lender) -> None:
        self.server = server

    def present(self) -> list[Any]:
        return [self.server]

    def lost(self, server: Any, reason: str) -> None:
        raise AssertionError(reason)


def publish_to_each(root: Path, lines: dict[str, Any], device_type: str, precision: str) -> dict[str, Any]:
    """Run on the trainer's only rank: by family and round, the memory released and how the samples compare."""
    by_family = {}
    for family, line in lines.items():
        config = settings(root, "trainer", device_type, family, precision)
        with init_parallel(config):
            case = Case(config, [line], 1 << 20)
            spec = policy_servers(config)
            server = Lender(**line, index=0, released=set(), spec=spec)
            rounds = []
            fleet, sync = Alone(server), sync_spec(config)
            with WeightSync(sync, spec, case.actor.chunks, case.actor.shape, fleet, 1 << 20) as publisher:  # type: ignore[arg-type]
                for version in range(ROUNDS):
                    before = free(device_type)
                    server.release()
                    gave = free(device_type) - before
                    server.resume("weights")  # as the pool does; the cache's memory comes once there are weights
                    publisher.publish(version)
                    assert not server.released
                    rounds.append({"gave": gave, "versions": case.measure()["versions"], **case.update()})
        by_family[family] = rounds
    return by_family


def free(device_type: str) -> int:
    """Free bytes as the driver reports them."""
    return torch.cuda.mem_get_info()[0] if device_type == "cuda" else 0


@pytest.mark.parametrize(("device_type", "family", "precision"), PARAMETERS)
def test_every_family_samples_with_the_published_weights(
    measurements: Measured,
    device_type: str,
    family: str,
    precision: str,
    root: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Before and after an update: KL between the server's log-probs and the trainer's, all weights summed."""
    rounds = measurements(device_type, precision)[family]
    apart = nats_apart(folder_of(root, "server", family), folder_of(root, "trainer", family))
    for version, measured in enumerate(rounds):
        assert measured["versions"] == [version]
        assert -1e-6 < measured["mismatch/k3"] < BOUNDS[precision] * apart
    record_property("KL over that of other weights", f"{max(entry['mismatch/k3'] for entry in rounds) / apart:.5f}")


@pytest.mark.gpu
def test_released_memory_is_free_on_the_gpu(
    measurements: Measured, root: Path, record_property: Callable[[str, object], None]
) -> None:
    """It releases at least its whole KV cache before each of two publishes."""
    for family in FAMILIES:
        shape = hf_config.read(folder_of(root, "server", family) / "config.json")
        least = memory.kv_cache(policy_servers(settings(root, "server", "cuda", family, "bfloat16")), shape)
        for measured in measurements("cuda", "bfloat16")[family]:
            record_property(f"{family}: MiB given back", measured["gave"] >> 20)
            assert measured["gave"] >= 0.9 * least
