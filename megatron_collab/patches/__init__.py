"""The register of all patches of libraries, and of their private interfaces that the package relies on.

An entry point calls `apply` with the libraries it is about to import; no import patches a library by itself. If a patch
needs an object of the library, it is a function of these modules that is called when the object is created; its entry
has neither `sets` nor `apply`. `megatron-collab doctor` lists the patches that are active on a machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

# Arguments of `apply` (the module that an entry point imports next): location of its entries.
_ENTRIES = {
    "transformers": f"{__name__}.transformers:PATCHES",
    "megatron": f"{__name__}.megatron:PATCHES",
    "sglang": f"{__name__}.sglang:PATCHES",
    "litellm": f"{__name__}.litellm:PATCHES",
    "ray": f"{__name__}.ray:PATCHES",
    "rehearsal": f"{__name__}.rehearsal:PATCHES",
    "mcp": f"{__name__}.mcp:PATCHES",
}
VERSIONS = {  # of the distributions, as in the lock files
    "torch": ("2.14.1",),
    "megatron-core": ("0.19.2",),
    "sglang": ("0.5.23",),
    "litellm": ("1.106.2",),
    "ray": ("2.60.0",),
    "mcp": ("2.3.0",),
    "transformers": ("5.19.0",),
    "transformer-engine": ("2.20.2",),
}
_applied: set[str] = set()


@dataclass(frozen=True)
class Patch:
    """One patch of the distribution `library`, or one of its private interfaces that the package uses.

    `upstream`: an issue or source line. `until`: the condition for removing it. `test`: a test that fails without it.
    `sets`: dotted names and their new values; `wraps`: dotted names and functions that make the new value from the old
    one; `apply`: any other action. `uses`: names that other code replaces or calls. `when`: whether this machine needs
    it.
    """

    library: str
    name: str
    why: str
    upstream: str
    until: str
    test: str
    sets: dict[str, Any] = field(default_factory=dict)
    wraps: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    uses: tuple[str, ...] = ()
    apply: Callable[[], None] | None = None
    when: Callable[[], bool] = lambda: True

    def values(self) -> dict[str, Any]:
        """The new values by dotted name."""
        return self.sets | {attribute: wrap(resolve_name(attribute)) for attribute, wrap in self.wraps.items()}

    def put_in_force(self) -> None:
        for attribute, value in self.values().items():
            owner, _, name = attribute.rpartition(".")
            setattr(resolve_name(owner), name, value)
        if self.apply:
            self.apply()


def apply(*libraries: str) -> None:
    """Apply the patches of `libraries` (megatron, sglang, litellm, ray) that this machine needs, once per process.

    Those of Transformers come with any library. Raises RuntimeError if a library has been imported already: some
    patches would then silently have no effect.
    """
    if "transformers" not in sys.modules:  # without them its import is only slower
        libraries = ("transformers", *libraries)
    for library in libraries:
        if library in _applied:
            continue
        if library in sys.modules:
            raise RuntimeError(f"patches.apply({library!r}) must be called before the first import of {library}")
        _applied.add(library)  # before the entries, which import the library: an import may call `apply` again
        for patch in resolve_name(_ENTRIES[library]):
            if patch.when():
                patch.put_in_force()


def register() -> list[Patch]:
    """All entries, even if this machine does not need them."""
    return [*(patch for place in _ENTRIES.values() for patch in resolve_name(place)), *_PRIVATE]


def table() -> str:
    """The patches that are active on this machine as text lines: library and version, name, condition for removal."""
    needed = [patch for patch in register() if patch.when()]
    rows = [(f"{patch.library} {'/'.join(VERSIONS[patch.library])}", patch.name, patch.until) for patch in needed]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{library:{widths[0]}}  {name:{widths[1]}}  until {until}" for library, name, until in rows)


DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"

# Private interfaces that the package calls or overrides: (user and reason, condition for removal, test).
_INTERFACES = {
    f"{DISTRIBUTED_OPTIMIZER}._get_main_param_and_optimizer_states": (
        "checkpoint/sharded_state.py has each rank write its own part; Megatron gathers it on one rank or all first",
        "Megatron-Core saves fully reshardable checkpoints without gathering them",
        "tests/checkpoint/test_checkpointer.py::test_resumed_is_undisturbed_bit_for_bit",
    ),
    f"{DISTRIBUTED_OPTIMIZER}._init_optimizer_states_with_dummy_values": (
        "checkpoint/sharded_state.py: Megatron asks an optimizer for its step before it loads, and AdamW has none yet",
        "DistributedOptimizer.state_dict works before the first step",
        "tests/checkpoint/test_checkpointer.py::test_resumed_is_undisturbed_bit_for_bit",
    ),
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": (
        "checkpoint/checkpointer.py saves it for every rank (and sets it); the tracker has the other generators only",
        "the tracker returns it with its states",
        "tests/checkpoint/test_checkpointer.py::test_resumed_is_undisturbed_bit_for_bit",
    ),
    "torch.distributed.checkpoint.utils._DistWrapper": (
        "checkpoint/checkpointer.py: raises an error of one rank on all ranks, as torch does for tensors",
        "torch exports it",
        "tests/checkpoint/test_checkpointer.py::test_all_ranks_learn_that_one_could_not_write",
    ),
    "torch.UntypedStorage._cdata": (
        "trainer/network.py moves every storage once; storages cannot be hashed",
        "UntypedStorage can be hashed",
        "tests/trainer/test_offload.py::test_training_goes_on_as_if_nothing_had_been_moved",
    ),
    "torch._foreach_copy_": (
        "weight_sync/sender.py and receiver.py copy the pieces of a bucket in one launch",
        "torch exports it",
        "tests/weight_sync/test_receiver.py::test_all_weights_arrive_every_time",
    ),
    "torch.distributed.ProcessGroupNCCL.Options._timeout": (
        "weight_sync/transports/p2p.py makes a group apart from torch's global state",
        "ProcessGroupNCCL.Options takes a timeout",
        "tests/weight_sync/test_receiver.py::test_all_weights_arrive_every_time",
    ),
    "torch._C._distributed_c10d._dump_nccl_trace_json": (
        "runtime/hang_detector.py asks which operation a rank's GPU has not done",
        "torch exports it",
        "tests/runtime/test_hang_detector.py::test_with_nccl_the_oldest_open_operation_is_named",
    ),
    "megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._communicate_shapes": (
        "trainer/megatron/pipeline.py answers by the plan of micro-batches; Megatron asks the neighbors, and waits",
        "P2PCommunicator takes the shapes that it receives",
        "tests/trainer/megatron/test_pipeline.py::test_no_shape_is_exchanged_and_no_stage_waits_for_its_device",
    ),
    "sglang._platform_stubs": (
        "patches/sglang.py uses the modules that SGLang makes for machines without triton",
        "SGLang installs them wherever triton is missing",
        "tests/patches/test_sglang.py::test_kernels_can_be_defined_without_triton",
    ),
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend": (
        "inference/cpu/backend.py overrides it and …_decode, so that caching does not change a sample",
        "SGLang has a batch-invariant mode for CPU",
        "tests/inference/test_server.py::test_a_seed_decides_the_sample_whatever_is_cached",
    ),
    "litellm._internal_context.is_internal_call": (
        "llm/client.py: what LiteLLM would record for callbacks, of which there are none, costs a third of a call",
        "LiteLLM skips it if no callback is registered",
        "tests/patches/test_litellm.py::test_calls_are_internal",
    ),
    "litellm.ModelResponse._hidden_params": (
        "llm/client.py reads the price that LiteLLM computed",
        "ModelResponse has a public field for it",
        "tests/llm/test_spending.py::test_tokens_and_price_of_every_try_are_counted",
    ),
}
_PRIVATE = tuple(
    Patch(name.split(".")[0].replace("megatron", "megatron-core"), name, why, name, until, test, uses=(name,))
    for name, (why, until, test) in _INTERFACES.items()
)
