"""Private interfaces of libraries that the package calls or overrides: looked at first when a version changes."""

from __future__ import annotations

from megatron_collab.patches import Patch

_TORCH = ("torch", ("2.13.0", "2.14.1"))
_MEGATRON = ("megatron-core", ("0.16.1",))
_LITELLM = ("litellm", ("1.106.2",))
_SGLANG = ("sglang", ("0.5.23",))
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"

PATCHES = (
    Patch(
        "hidden states instead of logits",
        *_MEGATRON,
        why="trainer/megatron/model.py overrides this method, so that the logits are never made.",
        upstream="megatron/core/models/gpt/gpt_model.py",
        until="GPTModel can return hidden states",
        test="tests/trainer/megatron/test_model.py::test_hidden_states_stay_in_the_models_precision",
        attributes=("megatron.core.models.gpt.gpt_model.GPTModel._postprocess",),
    ),
    Patch(
        "each rank's part of the optimizer state",
        *_MEGATRON,
        why="checkpoint/sharded_state.py has each rank write its own part; Megatron gathers it on one rank first.",
        upstream="megatron/core/optimizer/distrib_optimizer.py",
        until="Megatron-Core saves fully reshardable checkpoints in parallel",
        test="tests/checkpoint/test_checkpointer.py::test_resumed_is_undisturbed_bit_for_bit",
        attributes=(
            f"{_OPTIMIZER}._get_main_param_and_optimizer_states",
            f"{_OPTIMIZER}._init_optimizer_states_with_dummy_values",
        ),
    ),
    Patch(
        "the state of the device's random generator",
        *_MEGATRON,
        why="checkpoint/checkpointer.py saves it for every rank; the tracker knows the other generators only.",
        upstream="megatron/core/tensor_parallel/random.py",
        until="the tracker returns it with its states",
        test="tests/checkpoint/test_checkpointer.py::test_resumed_is_undisturbed_bit_for_bit",
        attributes=(
            "megatron.core.tensor_parallel.random._get_cuda_rng_state",
            "megatron.core.tensor_parallel.random._set_cuda_rng_state",
        ),
    ),
    Patch(
        "an error of one rank raised on all",
        *_TORCH,
        why="checkpoint/checkpointer.py writes what is no tensor with the same rules as torch writes tensors.",
        upstream="torch/distributed/checkpoint/utils.py",
        until="torch exports it",
        test="tests/checkpoint/test_checkpointer.py::test_all_ranks_learn_that_one_could_not_write",
        attributes=("torch.distributed.checkpoint.utils._DistWrapper",),
    ),
    Patch(
        "the identity of a storage",
        *_TORCH,
        why="trainer/network.py moves every storage once; storages cannot be hashed.",
        upstream="torch/storage.py",
        until="UntypedStorage can be hashed",
        test="tests/trainer/test_offload.py::test_training_goes_on_as_if_nothing_had_been_moved",
        attributes=("torch.UntypedStorage._cdata",),
    ),
    Patch(
        "many copies at once",
        *_TORCH,
        why="weight_sync/sender.py and receiver.py copy the pieces of a bucket in one launch.",
        upstream="torch/optim (its own users)",
        until="torch exports it",
        test="tests/weight_sync/test_receiver.py::test_all_of_it_arrives_every_time",
        attributes=("torch._foreach_copy_",),
    ),
    Patch(
        "the timeout of an NCCL group",
        *_TORCH,
        why="weight_sync/transports/p2p.py makes a group apart from torch's global state; Options take no timeout.",
        upstream="torch/csrc/distributed/c10d/init.cpp",
        until="ProcessGroupNCCL.Options takes a timeout",
        test="tests/weight_sync/test_receiver.py::test_all_of_it_arrives_every_time",
        attributes=("torch.distributed.ProcessGroupNCCL.Options._timeout",),
    ),
    Patch(
        "SGLang's stand-ins",
        *_SGLANG,
        why="patches/sglang.py uses the modules that SGLang makes for machines without triton.",
        upstream="sglang/_platform_stubs.py",
        until="SGLang installs them wherever triton is missing",
        test="tests/patches/test_sglang.py::test_torchvision_imports_once_its_operators_are_declared",
    ),
    Patch(
        "SGLang's torch_native attention",
        *_SGLANG,
        why="inference/cpu/backend.py overrides its two inner methods, so that caching does not change a sample.",
        upstream="sglang/srt/layers/attention/torch_native_backend.py",
        until="SGLang has a batch-invariant mode for CPU",
        test="tests/inference/test_server.py::test_a_seed_decides_the_sample_whatever_is_cached",
    ),
    Patch(
        "no payloads for callbacks",
        *_LITELLM,
        why="llm/client.py marks its calls as internal: what LiteLLM would record for callbacks, of which there are "
        "none, costs a third of a call.",
        upstream="litellm/_internal_context.py",
        until="LiteLLM skips it where no callback is registered",
        test="tests/patches/test_litellm.py::test_calls_are_internal",
        attributes=("litellm._internal_context.is_internal_call",),
    ),
    Patch(
        "the price of a call",
        *_LITELLM,
        why="llm/client.py reads the price that LiteLLM computed, and inference/litellm_provider.py sets it to 0.",
        upstream="litellm/types/utils.py (ModelResponse._hidden_params)",
        until="ModelResponse has a public field for it",
        test="tests/llm/test_client.py::test_tokens_and_price_of_every_try_are_counted",
        attributes=("litellm.ModelResponse._hidden_params",),
    ),
)
