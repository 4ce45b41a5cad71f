"""Interface of transports: how weights get from the trainer's ranks to the servers.

Settings are checked without torch and servers run without the trainer's libraries, so this module imports neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_collab.weight_sync.encoding import Sums
    from megatron_collab.weight_sync.node_routing import Item, Places
    from megatron_collab.weight_sync.plan import Slice, SyncPlan
    from megatron_collab.weight_sync.sender import Sender
    from megatron_collab.weight_sync.store_protocol import Address, Peer, SyncStore


@dataclass(frozen=True)
class NoTransportOptions:
    """A transport without options."""


class Allocated(NamedTuple):
    """Bytes of each buffer that a transport keeps for a trainer rank during the whole run.

    `segments` are on the devices of servers' ranks, which are the trainer's if the servers are colocated; `buffers` are
    on the rank's device.
    """

    segments: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()


@dataclass(frozen=True)
class TransportSetup:
    """What a transport gets on a trainer rank.

    `options`: publish.transport_options, as an instance of the class's Options. `plan`: rounds of buckets. `places`:
    which ranks and servers belong together (node_routing.py). `writer` writes the slices that this rank provides to
    its place: writer.parts[k][t] is the span of bytes in bucket k of server rank t. `make_sender` makes another Sender,
    from its items by round and the places that receive a slice for a server rank. `device`: of this rank's weights;
    `server_devices[t]`: of rank t of the place's first server. `address` and `prefix`: of the run's store
    (store_protocol.connect), whose operations fail after `limit` seconds. A server without progress for `idle_timeout`
    seconds is abandoned; a trainer rank may take `timeout` seconds to answer another.
    """

    options: Any
    plan: SyncPlan
    places: Places
    writer: Sender
    make_sender: Callable[[Sequence[Sequence[Item]], Callable[[int, Slice], Iterable[int]]], Sender]
    device: torch.device
    server_devices: Sequence[torch.device]
    address: Address
    prefix: str
    limit: float
    idle_timeout: float
    timeout: float


@dataclass(frozen=True)
class ReceiverSetup:
    """What a transport's receiver gets in a server's process.

    `store`: keys of the weight sync in which the receiver is opened; `address`, `prefix`: of the run's store; an
    operation may take `timeout` seconds. `server`, `rank`: of this process. Trainer rank r provides the bytes
    parts[k][r] = [start, stop) of bucket k. `device`: of the model's parameters.
    """

    store: SyncStore
    address: Address
    prefix: str
    timeout: float
    server: int
    rank: int
    parts: Sequence[Mapping[int, tuple[int, int]]]
    device: torch.device


class TransportReceiver(ABC):
    """A server rank's side of a transport.

    It is opened with a ReceiverSetup and, as keyword arguments, what Transport.addresses has for the rank. It stays
    open until a sync fails or the trainer sends new addresses.
    """

    @abstractmethod
    def __init__(self, setup: ReceiverSetup, **address: Any) -> None:
        """Raises RuntimeError if the trainer cannot be reached."""

    @abstractmethod
    def buckets(self, store: SyncStore, first: int) -> Iterator[Tensor]:
        """Yield buckets `first` and later of a publish (uint8), each once complete and valid until the next one.

        Use the same memory for a bucket in every publish: the copies out of it are planned once, and keep it alive.
        Raises RuntimeError if a bucket does not arrive in time.
        """


class Transport(ABC):
    """A way of the weights into the servers' parameters; every trainer rank has an instance.

    Derived classes are registered in settings/schema.py (TRANSPORTS), or publish.transport names them as
    package.module:Class. The class attributes and `bytes_held` are read before a run starts.
    """

    Options: ClassVar[type] = NoTransportOptions  # a frozen dataclass of publish.transport_options
    receiver: ClassVar[type[TransportReceiver]]
    # A server reads only what trainer ranks of its node wrote; slices that these lack must be sent to them first.
    needs_same_node: ClassVar[bool] = False
    # A server's process opens memory that a trainer rank allocated on its GPU.
    opens_gpu_memory: ClassVar[bool] = False
    # A server's rank and a trainer rank cannot be on the same GPU.
    needs_separate_gpus: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, setup: TransportSetup) -> None:
        """Collective."""

    @classmethod
    @abstractmethod
    def bytes_held(cls, plan: SyncPlan, places: Places, rank: int) -> Allocated:
        """What an instance on trainer rank `rank` keeps allocated; a pure function of numbers."""

    @abstractmethod
    def addresses(self, store: SyncStore, peers: Sequence[Peer]) -> dict[int, list[dict[str, Any]]]:
        """By server, for each of its ranks the arguments of `receiver`, as JSON can carry them; collective.

        `peers`: the servers that have received no weights yet.
        """

    @abstractmethod
    def carry(self, store: SyncStore, peers: Sequence[Peer], sums: Sums | None, first: int) -> None:
        """Bring this rank's part of buckets `first` and later to `peers`, while these receive them.

        A server that fails is abandoned (store.abandon), and the others continue. For `sums` see Sender.write.
        """

    def clear(self, number: int) -> None:
        """Remove what is left of publish `number`, which no process reads any more; runs while servers sample."""
        return None

    def drop(self, server: int) -> None:
        """Forget a server that failed; it comes back as a new one."""
        return None

    def close(self) -> None:
        """Free everything; called once, on every rank."""
        return None


class FolderTransport(Transport):
    """Saves the model as a folder that servers load themselves, instead of filling their parameters.

    Such a folder has neither FP8 weights nor adapters beside the model.
    """

    def __init__(self, options: Any, folder: Path, save_hf: Callable[[Path], None]) -> None:
        """`folder`: in run.dir, for this transport only; `save_hf` (collective): saves a Hugging Face folder there."""
        self.options, self.folder, self.save_hf = options, folder, save_hf

    @classmethod
    def bytes_held(cls, plan: SyncPlan, places: Places, rank: int) -> Allocated:
        return Allocated()

    @abstractmethod
    def save(self) -> Path:
        """Save the current weights as a folder that SGLang can load; collective. Returns the folder."""

    def addresses(self, store: SyncStore, peers: Sequence[Peer]) -> dict[int, list[dict[str, Any]]]:
        return {}

    def carry(self, store: SyncStore, peers: Sequence[Peer], sums: Sums | None, first: int) -> None:
        self.save()
