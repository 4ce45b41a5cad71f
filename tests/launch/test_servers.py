"""Servers that cannot run: on these GPUs, beside this trainer, with this model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_collab.config import Config
from megatron_collab.launch import remarks, server_specs, servers, validate
from megatron_collab.launch.spec import run_spec
from megatron_collab.launch.trainer_specs import trainer_layout
from megatron_collab.models import hf_config
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.runtime import device, driver
from megatron_collab.settings import ConfigError
from tests import helpers
from tests.e2e import test_gpu
from tests.helpers import make_model
from tests.weight_sync import test_families

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 50,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
}
EXPERTS = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}


WIDE = DENSE | {"head_dim": 128}  # a block of FP8 a head


class Machine:
    """What the probes say; a Hopper node of 8 GPUs unless a test says otherwise."""

    gpus = 8
    saver = True
    capability: tuple[int, int] | None = (9, 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake = Machine()
    probes = {"cuda": lambda: fake.gpus > 0, "memory_saver": lambda: fake.saver}
    monkeypatch.setattr(device, "probe", lambda name: SimpleNamespace(available=probes[name](), detail="not installed"))
    monkeypatch.setattr(device, "count", lambda: fake.gpus)
    monkeypatch.setattr(device, "capability", lambda: fake.capability)
    return fake


def configure(nproc: int = 1, **server: Any) -> Config:
    config = Config()
    config.launch.nproc_per_node = nproc
    config.rollout.server.max_total_tokens = 1024
    for name, value in server.items():
        assert hasattr(config.rollout.server, name)
        setattr(config.rollout.server, name, value)
    return config


def check(config: Config) -> None:
    servers.check_servers(config, server_specs.training(config))


def check_on_machine(config: Config) -> None:
    servers.check_servers_on_machine(config, server_specs.training(config))


def check_of_model(config: Config, shape: ModelShape) -> None:
    policy, trainer = server_specs.training(config).policy, trainer_layout(config)
    servers.check_servers_of_model(config, policy, shape, trainer)


def refused(check: Any, config: Config, *shape: ModelShape) -> str:
    with pytest.raises(ConfigError) as error:
        check(config, *shape)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_colocated_servers_fit_the_gpus_of_the_node(machine: Machine) -> None:
    check_on_machine(configure(nproc=8, replicas=4, tp=2))
    message = refused(check_on_machine, configure(nproc=8, replicas=5, tp=2))
    assert message.startswith("rollout.server.replicas=5 x rollout.server.tp=2: needs more than the 8 GPUs")


def test_colocated_servers_stand_with_as_many_ranks_each(machine: Machine) -> None:
    for fits in ({"nproc": 8, "replicas": 2, "tp": 2}, {"nproc": 1, "replicas": 1, "tp": 2}):
        check_on_machine(configure(**fits))
    for uneven in ({"nproc": 8, "replicas": 3, "tp": 2}, {"nproc": 4, "replicas": 4, "tp": 2}):
        message = refused(check_on_machine, configure(**uneven))
        assert message.startswith(f"rollout.server.replicas={uneven['replicas']}: each colocated server needs an equal")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"nproc": 8, "replicas": 1, "tp": 4}, "4 of the 8 GPUs of a node .*; set rollout.server.replicas=2$"),
        ({"nproc": 8, "replicas": 2, "tp": 1}, "6 of the 8 .*; set rollout.server.replicas=8$"),
        ({"nproc": 8, "replicas": 2, "tp": 3}, "2 of the 8 .*; choose a rollout.server.tp that divides"),
        ({"nodes": 2, "nproc": 8, "replicas": 2, "tp": 2}, "6 of the 8 .*; set rollout.server.replicas=8$"),
        ({"nodes": 2, "nproc": 8, "replicas": 1, "tp": 8, "nnodes": 2}, "4 of the 8 .*; set rollout.server.replicas=2"),
    ],
)
def test_gpus_without_a_server_are_reported(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], message: str
) -> None:
    config = configure(**{name: value for name, value in sizes.items() if name != "nodes"})
    config.launch.nodes = sizes.get("nodes", 1)
    [line] = remarks.remarks(config)
    settings = f"rollout.server.replicas={sizes['replicas']} x rollout.server.tp={sizes['tp']}: "
    assert re.fullmatch(re.escape(settings) + message + ".*", line)
    machine.gpus = 0
    assert not remarks.remarks(config)  # on a CPU


def test_gpus_that_sample_and_those_that_never_do_are_not_reported(machine: Machine) -> None:
    for sizes in ({"nproc": 8, "replicas": 2, "tp": 4}, {"nproc": 1, "replicas": 1, "tp": 2}):
        assert not servers.idle_gpus(configure(**sizes))
    assert not servers.idle_gpus(configure(nproc=4, replicas=1, tp=1, colocated=False))
    assert not servers.idle_gpus(configure(nproc=4, replicas=0))
    config = configure(nproc=2, replicas=1, tp=1)
    assert servers.idle_gpus(config)
    config.servers = {"judge": {"model": "some/folder", "replicas": 2, "colocated": True}}
    assert not servers.idle_gpus(config)  # the judge is on both
    config.train.stage = "sft"
    config.servers = {}
    assert not servers.idle_gpus(config)


def test_servers_of_their_own_need_gpus_beside_the_trainer(machine: Machine) -> None:
    check_on_machine(configure(nproc=4, replicas=2, tp=2, colocated=False))
    message = refused(check_on_machine, configure(nproc=5, replicas=2, tp=2, colocated=False))
    assert "besides launch.nproc_per_node=5, more than the 8 of this node" in message


def test_reward_models_that_the_run_serves_need_gpus_of_their_own(machine: Machine) -> None:
    config = configure(nproc=6, replicas=3, tp=2)
    config.reward.weights = {"reward_model": 1.0}
    config.reward.metrics = {"reward_model": {"model": "some/folder", "replicas": 2}}
    check_on_machine(config)
    config.reward.metrics["reward_model"]["tp"] = 2
    message = refused(check_on_machine, config)
    assert message.startswith("reward.metrics.reward_model.replicas x tp: ") and "need 10 GPUs of a node" in message


def test_gpus_are_counted_on_a_node(machine: Machine) -> None:
    config = configure(nproc=4, replicas=6, tp=2, colocated=False)
    assert "more than the 8 of this node" in refused(check_on_machine, config)
    config.launch.nodes = 3
    check_on_machine(config)
    check(config)
    config.launch.nodes = 4
    message = refused(check, config)
    assert message.startswith("rollout.server.replicas=6: is not a multiple of launch.nodes=4")


def test_a_server_over_several_nodes_has_as_many_ranks_on_each(machine: Machine) -> None:
    config = configure(nproc=8, replicas=2, tp=16, nnodes=2)
    config.launch.nodes = 4
    check(config)
    check_on_machine(config)
    config.rollout.server.replicas = 3
    message = refused(check, config)
    assert message.startswith(
        "rollout.server.replicas=3 x rollout.server.nnodes=2: is not a multiple of launch.nodes=4; "
    )
    config.rollout.server.replicas, config.rollout.server.tp = 2, 32
    message = refused(check, config)
    assert "rollout.server.tp=32 / launch.nodes=4: needs 16 devices per node" in message
    config.rollout.server.nnodes = 3
    assert refused(check, config).startswith("rollout.server.nnodes=3: does not divide rollout.server.tp")
    config.rollout.server.nnodes = 8
    assert refused(check, config).startswith("rollout.server.nnodes=8: does not divide launch.nodes=4")


def test_colocated_servers_on_gpus_need_the_memory_saver(machine: Machine) -> None:
    machine.saver = False
    message = refused(check_on_machine, configure())
    assert "needs torch-memory-saver (not installed)" in message and "set rollout.server.colocated=false" in message
    check_on_machine(configure(colocated=False))
    machine.gpus = 0
    check_on_machine(configure())


def test_colocated_servers_share_gpus_with_ranks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    exclusive = driver.CudaDevice("NVIDIA H100", (9, 0), "EXCLUSIVE_PROCESS")
    monkeypatch.setattr(driver, "driver", lambda: driver.Driver((exclusive,)))
    message = refused(check_on_machine, configure())
    assert message.startswith("rollout.server.colocated=true: the compute mode of a GPU is EXCLUSIVE_PROCESS")
    check_on_machine(configure(colocated=False))


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_colocated_servers_open_memory_of_plain_segments(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = configure(max_total_tokens=1000)
    monkeypatch.setenv(name, "max_split_size_mb:512")
    check_on_machine(config)
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    with pytest.raises(ConfigError, match=rf"^{name}=max_split_size_mb:512,expandable_segments:True: .*; unset it$"):
        check_on_machine(config)
    config.publish.transport = "disk"
    check_on_machine(config)


@pytest.mark.parametrize("nodes", [1, 2])
def test_colocated_servers_on_gpus_get_no_weights_over_the_network(machine: Machine, nodes: int) -> None:
    config = configure()
    config.publish.transport, config.launch.nodes, config.rollout.server.replicas = "network", nodes, nodes
    message = refused(check_on_machine, config)
    assert message.startswith("publish.transport=network: ") and "set publish.transport=auto" in message
    config.rollout.server.colocated = False
    check_on_machine(config)
    for transport in ("auto", "memory", "disk"):
        config.rollout.server.colocated, config.publish.transport = True, transport
        check_on_machine(config)
    config.publish.transport, machine.gpus = "network", 0
    check_on_machine(config)


def test_memory_on_several_nodes_is_for_colocated_servers() -> None:
    config = configure(colocated=False, replicas=2)
    config.publish.transport = "memory"
    check(config)
    config.launch.nodes = 2
    assert refused(check, config).startswith("publish.transport=memory: with launch.nodes=2 ")
    config.rollout.server.colocated = True
    check(config)


def test_colocated_servers_on_several_nodes_fit_the_devices_of_the_trainer() -> None:
    config = configure(nproc=4, replicas=4, tp=2)
    config.launch.nodes = 2
    check(config)
    config.rollout.server.tp = 4
    message = refused(check, config)
    assert message.startswith(
        "rollout.server.replicas=4 x rollout.server.tp=4 / launch.nodes=2: needs 8 devices per node"
    )
    config.rollout.server.colocated = False
    check(config)


def test_colocated_servers_on_gpus_do_not_size_their_own_cache(machine: Machine) -> None:
    message = refused(check_on_machine, configure(max_total_tokens=None))
    assert message.startswith("rollout.server.max_total_tokens: not set")
    check_on_machine(configure(max_total_tokens=None, colocated=False))
    check_on_machine(configure(max_total_tokens=None, memory_share=0.5))


@pytest.mark.parametrize(
    ("gpus", "capability", "message"),
    [(0, None, "found none"), (8, (8, 0), "found 8.0"), (8, (10, 0), "found 10.0")],
)
def test_fp8_needs_a_device_that_multiplies_it(
    machine: Machine, gpus: int, capability: tuple[int, int] | None, message: str
) -> None:
    check_on_machine(configure(fp8=True))
    machine.gpus, machine.capability = gpus, capability
    line = refused(check_on_machine, configure(fp8=True))
    assert (
        line.startswith("rollout.server.fp8=true: needs GPUs of compute capability 8.9 to below 10.0")
        and message in line
    )


def test_gpus_matter_only_where_servers_run(tmp_path: Path) -> None:
    on_cpu = ["launch.device=cpu", f"run.dir={tmp_path}", "model.dtype=bfloat16", "rollout.server.fp8=true"]
    validate.load(["experiment=booking_sft", *on_cpu, "rollout.server.nnodes=9"])
    with pytest.raises(
        ConfigError, match=r"rollout\.server\.fp8=true: needs GPUs of compute capability .*, found none"
    ):
        validate.load(["experiment=booking", *on_cpu])


def test_fp8_needs_bfloat16_and_a_transport_that_quantizes() -> None:
    config = configure(fp8=True)
    check(config)
    config.publish.transport = "disk"
    assert refused(check, config).startswith("publish.transport=disk: ")
    config.publish.transport, config.model.dtype = "auto", "float32"
    assert "needs model.dtype=bfloat16, not float32" in refused(check, config)


def test_what_servers_with_adapters_cannot_go_with() -> None:
    def with_adapters(**server: Any) -> Config:
        config = configure(**server)
        config.model.lora.rank, config.model.lora.serve = 8, "adapters"
        return config

    check(with_adapters(tp=2))
    assert "an FP8 base, rollout.server.fp8=true; change one" in refused(check, with_adapters(fp8=True))
    on_two = with_adapters(tp=2, nnodes=2)
    on_two.launch.nodes = 2
    message = (
        "model.lora.serve=adapters: with rollout.server.nnodes=2 nodes disagree on an adapter's id; set it to merged"
    )
    assert refused(check, on_two) == message
    by_disk = with_adapters()
    by_disk.publish.transport = "disk"
    assert refused(check, by_disk).startswith("publish.transport=disk: writes whole models")
    by_disk.model.lora.serve = "merged"
    check(by_disk)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (DENSE, {"tp": 3}, "rollout.server.tp=3: does not divide the model's attention heads (8)"),
        (DENSE, {"tp": 16}, "rollout.server.tp=16: does not divide the model's attention heads (8)"),
        (DENSE, {"tp": 2, "ep": 2}, "rollout.server.ep=2: the model has no experts"),
        (EXPERTS, {"tp": 4, "ep": 4}, "rollout.server.ep=4: does not divide the model's experts (6)"),
        (WIDE, {"tp": 16, "fp8": True}, "rollout.server.tp=16: does not divide"),
        (DENSE, {"tp": 8, "fp8": True}, "q_proj.weight has 64 rows on a server's rank, not a multiple of 128"),
        (DENSE, {"fp8": True}, "qkv_proj.weight is split at row 576"),
        (WIDE | {"intermediate_size": 1152}, {"tp": 2, "fp8": True}, "gate_proj.weight has 576 rows"),
        (EXPERTS | {"head_dim": 128, "moe_intermediate_size": 192}, {"fp8": True}, "has 192 rows"),
    ],
)
def test_a_model_that_cannot_be_cut_like_that(model: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    assert message in refused(check_of_model, configure(**settings), ModelShape.from_hf(model))


@pytest.mark.parametrize("sizes", [test_gpu.SIZES, test_families.SIZES])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_models_of_gpu_tests_can_be_cut_for_fp8(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    """No machine without a GPU runs these tests, and a refusal would be seen on one only."""
    folder = tmp_path / "model"
    make_model(folder, family=family, **sizes, **({"moe_intermediate_size": 256} if family == "qwen3_moe" else {}))
    config = configure(fp8=True)
    config.rollout.context_length = 2048
    check_of_model(config, hf_config.read(folder / "config.json"))


def test_experts_are_replayed_of_models_that_have_some() -> None:
    config = configure()
    config.rollout.routing_replay = True
    message = "rollout.routing_replay=true: the model has no experts; set it to false"
    assert refused(check_of_model, config, ModelShape.from_hf(DENSE)) == message
    check_of_model(config, ModelShape.from_hf(EXPERTS))


def test_models_that_can_be_cut() -> None:
    check_of_model(configure(tp=2, fp8=True), ModelShape.from_hf(WIDE))
    check_of_model(configure(tp=2, ep=2, fp8=True), ModelShape.from_hf(EXPERTS | {"head_dim": 128}))


def test_a_supervised_run_has_no_server_to_fit(tmp_path: Path) -> None:
    """SGLang has no Qwen3-MoE with dense layers; training it needs none."""
    config = configure()
    config.model.path, config.data.train = str(tmp_path), "tasks.jsonl"
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS | {"mlp_only_layers": [0], "hidden_size": 64}))
    with pytest.raises(ConfigError, match="layer 0 has no experts"):
        validate.check_model(config, run_spec(config))
    config.train.stage = "sft"
    assert validate.check_model(config, run_spec(config)).experts is not None


JUDGED = ("reward.weights.accuracy=1", "reward.metrics.accuracy.judge=true")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["servers={judge: {modle: x}}"], "servers.judge.modle: no such setting; the nearest is model; there are mod"),
        (["servers={judge: {tp: 2}}"], "servers.judge.model: not set; give a Hugging Face folder, or OWNER/NAME"),
        (["servers={judge: {model: x, tp: 3, ep: 2}}"], "servers.judge.ep=2: does not divide servers.judge.tp=3;"),
        (
            ["servers={judge: {model: x, replicas: 3, colocated: true}}"],
            "servers.judge.replicas x servers.judge.tp: needs 3 devices, and the trainer has launch.nproc_per_node",
        ),
        (
            ["servers={judge: {model: x, args: {tp_size: 2}}}"],
            "servers.judge.args.tp-size: servers.judge.tp decides it; set that",
        ),
        (
            ["servers={judge: {model: x}}", "user.model=served/juge"],
            "user.model=served/juge: servers has no juge; there are judge; the nearest is judge",
        ),
        (
            [*JUDGED, "reward.judge.model=served/judge"],
            "reward.judge.model=served/judge: servers has no judge; set servers.judge.model to the model that the run",
        ),
        (
            ["reward.weights.good=1", "reward.metrics.good={metric: reward_model, model: served/rm}"],
            "reward.metrics.good.model=served/rm: servers has no rm; set servers.rm.model",
        ),
        (
            ["reward.weights.reward_model=1", "reward.metrics.reward_model.model=served/reward_model"],
            "reward.metrics.reward_model.model=served/reward_model: servers has no reward_model; set servers.",
        ),
    ],
)
def test_models_beside_the_policy_that_cannot_be(settings: list[str], message: str) -> None:
    assert helpers.refused(*settings).startswith(message)


def test_a_model_that_gives_scores_answers_nothing_and_one_that_gives_text_scores_nothing(tmp_path: Path) -> None:
    for name, kind in (("rm", "Qwen2ForRewardModel"), ("chat", "Qwen2ForCausalLM")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [kind]}))
    served = f"servers={{rm: {{model: {tmp_path}/rm}}, chat: {{model: {tmp_path}/chat}}}}"
    message = helpers.refused(served, *JUDGED, "reward.judge.model=served/rm")
    assert f"servers.rm.model={tmp_path}/rm outputs scores, not text; choose another" in message
    metric = "reward.metrics.good={metric: reward_model, model: served/%s}"
    message = helpers.refused(served, "reward.weights.good=1", metric % "chat")
    assert message.startswith("reward.metrics.good.model=served/chat: ") and "has no score" in message


def test_models_beside_the_policy_have_gpus_of_their_own_or_the_trainers(machine: Machine) -> None:
    config = configure(nproc=4, replicas=2, tp=2)
    config.servers = {"judge": {"model": "x", "tp": 4}}
    check_on_machine(config)
    config.servers["user"] = {"model": "y"}
    message = refused(check_on_machine, config)
    assert (
        message.startswith("servers.judge.replicas x tp, servers.user.replicas x tp: ")
        and "they need 9 GPUs" in message
    )
    config.servers["user"]["colocated"] = True
    assert "servers.user.max_total_tokens: not set" in refused(check_on_machine, config)
    config.servers["user"]["max_total_tokens"] = 4096
    check_on_machine(config)
    config.rollout.max_staleness, config.rollout.server.colocated = 1, False
    assert refused(check, config).startswith("servers.user.colocated=true: rollout.max_staleness=1 ")


def test_a_run_that_serves_a_model_needs_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel does not bring SGLang, whose own requirements name packages of CUDA."""
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rollout.server: SGLang serves the model and is not installed"):
        servers.check_arguments(server_specs.training(Config()))
