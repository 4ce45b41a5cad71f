"""Arguments that settings pass to SGLang: those that the run sets are refused, SGLang must know the remaining ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import Config
from megatron_collab.inference import server_args
from megatron_collab.inference.server import arguments, refusal
from megatron_collab.launch import server_specs
from megatron_collab.launch.servers import check_arguments
from megatron_collab.settings import ConfigError
from tests.conftest import serving_config
from tests.helpers import make_model, policy_servers, refused


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("{tp_size: 2}", "tp-size: rollout.server.tp decides it; set that"),
        ("{mem-fraction-static: 0.5}", "mem-fraction-static: rollout.server.memory_share decides it; set that"),
        ("{model: other}", "model: model.path decides it; set that"),
        ("{base-gpu-id: 1}", "base-gpu-id: launch.nproc_per_node decides it; set that"),
        ("{api-key: x}", "api-key: the run starts and queries servers in its own way; remove it"),
        ("{enable-lora: true}", "enable-lora: the weight sync does not support other param"),
        ("{speculative-algorithm: NGRAM}", "speculative-algorithm: the weight sync does not support other"),
        ("{preferred_sampling_params: '{}'}", "preferred-sampling-params: rollout.turn and rollout.future decide"),
    ],
)
def test_arguments_that_a_setting_decides_are_refused_with_the_setting(overrides: str, message: str) -> None:
    assert refused(f"rollout.server.args={overrides}").startswith(f"rollout.server.args.{message}")


def test_a_kernel_is_chosen_on_gpus_alone() -> None:
    options = {"attention_backend": "fa3"}
    assert server_args.conflict(options, "rollout.server", on_cpu=False) is None
    message = server_args.conflict(options, "rollout.server", on_cpu=True)
    assert message == "rollout.server.args.attention-backend: launch.device=cpu decides it; remove it"


def test_a_server_of_its_own_model_may_have_other_parameters() -> None:
    options = {"quantization": "fp8", "moe_a2a_backend": "deepep"}
    assert server_args.conflict(options, "servers.judge", on_cpu=False, model="servers.judge.model") is None
    message = server_args.conflict({"model-path": "x"}, "servers.judge", on_cpu=False, model="servers.judge.model")
    assert message == "servers.judge.args.model-path: servers.judge.model decides it; set that"


def test_arguments_come_last_and_replace_those_of_the_run(tmp_path: Path) -> None:
    config = serving_config(tmp_path)
    options: dict[str, Any] = {"log_level": "info", "sleep-on-idle": False, "enable-metrics": True, "page_size": None}
    config.rollout.server.args = options | {"gc-threshold": [7, 8], "extra-metric-labels": {"a": "b"}}
    words = arguments(policy_servers(config), "http://127.0.0.1:30000", 0)
    assert words[-6:] == ["--enable-metrics", "--gc-threshold", "7", "8", "--extra-metric-labels", '{"a": "b"}']
    assert "--sleep-on-idle" not in words and "--page-size" not in words
    assert words[words.index("--log-level") + 1] == "info" and words.count("--log-level") == 1


# Names and aliases of all that SGLang's server takes, and what its parser says of the arguments that it is given.
PARSER_PROGRAM = """
import json, sys
from argparse import ArgumentParser
from megatron_collab import patches
patches.apply("sglang")
from sglang.srt.server_args import ServerArgs
from megatron_collab.inference.server_args import fault, plain, words
parser = ArgumentParser()
ServerArgs.add_cli_args(parser)
names = [[name.lstrip("-") for name in action.option_strings] for action in parser._actions]
faults = [fault(args, ["--model-path", "x", *words(plain(args))]) for args in json.loads(sys.argv[1])]
print(json.dumps([names, faults]))
"""
FAULTS = (
    ({"schedule-polici": "lpm"}, ".schedule-polici: SGLang has no such argument; the nearest is schedule-policy"),
    ({"schedule_policy": "lmp"}, ".schedule-policy=lmp: invalid choice: 'lmp' (choose from "),
    ({"page_size": "many"}, ".page-size=many: invalid int value: 'many'"),
    ({"enable-tf32-matmul": False}, ".enable-tf32-matmul=false: is not passed on; set no-enable-tf32-matmul: true"),
)


@pytest.mark.processes
def test_sglangs_own_parser_knows_the_names() -> None:
    """It has the refused names with all their aliases, and it checks the remaining ones."""
    command = [sys.executable, "-c", PARSER_PROGRAM, json.dumps([overrides for overrides, _ in FAULTS])]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    options, faults = json.loads(printed.splitlines()[-1])
    for fault, (_, message) in zip(faults, FAULTS, strict=True):
        assert fault.startswith(message)
    groups = [
        *server_args._BY_SETTING,
        *server_args._BY_SETTING_OF_POLICY,
        server_args._OF_THE_RUN,
        server_args._OF_THE_WEIGHTS,
    ]
    groups += [server_args._OF_THE_SAMPLES, server_args._OF_CPU]
    for pattern in " ".join(groups).split():
        assert any(server_args._among(name, pattern) for names in options for name in names), pattern
    for names in options:
        plain = [name for name in names if not name.startswith("no-")]
        conflicts = [server_args.conflict({name: 1}, "rollout.server", on_cpu=True) for name in plain]
        assert len({answer is None for answer in conflicts}) == 1, names


@pytest.fixture
def with_arguments(tmp_path: Path) -> Config:
    """A server that SGLang would start with its arguments."""
    config = serving_config(make_model(tmp_path, layers=1))
    config.rollout.server.args = {"chunked_prefill_size": 64, "page-size": 8, "sleep-on-idle": False}
    return config


@pytest.mark.slow
@pytest.mark.processes
def test_a_server_that_would_start_is_not_refused(with_arguments: Config) -> None:
    assert refusal(policy_servers(with_arguments)) is None


@pytest.mark.slow
@pytest.mark.processes
def test_a_server_that_would_not_start_is_refused_before(with_arguments: Config) -> None:
    config = with_arguments
    config.rollout.server.args |= {"chunked-prefill-size": 63}
    message = r"^rollout.server.args: SGLang rejects them: AssertionError: chunked_prefill_size must be divisible"
    with pytest.raises(ConfigError, match=message):
        check_arguments(server_specs.training(config))
