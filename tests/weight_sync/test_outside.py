"""The transport of docs/howto/transport.md, in a file outside of the package; the rest is as in test_receiver.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_collab.config import Config
from megatron_collab.launch import server_specs
from megatron_collab.launch.servers import check_servers
from megatron_collab.launch.trainer_specs import sync_spec, trainer_layout
from megatron_collab.planning.memory import sync_buckets
from megatron_collab.settings import ConfigError
from megatron_collab.weight_sync import in_place
from megatron_collab.weight_sync.plan import plan_sync
from megatron_collab.weight_sync.sync import WeightSync
from megatron_collab.weight_sync.transports.registry import places_of
from tests.helpers import policy_servers, refused
from tests.weight_sync import test_receiver as fakes
from tests.weight_sync.test_receiver import one_rank  # noqa: F401  # a fixture

pytestmark = pytest.mark.processes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "transport.md"


@pytest.fixture
def transport(tmp_path: Path) -> str:
    """The name of the page's transport, as a setting."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "files.py").write_text(code)
    return f"{tmp_path}/files.py:FileTransport"


def configure(transport: str, folder: Path, quantized: bool = False) -> Config:
    config = fakes.configure(transport, quantized)
    config.publish.transport_options = {"folder": str(folder)}
    return config


@pytest.mark.parametrize(("quantized", "moves"), [(False, False), (True, False), (False, True)])
def test_its_servers_have_all_weights(
    quantized: bool, moves: bool, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a new server; verified by checksum. Nothing is left at the end. `moves`: each bucket in new memory."""
    if moves:
        code = (tmp_path / "files.py").read_text()
        (tmp_path / "files.py").write_text(code.replace("yield self.bucket", "yield self.bucket.clone()"))
    folder = tmp_path / "weights"
    config, shards = configure(transport, folder, quantized), fakes.make_shards()
    monkeypatch.setattr(in_place, "named_shards", lambda chunks: shards.items())
    fleet, layout = fakes.make_fleet(config), policy_servers(config).layout
    with WeightSync(sync_spec(config), policy_servers(config), [], fakes.SHAPE, fleet, fakes.BUCKET) as sender:  # type: ignore[arg-type]
        for version in range(3):
            with torch.no_grad():
                for shard in shards.values():
                    shard.mul_(-1.5)
            sender.publish(version)
            assert sender.version == version and not fleet.reasons
            for server in fleet.servers:
                fakes.assert_holds(server, layout, shards)
            assert sender._way._clearing is not None
            sender._way._clearing.result()
            (publish,) = folder.glob("*/*")  # those before it are removed
            assert publish.name == str(version + 1)
            if version == 1:
                fleet.servers[0] = fakes.Served(0, layout, fakes.SHAPE)
                fleet.servers[0].generation = 1
    assert not list(folder.iterdir())


def test_a_flipped_bit_is_found(transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above would notice a wrong byte."""
    config, shards = configure(transport, tmp_path / "weights"), fakes.make_shards()
    monkeypatch.setattr(in_place, "named_shards", lambda chunks: shards.items())
    fleet = fakes.make_fleet(config)
    take, flipped = fakes.Receiver._plan, list[int]()

    def flip(receiver: fakes.Receiver, parameters: object, rows: object, bucket: torch.Tensor) -> object:
        if not flipped and receiver._server == 1:
            flipped.append(1)
            bucket[40] ^= 16
        return take(receiver, parameters, rows, bucket)  # type: ignore[arg-type]

    monkeypatch.setattr(fakes.Receiver, "_plan", flip)
    with WeightSync(sync_spec(config), policy_servers(config), [], fakes.SHAPE, fleet, fakes.BUCKET) as sender:  # type: ignore[arg-type]
        sender.publish(1)
    assert list(fleet.reasons) == [1] and "its weights differ" in fleet.reasons[1]


def test_plans_ask_its_class(transport: str, tmp_path: Path) -> None:
    """Every rank reaches every server, and no buffer stays on a GPU."""
    config = configure(transport, tmp_path)
    config.launch.nodes = config.rollout.server.replicas = 2
    spec = policy_servers(config)
    assert places_of(sync_spec(config), spec.placement, on_gpus=True).count == 1
    plan = plan_sync(fakes.SHAPE, trainer_layout(config), spec.layout, 2, fakes.BUCKET)
    assert sync_buckets(config, spec.placement, plan, 0) == 0
    config.publish.transport, config.publish.transport_options = "network", {}
    assert sync_buckets(config, spec.placement, plan, 0) > 0


NO_TRANSPORTS = """
from megatron_collab.weight_sync.transports.base import Transport


class Half(Transport):
    def __init__(self, setup):
        pass

    def addresses(self, store, peers):
        return {}


class Deaf(Half):
    def bytes_held(self):
        return 0

    def carry(self, *_):
        pass


class Other:
    pass
"""


def test_what_is_no_transport_is_refused_before_a_run(transport: str, tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text(NO_TRANSPORTS)
    message = refused(f"publish.transport={tmp_path}/none.py:Other")
    assert message.startswith("publish.transport=") and "must be a subclass of" in message
    message = refused(f"publish.transport={tmp_path}/none.py:Half")
    assert message.endswith("the class has no bytes_held, carry; define what is missing")
    assert refused(f"publish.transport={tmp_path}/none.py:Deaf").endswith("the class has no receiver; define it")
    message = refused(f"publish.transport={transport}", "publish.transport_options.folde=/x")
    assert message.startswith("publish.transport_options.folde: no such setting; the nearest is folder")
    assert refused("publish.transport_options.folder=/x").startswith("publish.transport_options: ")


def test_its_attributes_are_checked(tmp_path: Path, transport: str) -> None:
    code = (tmp_path / "files.py").read_text()
    (tmp_path / "near.py").write_text(code.replace("    Options =", "    needs_same_node = True\n    Options ="))
    config = fakes.configure(f"{tmp_path}/near.py:FileTransport", servers=2)
    config.launch.nodes, config.rollout.server.colocated = 2, False
    with pytest.raises(ConfigError, match=r"with launch\.nodes=2 needs rollout\.server\.colocated=true"):
        check_servers(config, server_specs.training(config))
    config.publish.transport = transport
    check_servers(config, server_specs.training(config))
