"""From shards into servers' parameters over every transport, in one process: modules and threads play SGLang."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_collab.config import Config
from megatron_collab.inference.server import ServerError, SGLangServer
from megatron_collab.launch.trainer_specs import sync_spec
from megatron_collab.models import hf_to_megatron, hf_to_sglang, lora
from megatron_collab.models.hf_config import Experts, ModelShape, Rope
from megatron_collab.models.hf_to_sglang import ServerLayout
from megatron_collab.settings import LoraConfig
from megatron_collab.weight_sync import in_place, sync
from megatron_collab.weight_sync.fp8_blocks import fp8_scales
from megatron_collab.weight_sync.http_protocol import ServerCall
from megatron_collab.weight_sync.receiver import Receiver, loaded_parameters
from megatron_collab.weight_sync.sender import Sender
from megatron_collab.weight_sync.store_protocol import SyncStore, connect
from megatron_collab.weight_sync.sync import PublishError, WeightSync
from megatron_collab.weight_sync.transports.base import Transport
from megatron_collab.weight_sync.transports.p2p import NetworkTransport
from megatron_collab.weight_sync.transports.registry import transport_class
from megatron_collab.weight_sync.transports.shared_memory import SharedMemoryTransport
from tests.helpers import free_port, policy_servers

NORM = "model.norm.weight"
SHAPE = ModelShape(
    family="qwen3_moe",
    layers=2,
    hidden=256,
    ffn=256,
    heads=4,
    kv_heads=2,
    head_dim=128,
    vocab=70,
    tied=False,
    qkv_bias=False,
    qk_norm=True,
    norm_eps=1e-6,
    rope=Rope(1e4),
    max_positions=64,
    experts=Experts(2, 1, 128, True, (0, 1)),
)
LLAMA = replace(SHAPE, family="llama", qk_norm=False, experts=None)
BUCKET = 1 << 18
ON = ["resume kv_cache", "/continue_generation"]  # waiting requests need the cache first


class Served:
    """A server of two ranks: their parameters, and the receivers that SGLang would keep."""

    ask = SGLangServer.ask  # at `url`, of a call that is no ThreadCall

    def __init__(self, index: int, layout: ServerLayout, shape: ModelShape) -> None:
        self.url, self.api_key, self.tp, self.index, self.generation = f"http://server{index}", "key", 2, index, 0
        self.models = [torch.nn.Module() for _ in range(self.tp)]
        self.receivers: dict[int, Receiver] = {}
        self.calls: list[str] = []
        for rank, model in enumerate(self.models):
            for parameter in hf_to_sglang.table(shape, layout, rank):
                dtype = torch.float8_e4m3fn if parameter.quantized else torch.bfloat16
                dtype = dtype if parameter.constant is None else torch.float32
                self.hold(model, parameter.name, torch.zeros(parameter.shape, dtype=dtype))
                if parameter.quantized:
                    self.hold(model, f"{parameter.name}_scale_inv", torch.zeros(fp8_scales(parameter.shape)))
            for parameter in hf_to_sglang.adapters(shape, layout, rank):  # no parameters in SGLang, and in two slots
                layer, _, kind = parameter.name.rpartition(".")
                setattr(model.get_submodule(layer), kind, torch.zeros(2, *parameter.shape, dtype=torch.bfloat16))

    def resume(self, tag: str) -> None:
        self.calls.append(f"resume {tag}")

    @torch.no_grad()
    def forget(self) -> None:
        """What releasing memory does to the parameters."""
        for model in self.models:
            for parameter in model.parameters():
                parameter.fill_(torch.nan)

    @staticmethod
    def hold(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
        *path, last = name.split(".")
        for part in path:
            if not hasattr(model, part):
                model.add_module(part, torch.nn.Module())
            model = getattr(model, part)
        model.register_parameter(last, torch.nn.Parameter(value, requires_grad=False))

    @torch.no_grad()
    def follow(self, rank: int, order: str) -> None:
        parsed = json.loads(order)
        if "attach" in parsed:
            self.receivers[rank] = Receiver(**parsed["attach"])
        with suppress(ValueError, RuntimeError):  # the store knows
            self.receivers[rank].take(self.models[rank], **parsed["take"])


class ThreadCall(ServerCall):
    """A connection to a Served."""

    server: Served  # type: ignore[assignment]

    def _post(self, path: str, **body: Any) -> None:
        self.server.calls.append(path)

    def receive(self, orders: Sequence[str], version: int) -> None:
        self.server.calls.append(f"receive {version}")
        with ThreadPoolExecutor(self.server.tp) as ranks:
            list(ranks.map(self.server.follow, range(self.server.tp), orders))


class Fleet:
    def __init__(self, servers: Sequence[Served]) -> None:
        self.servers, self.reasons = list(servers), dict[int, str]()

    def present(self) -> list[Served]:
        return [server for server in self.servers if server.index not in self.reasons]

    def lost(self, server: Served, reason: str) -> None:
        self.reasons[server.index] = reason


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(sync, "ServerCall", ThreadCall)
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.nn.Parameter]:
    parameters = make_shards()
    monkeypatch.setattr(in_place, "named_shards", lambda chunks: parameters.items())
    return parameters


def make_shards(shape: ModelShape = SHAPE) -> dict[str, torch.nn.Parameter]:
    """Random weights of the trainer."""
    generator = torch.Generator().manual_seed(0)
    return {
        entry.megatron: torch.nn.Parameter(
            torch.randn(hf_to_megatron.shard_shape(entry, 1), generator=generator).to(torch.bfloat16)
        )
        for entry in hf_to_megatron.table(shape)
    }


def configure(transport: str, quantized: bool = False, servers: int = 2) -> Config:
    config = Config()
    config.launch.device, config.launch.timeout, config.publish.transport = "cpu", 240.0, transport
    config.rollout.server.tp, config.rollout.server.ep, config.rollout.server.fp8 = 2, 2, quantized
    config.rollout.server.replicas, config.publish.verify = servers, 1
    return config


def make_fleet(config: Config, shape: ModelShape = SHAPE) -> Fleet:
    layout = policy_servers(config).layout
    return Fleet([Served(index, layout, shape) for index in range(config.rollout.server.replicas)])


def hf_tensors(shards: dict[str, torch.nn.Parameter], shape: ModelShape) -> dict[str, torch.Tensor]:
    tensors = {
        name: torch.empty(sides, dtype=torch.bfloat16) for name, sides in hf_to_megatron.hf_shapes(shape).items()
    }
    for entry in hf_to_megatron.table(shape):
        for piece in hf_to_megatron.pieces(entry, shape, 1, 0):
            tensors[piece.hf][piece.hf_index] = shards[entry.megatron].detach()[piece.shard_index]
    return tensors


def assert_holds(
    server: Served, layout: ServerLayout, shards: dict[str, torch.nn.Parameter], shape: ModelShape = SHAPE
) -> None:
    """Every parameter equals the trainer's; in FP8, within the rounding (see quantize)."""
    tensors = hf_tensors(shards, shape)
    for rank, model in enumerate(server.models):
        loaded = dict(model.named_parameters())
        for parameter in hf_to_sglang.table(shape, layout, rank):
            if parameter.constant is not None:
                assert loaded[parameter.name] == parameter.constant, parameter.name
            for part in parameter.parts:
                expected = tensors[part.hf][part.hf_index].float()
                actual = loaded[parameter.name].float()
                if parameter.quantized:
                    scales = loaded[f"{parameter.name}_scale_inv"]
                    spread = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)
                    spread = spread[..., : actual.shape[-2], : actual.shape[-1]]
                    actual, spread = (actual * spread)[part.shard_index], spread[part.shard_index]
                    bound = torch.maximum(expected.abs() * 2**-4, spread.view(expected.shape) * 2**-10)
                    assert ((actual.view(expected.shape) - expected).abs() <= bound * 1.001).all(), parameter.name
                else:
                    assert torch.equal(actual[part.shard_index].view(expected.shape), expected), parameter.name


@pytest.mark.seconds
@pytest.mark.parametrize("transport", ["memory", "network"])
@pytest.mark.parametrize(("shape", "quantized"), [(SHAPE, False), (SHAPE, True), (LLAMA, True)])
def test_all_weights_arrive_every_time(
    transport: str, shape: ModelShape, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, shards = configure(transport, quantized), make_shards(shape)
    monkeypatch.setattr(in_place, "named_shards", lambda chunks: shards.items())
    fleet, layout = make_fleet(config, shape), policy_servers(config).layout
    store = connect(("127.0.0.1", int(os.environ["MASTER_PORT"])), "", 10.0)
    keys = []
    with WeightSync(sync_spec(config), policy_servers(config), [], shape, fleet, BUCKET) as sender:
        carrier: Any = sender._way.transport
        stores = [store, carrier._store] if transport == "memory" else [store]
        for version in range(4):
            for server in fleet.servers:
                server.forget()
            with torch.no_grad():
                for shard in shards.values():
                    shard.mul_(-1.5)
            sender.publish(version)
            assert sender.version == version and not fleet.reasons
            for server in fleet.servers:
                assert_holds(server, layout, shards, shape)
                scales = [value for name, value in server.models[1].named_parameters() if name.endswith("v_scale")]
                assert scales == [1.0] * (shape.layers if shape is LLAMA else 0)
            assert sender._way._clearing is not None
            sender._way._clearing.result()  # while servers sample
            keys.append([client.num_keys() for client in stores])
            if version == 2:  # a new process, which knows nothing
                fleet.servers[0] = Served(0, layout, shape)
                fleet.servers[0].generation = 1
        assert keys[2] == keys[1]  # the stores are wiped
    calls = ["/pause_generation", "/begin_weight_update", "receive 3", "/end_weight_update", *ON]
    assert [server.calls[-6:] for server in fleet.servers] == [calls, calls]


ADAPTERS = LoraConfig(rank=4, targets=["q_proj", "v_proj", "o_proj", "up_proj"], serve="adapters")


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, torch.nn.Parameter], dict[str, torch.nn.Parameter]]:
    """A random base with random A and B beside it."""
    shards, generator = make_shards(LLAMA), torch.Generator().manual_seed(1)
    factors = {
        factor.key: torch.nn.Parameter(torch.randn(factor.shape, generator=generator).to(torch.bfloat16))
        for factor in lora.factors(LLAMA, ADAPTERS)
    }
    monkeypatch.setattr(in_place, "named_shards", lambda chunks: shards.items())
    monkeypatch.setattr(in_place, "named_factors", lambda chunks: factors.items())
    return shards, factors


@pytest.mark.seconds
@pytest.mark.parametrize("transport", ["memory", "network"])
def test_a_base_is_sent_to_new_servers_and_adapters_every_time(
    transport: str, beside: tuple[dict[str, torch.nn.Parameter], dict[str, torch.nn.Parameter]]
) -> None:
    """A server that is started again is a new one."""
    config, (shards, factors) = configure(transport), beside
    config.model.lora = ADAPTERS
    fleet, layout = make_fleet(config, LLAMA), policy_servers(config).layout
    with WeightSync(sync_spec(config), policy_servers(config), [], LLAMA, fleet, BUCKET) as sender:
        base = {name: shard.detach().clone() for name, shard in shards.items()}
        for version in range(4):
            if version == 2:
                fleet.servers[0] = Served(0, layout, LLAMA)
                fleet.servers[0].generation = 1
                base = {name: shard.detach().clone() for name, shard in shards.items()}
            sender.publish(version)
            assert not fleet.reasons
            for server in fleet.servers:
                assert_holds(server, layout, base, LLAMA)
                for rank, model in enumerate(server.models):
                    loaded = loaded_parameters(model)
                    for parameter in hf_to_sglang.adapters(LLAMA, layout, rank):
                        expected = torch.zeros(parameter.shape, dtype=torch.bfloat16)
                        for part in parameter.parts:
                            expected[part.shard_index] = factors[part.hf].detach()[part.hf_index]
                        assert torch.equal(loaded[parameter.name], expected), parameter.name
            with torch.no_grad():  # what a run freezes, so that it is seen whether it was sent
                for parameter in (*shards.values(), *factors.values()):
                    parameter.mul_(-1.5)


def test_the_folder_is_saved_before_servers_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure("disk")
    config.run.dir = str(tmp_path)
    fleet = make_fleet(config)

    def save(chunks: Any, folder: Path, *arguments: Any) -> None:
        folder.mkdir()
        for server in fleet.servers:
            server.calls.append("saved")

    monkeypatch.setattr(sync, "save_hf", save)
    with WeightSync(sync_spec(config), policy_servers(config), [], SHAPE, fleet) as sender:
        sender.publish(1)
    calls = ["saved", "/pause_generation", "/update_weights_from_disk", *ON]
    assert [server.calls for server in fleet.servers] == [calls, calls] and not list(tmp_path.iterdir())


def test_a_server_without_memory_for_its_cache_does_not_go_on(
    shards: dict[str, torch.nn.Parameter], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resume(tag: str) -> None:
        raise ServerError("no memory")

    config = configure("memory")
    fleet = make_fleet(config)
    monkeypatch.setattr(fleet.servers[1], "resume", resume)
    with WeightSync(sync_spec(config), policy_servers(config), [], SHAPE, fleet, BUCKET) as sender:
        sender.publish(1)
    assert fleet.reasons == {1: "no memory"} and fleet.servers[1].calls[-1] == "/end_weight_update"
    assert fleet.servers[0].calls[-2:] == ON


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("transport", "name", "value", "message"),
    [
        ("memory", NORM, torch.zeros(3, dtype=torch.bfloat16), f"{NORM} is bfloat16 (3,)"),
        ("network", NORM, torch.zeros(3, dtype=torch.bfloat16), f"{NORM} is bfloat16 (3,)"),
        ("memory", NORM, torch.zeros(256), f"{NORM} is float32 (256,); the trainer's plan has bfloat16 (256,)"),
        ("memory", "model.extra", torch.zeros(1), "model.extra is float32 (1,); the trainer's plan has no such"),
    ],
)
def test_a_server_of_other_parameters_is_left_out_by_name(
    transport: str, name: str, value: torch.Tensor, message: str, shards: dict[str, torch.nn.Parameter]
) -> None:
    config = configure(transport)
    fleet = make_fleet(config)
    Served.hold(fleet.servers[1].models[1], name, value)
    with WeightSync(sync_spec(config), policy_servers(config), [], SHAPE, fleet, BUCKET) as sender:
        sender.publish(1)
        assert message in fleet.reasons[1] and sender.version == 1
        assert_holds(fleet.servers[0], policy_servers(config).layout, shards)
        assert fleet.servers[1].calls[-1] == "receive 1"  # it stays paused
        sender.publish(2)
        assert fleet.servers[0].calls.count("/continue_generation") == 2


@pytest.mark.seconds
@pytest.mark.parametrize("transport", ["memory", "network"])
def test_a_server_that_aborts_does_not_block_others(
    transport: str, shards: dict[str, torch.nn.Parameter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never reports that it has read a bucket, and its answer is an error."""
    config = configure(transport)
    fleet = make_fleet(config)
    plan = Receiver._plan

    def break_off(self: Receiver, *arguments: Any) -> Any:
        if self._server == 1:
            raise RuntimeError("killed")
        return plan(self, *arguments)

    monkeypatch.setattr(Receiver, "_plan", break_off)
    with WeightSync(sync_spec(config), policy_servers(config), [], SHAPE, fleet, BUCKET) as sender:
        sender.publish(1)
        assert "killed" in fleet.reasons[1] and sender.version == 1
        assert_holds(fleet.servers[0], policy_servers(config).layout, shards)


def transport_of(config: Config) -> type[Transport]:
    return transport_class(config.publish, policy_servers(config).placement)


def test_memory_is_shared_on_one_node_and_by_colocated_servers() -> None:
    config = configure("auto")
    assert transport_of(config) is SharedMemoryTransport
    config.launch.nodes = 2
    assert transport_of(config) is SharedMemoryTransport
    config.rollout.server.colocated = False
    assert transport_of(config) is NetworkTransport
    config.launch.nodes = 1
    assert transport_of(config) is SharedMemoryTransport
    config.publish.transport = "network"
    assert transport_of(config) is NetworkTransport


@pytest.mark.seconds
def test_a_flipped_bit_is_found(shards: dict[str, torch.nn.Parameter], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the segment, after it was written and before it is read."""
    write = Sender.write

    def write_and_flip(self: Sender, number: int, parts: dict[int, torch.Tensor], sums: Any = None) -> None:
        write(self, number, parts, sums)
        if number == 1:
            parts[1][40] ^= 16

    config = configure("memory")
    config.publish.verify = 2
    fleet = make_fleet(config)
    monkeypatch.setattr(Sender, "write", write_and_flip)
    with WeightSync(sync_spec(config), policy_servers(config), [], SHAPE, fleet, BUCKET) as sender:
        sender.publish(1)  # not verified
        with pytest.raises(PublishError, match="rank 1: its weights differ"):
            sender.publish(2)
        assert sender.version == 1 and set(fleet.reasons) == {0, 1}
        with pytest.raises(PublishError, match="no server is available"):
            sender.publish(3)
    assert fleet.servers[0].calls.count("/continue_generation") == 1


@pytest.mark.seconds
@pytest.mark.usefixtures("beside")
def test_a_base_is_verified_whenever_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if `publish.verify` would skip that sync: it may be the only one with a base."""
    write = Sender.write

    def write_and_flip(self: Sender, number: int, parts: dict[int, torch.Tensor], sums: Any = None) -> None:
        write(self, number, parts, sums)
        if number == 0:
            parts[1][40] ^= 16

    config = configure("memory")
    config.model.lora, config.publish.verify = ADAPTERS, 10
    fleet = make_fleet(config, LLAMA)
    monkeypatch.setattr(Sender, "write", write_and_flip)
    with (
        WeightSync(sync_spec(config), policy_servers(config), [], LLAMA, fleet, BUCKET) as sender,
        pytest.raises(PublishError, match="rank 1: its weights differ"),
    ):
        sender.publish(1)


@pytest.mark.seconds
def test_a_publisher_that_goes_silent_is_given_up(shards: dict[str, torch.nn.Parameter]) -> None:
    config = configure("memory", servers=1)
    fleet = make_fleet(config)
    with WeightSync(sync_spec(config), policy_servers(config), [], SHAPE, fleet, BUCKET) as sender:
        sender.publish(1)
        receiver = fleet.servers[0].receivers[0]
        receiver._transport, receiver._timeout = None, 0.2  # connects again, to wait less
        with pytest.raises(RuntimeError):
            receiver.take(fleet.servers[0].models[0], publish=7, first=0, verify=False)
        assert "no answer" not in SyncStore(receiver._store, 7).answered(0, 0)["error"]
