"""Values that SGLang servers and their clients are made from; launch/server_specs.py settles them before any start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_collab.models.hf_to_sglang import ServerLayout
from megatron_collab.models.lora import ServedAdapters

# By default SGLang allocates nearly all memory of a machine without GPUs for its cache and touches every page.
CPU_CACHE_TOKENS = 2**18


class Serves(Enum):
    """What a server returns; only POLICY servers receive weights from the trainer."""

    POLICY = 0
    TEXT = 1
    SCORES = 2


@dataclass(frozen=True)
class Placement:
    """Nodes and devices of a model's servers; every node has equally many of their ranks.

    `replicas` servers of `tp` ranks, each over `nnodes` of the `nodes` that have servers. `shared`: number of a node's
    devices that the servers and the trainer use in turn; 0: the servers have devices of their own, from `first` on.
    """

    replicas: int = 1
    tp: int = 1
    nnodes: int = 1
    nodes: int = 1
    shared: int = 0
    first: int = 0

    @property
    def colocated(self) -> bool:
        """Whether servers and trainer take turns on the same devices."""
        return self.shared > 0

    @property
    def per_node(self) -> int:
        """Servers of which a node runs all or some ranks."""
        return self.replicas * self.nnodes // self.nodes

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a server on each of its nodes."""
        return self.tp // self.nnodes

    @property
    def node_ranks(self) -> int:
        """Ranks of all servers on a node."""
        return self.per_node * self.ranks_per_node

    @property
    def end(self) -> int:
        """The first device of a node after those of the servers, or after those that they share with the trainer."""
        return self.shared or self.first + self.node_ranks

    @property
    def occupied(self) -> set[int]:
        """The devices of a node on which a server's rank runs."""
        local_servers, width = range(self.per_node), range(self.ranks_per_node)
        return {self.first_device(server) + local_rank for server in local_servers for local_rank in width}

    def first_device(self, server: int) -> int:
        """The device of server `server`'s first rank on each of its nodes; its other local ranks use the next devices.

        Colocated servers are distributed evenly over the trainer's devices.
        """
        place = server % self.per_node
        return place * (self.shared // self.per_node) if self.shared else self.first + place * self.ranks_per_node

    def nodes_of(self, server: int) -> range:
        """The nodes of server `server`, in the order of its ranks; `per_node` servers share them."""
        first = server // self.per_node * self.nnodes
        return range(first, first + self.nnodes)


@dataclass(frozen=True)
class ServerHost:
    """How server processes run on their machines; times in seconds.

    `device`: auto, cpu or cuda; `interface`: network interface to listen on, None: loopback; `port`: of the first
    server, the others follow, 0: free ones; `folder`: for logs. `start_timeout`: until a server must be healthy;
    `request_timeout`: for a request about its state.
    """

    device: str
    interface: str | None
    folder: Path
    start_timeout: float
    request_timeout: float
    port: int = 0


@dataclass(frozen=True)
class ServerSpec:
    """The SGLang servers of one model.

    `setting`: the group of settings that they come from, for messages; `model`: Hugging Face folder or name of the Hub;
    `dtype`: of its parameters; `name`: among the models besides the policy, empty for the policy. `fp8`: linear layers
    in FP8, which the trainer quantizes. `max_total_tokens`: of the KV cache; `memory_share`: of a GPU for weights and
    KV cache; both None: SGLang decides. `context_length`: tokens of the longest conversation. `args`: further SGLang
    arguments by name.
    """

    setting: str
    model: str
    dtype: str
    placement: Placement
    host: ServerHost
    max_running_requests: int
    context_length: int
    max_total_tokens: int | None = None
    memory_share: float | None = None
    ep: int = 1
    seed: int = 0
    serves: Serves = Serves.POLICY
    name: str = ""
    fp8: bool = False
    adapters: ServedAdapters | None = None
    returns_experts: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> ServerLayout:
        """The layout of each server's weights."""
        return ServerLayout(self.placement.tp, self.ep, self.fp8, self.adapters)

    @property
    def bounded(self) -> bool:
        """Whether the settings say how much memory a server takes."""
        return (self.max_total_tokens or self.memory_share) is not None

    @property
    def cache_tokens(self) -> int:
        """Tokens of the KV cache; an upper bound if SGLang decides."""
        return self.max_total_tokens or self.max_running_requests * self.context_length

    def log(self, index: int) -> Path:
        """The log of server number `index`."""
        return self.host.folder / "-".join(filter(None, ("sglang", self.name, f"{index}.log")))


@dataclass(frozen=True)
class ClientSpec:
    """How turns are requested from the policy's servers.

    `timeout`: seconds of a request; `adapter`: name of the adapters to sample with, None: without. `tool_parser`:
    SGLang's parser of tool calls; `calls_tools`: whether the policy has tools. The markers of calls then stay in the
    text, where parsers look for them; they may be special tokens, as Mistral's [TOOL_CALLS].
    """

    timeout: float
    tool_parser: str
    calls_tools: bool = False
    adapter: str | None = None


@dataclass(frozen=True)
class ServingSpec:
    """What a run serves: the policy, and `by_name` users, judges and reward models."""

    policy: ServerSpec
    client: ClientSpec
    by_name: Mapping[str, ServerSpec]

    @property
    def models(self) -> list[ServerSpec]:
        """The policy, then those that are served by name."""
        return [self.policy, *self.by_name.values()]
