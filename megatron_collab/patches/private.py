"""Private interfaces of libraries that the package calls or overrides: looked at first when a version changes."""

from __future__ import annotations

from megatron_collab.patches import Patch

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"

INTERFACES = {  # what uses it and why, until when, the test that fails without it
    "megatron.core.models.gpt.gpt_model.GPTModel._postprocess": (
        "trainer/megatron/model.py overrides it, so that the logits are never made",
        "GPTModel can return hidden states",
        "tests/trainer/megatron/test_model.py::test_hidden_states_stay_in_the_models_precision",
    ),
    f"{_OPTIMIZER}._get_main_param_and_optimizer_states": (
        "checkpoint/sharded_state.py has each rank write its own part; Megatron gathers it on one rank first",
        "Megatron-Core saves fully reshardable checkpoints in parallel",
        "tests/checkpoint/test_checkpointer.py::test_resumed_is_undisturbed_bit_for_bit",
    ),
    f"{_OPTIMIZER}._init_optimizer_states_with_dummy_values": (
        "checkpoint/sharded_state.py reads into them",
        "Megatron-Core saves fully reshardable checkpoints in parallel",
        "tests/checkpoint/test_checkpointer.py::test_resumed_is_undisturbed_bit_for_bit",
    ),
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": (
        "checkpoint/checkpointer.py saves it for every rank (and sets it); the tracker has the other generators only",
        "the tracker returns it with its states",
        "tests/checkpoint/test_checkpointer.py::test_resumed_is_undisturbed_bit_for_bit",
    ),
    "torch.distributed.checkpoint.utils._DistWrapper": (
        "checkpoint/checkpointer.py: an error of one rank is raised on all, as where torch writes tensors",
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
        "tests/weight_sync/test_receiver.py::test_all_of_it_arrives_every_time",
    ),
    "torch.distributed.ProcessGroupNCCL.Options._timeout": (
        "weight_sync/transports/p2p.py makes a group apart from torch's global state",
        "ProcessGroupNCCL.Options takes a timeout",
        "tests/weight_sync/test_receiver.py::test_all_of_it_arrives_every_time",
    ),
    "sglang._platform_stubs": (
        "patches/sglang.py uses the modules that SGLang makes for machines without triton",
        "SGLang installs them wherever triton is missing",
        "tests/patches/test_sglang.py::test_torchvision_imports_once_its_operators_are_declared",
    ),
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend": (
        "inference/cpu/backend.py overrides it and …_decode, so that caching does not change a sample",
        "SGLang has a batch-invariant mode for CPU",
        "tests/inference/test_server.py::test_a_seed_decides_the_sample_whatever_is_cached",
    ),
    "litellm._internal_context.is_internal_call": (
        "llm/client.py: what LiteLLM would record for callbacks, of which there are none, costs a third of a call",
        "LiteLLM skips it where no callback is registered",
        "tests/patches/test_litellm.py::test_calls_are_internal",
    ),
    "litellm.ModelResponse._hidden_params": (
        "llm/client.py reads the price that LiteLLM computed",
        "ModelResponse has a public field for it",
        "tests/llm/test_client.py::test_tokens_and_price_of_every_try_are_counted",
    ),
}

PATCHES = tuple(
    Patch(name.split(".")[0].replace("megatron", "megatron-core"), name, why, name, until, test, uses=(name,))
    for name, (why, until, test) in INTERFACES.items()
)
