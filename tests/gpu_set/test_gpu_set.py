"""Tests that need the GPU set but no GPU: `make test-gpu-set` runs them.

The compiled part of TransformerEngine has the names, numbers and arguments of its stand-in; SGLang on CUDA takes our
arguments, compiles its kernels, and starts its schedulers; ranks have their environment before CUDA starts; a login
node, which has the packages but no driver, plans runs. `wheels_alone.sh` starts the tests, so that no toolkit of the
machine helps out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import Config
from megatron_collab.inference import SCORES_FLAG
from megatron_collab.inference import server as server_module
from megatron_collab.inference.server import Part
from megatron_collab.inference.spec import Placement, Serves
from megatron_collab.runtime import device, gpu_environment, toolkit
from tests.helpers import policy_servers
from tests.ranks import EXPERTS, HF

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = any(distribution.name == "sglang-kernel" for distribution in metadata.distributions())
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not INSTALLED, reason="the set for GPUs is not installed: make test-gpu-set"),
]


def output_of(code: str, *arguments: str, environment: dict[str, str] | None = None) -> Any:
    """The last line that `code` prints, parsed as JSON; its process has no patches."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_loader_knows_the_wheels_alone() -> None:
    """Otherwise a toolkit of the machine could make the tests below pass, unlike on a fresh node."""
    libraries = ("libcudart.so.13", "libcublas.so.13", "libcudnn.so.9", "libnvrtc.so.13", "libnccl.so.2")
    code = "import ctypes, json, sys\n" + "".join(
        f"try: ctypes.CDLL({library!r}); print(json.dumps({library!r})); sys.exit()\nexcept OSError: pass\n"
        for library in libraries
    )
    # The session's conftest names the wheels' folder to its children; what the machine has is seen without it.
    environment = os.environ | {"LD_LIBRARY_PATH": os.environ.get("DRIVER_LIBRARIES", "")}
    loaded = output_of(code + "print('null')", environment=environment)
    assert loaded is None, "run these tests by tests/gpu_set/wheels_alone.sh"


# By public name of a module: the members of an enumeration, otherwise the docstring.
DESCRIBED = """
import inspect, json
import torch, transformer_engine.pytorch, transformer_engine_torch
from megatron_collab.rehearsal.te_cpu import extension

def described(module):
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    members = {name: {key: int(member) for key, member in value.__members__.items()}
               for name, value in public.items() if hasattr(value, "__members__")}
    return {name: members.get(name, (value.__doc__ or "").strip()) for name, value in public.items()}

def parameters(kernel):
    signature = inspect.signature(kernel)
    return [[p.name, p.kind is p.KEYWORD_ONLY, p.default is not p.empty] for p in signature.parameters.values()]

kernels = {name: parameters(kernel) for name, kernel in extension.kernels().items()}
print(json.dumps([described(transformer_engine_torch), described(extension.module()), kernels]))
"""


@pytest.fixture(scope="module")
def engines() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """By name: the compiled module, its stand-in, and the parameters of the stand-in's kernels."""
    return tuple(output_of(DESCRIBED))


def parameters_of(help_text: str) -> list[list[Any]]:
    """The parameters in "name(first: type, *, second: type = None) -> type", in the form of DESCRIBED for Python."""
    between, depth, parts = help_text.partition("(")[2], 0, [""]
    for letter in between:
        depth += (letter in "([{<") - (letter in ")]}")
        if depth < 0:
            break
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    parameters, by_name = [], False
    for part in filter(None, map(str.strip, parts)):
        if part == "*":
            by_name = True
        else:
            parameters.append([re.match(r"\w+", part)[0], by_name, bool(re.search(r" = |\w=", part))])
    return parameters


def test_the_stand_in_has_no_name_of_its_own(engines: Any) -> None:
    compiled, stand_in, kernels = engines
    assert set(stand_in) - set(compiled) == {"REFERENCE"}
    assert len(kernels) >= 20


def test_its_numbers_are_the_compiled_ones(engines: Any) -> None:
    compiled, stand_in, _ = engines
    numbers = {name: value for name, value in stand_in.items() if isinstance(value, dict)}
    assert len(numbers) >= 10 and numbers == {name: compiled[name] for name in numbers}


def test_its_kernels_have_the_parameters_of_the_compiled_ones(engines: Any) -> None:
    compiled, _, kernels = engines
    for name, ours in kernels.items():
        theirs = parameters_of(compiled[name])
        unnamed = [parameter[0] == f"arg{place}" for place, parameter in enumerate(theirs)]
        named = [
            [place[0], *parameter[1:]] if blank else parameter
            for place, parameter, blank in zip(ours, theirs, unnamed, strict=False)
        ]
        assert len(ours) == len(theirs) and ours == named, name


# As on a Hopper GPU: which arguments SGLang has, and which kernels, depends on the device.
HOPPER = """
import json, sys
from argparse import ArgumentParser
from types import SimpleNamespace
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 8
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_name = lambda *_: "NVIDIA H100"
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132
)
"""
ARGUMENTS = """
from sglang.srt.server_args import ServerArgs
parser = ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps([parser.parse_known_args(command)[1] for command in json.loads(sys.argv[1])]))
"""
# One of SGLang's kernels, and one of FlashInfer's with the headers of CUDA that take no other compiler.
KERNELS = """
from flashinfer.jit.quantization import gen_quantization_module
from sglang.kernels.ops.activation.activation import activation_module
activation_module(torch.bfloat16)
gen_quantization_module().build_and_load()
print(json.dumps("loaded"))
"""


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "select", lambda setting: device.Device("cuda", "nccl"))


@pytest.mark.usefixtures("on_cuda")
def test_on_cuda_sglang_takes_every_argument_that_we_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF | EXPERTS))
    commands = []
    cases: list[dict[str, Any]] = [
        {"placement": Placement(tp=4, shared=1)},
        {"fp8": True, "max_total_tokens": 2**18},
        {"placement": Placement(first=1), "ep": 2},
        {"placement": Placement(tp=8, nnodes=2, shared=1)},
        {"serves": Serves.TEXT},
        {"serves": Serves.SCORES},
    ]
    for changes in cases:
        spec = replace(policy_servers(Config()), model=str(tmp_path), **changes)
        part = Part(1, "tcp://10.0.0.1:30001") if spec.placement.nnodes > 1 else None
        commands.append(server_module.arguments(spec, "http://10.0.0.1:30000", 0, part))
    passed = {word for command in commands for word in command}
    assert {"--moe-runner-backend", "--load-format", "--nnodes", f"--{SCORES_FLAG}"} <= passed
    assert output_of(HOPPER + ARGUMENTS, json.dumps(commands)) == [[]] * len(commands)


@pytest.mark.usefixtures("on_cuda")
def test_servers_compile_their_kernels_with_what_the_set_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a toolkit of the machine; the driver's library is the stand-in."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    environment = server_module._environment(policy_servers(Config()), "", 0)
    assert Path(environment["CUDA_HOME"]).is_relative_to(sys.prefix)
    environment |= dict.fromkeys(("SGLANG_JIT_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"), str(tmp_path))
    assert output_of(HOPPER + KERNELS, environment=environment | {"FLASHINFER_CUDA_ARCH_LIST": "9.0a"}) == "loaded"


# As SGLang starts the schedulers of a colocated server, by its TorchMemorySaverAdapter; a file that they can import.
SPAWN = """
import multiprocessing, platform
import torch_memory_saver

if __name__ == "__main__":
    scheduler = multiprocessing.get_context("spawn").Process(target=platform.node)
    with torch_memory_saver.configure_subprocess():
        scheduler.start()
    scheduler.join()
    print(scheduler.exitcode)
"""


@pytest.mark.usefixtures("on_cuda")
def test_the_schedulers_of_colocated_servers_start(tmp_path: Path) -> None:
    (file := tmp_path / "spawn.py").write_text(SPAWN)
    run = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    assert output_of(run, str(file), environment=server_module._environment(policy_servers(Config()), "", 0)) == 0


RUN = ["-m", "megatron_collab.train", "experiment=booking_sft", "launch.device=cuda"]
LAUNCHES = {
    "the program itself": RUN,
    "our torchrun, as Slurm's script": ["-m", "megatron_collab.launch.torchrun", "--nproc-per-node=2", *RUN],
    "torch's torchrun, by hand": ["-m", "torch.distributed.run", "--nproc-per-node=2", *RUN],
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_ranks_have_their_environment_when_cuda_begins(launch: str, tmp_path: Path) -> None:
    """However they are launched, in a shell with the modules of another CUDA. The devices are the stand-in's: the run
    ends when the first tensor goes to one."""
    (log := tmp_path / "cuda").mkdir()
    environment = os.environ | {"STAND_IN_DEVICES": "2", "STAND_IN_LOG": str(log)}
    environment |= {"CUDA_HOME": "/opt/cuda-12.4", "CUDA_PATH": "/opt/cuda-12.4", "CUDNN_HOME": "/opt/cudnn"}
    environment["LD_LIBRARY_PATH"] += ":/opt/cuda-12.4/lib64"
    command = [sys.executable, *LAUNCHES[launch], f"run.dir={tmp_path}/run", f"data.dir={tmp_path}/world"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=800)
    ranks = {}
    for began in (file for file in log.iterdir() if not file.suffix):
        line, _, variables = began.read_text().partition("\n")
        known = by_name(variables) | {"loader": by_name(began.with_suffix(".start").read_text())["LD_LIBRARY_PATH"]}
        if "LOCAL_RANK" in known and "driver.py" not in line:  # which asks for them in a process of its own
            ranks[known["LOCAL_RANK"]] = known
    assert ranks.keys() == {"0", "1"}, done.stdout + done.stderr
    for known in ranks.values():
        assert known["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and "CUDA_PATH" not in known
        assert known["CUDA_HOME"] == str(toolkit.wheels())
        assert known["CUDNN_HOME"] == str(toolkit.wheels().parent / "cudnn")
        assert known["loader"].split(":")[0] == str(toolkit.wheels() / "lib")


def by_name(variables: str) -> dict[str, str]:
    return dict(variable.partition("=")[::2] for variable in variables.split("\0"))


# TransformerEngine names parts of cuDNN and has no path to them.
PARTS = """
import contextlib, json, torch
with contextlib.suppress(AssertionError):  # its compiled part is not needed here
    import transformer_engine.common
print(json.dumps(sorted({line.split()[-1] for line in open("/proc/self/maps") if "libcudnn_cnn" in line})))
"""


def test_no_part_of_a_modules_cudnn_joins_the_wheels(tmp_path: Path) -> None:
    part = toolkit.wheels().parent / "cudnn/lib/libcudnn_cnn.so.9"
    (module := tmp_path / "module").mkdir()
    shutil.copy(part, module)
    modules = os.environ | {"CUDNN_HOME": str(module), "LD_LIBRARY_PATH": f"{module}:{os.environ['LD_LIBRARY_PATH']}"}
    assert output_of(PARTS, environment=gpu_environment.environment(modules)) == [str(part)]


def test_a_driver_that_is_too_old_is_named_in_the_refusal(tmp_path: Path) -> None:
    nvml = ["cc", "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", ROOT / "tests/gpu_set/libnvidia-ml.c"]
    subprocess.run(nvml, check=True)
    environment = os.environ | {"STAND_IN_DEVICES": "2", "STAND_IN_CUDA": "12040", "STAND_IN_DRIVER": "550.54.14"}
    environment["LD_LIBRARY_PATH"] += f":{tmp_path}"
    command = [sys.executable, *RUN, f"run.dir={tmp_path}/run", f"data.dir={tmp_path}/world"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    refusal = (
        "launch.device=cuda: driver 550.54.14 found, for CUDA 12.4; CUDA 13.0 needs 580 or newer: update the driver"
    )
    assert done.returncode == 2 and refusal in done.stderr


def test_doctor_says_what_a_process_with_the_hook_saw() -> None:
    command = [sys.executable, "-m", "megatron_collab.commands", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert f"preloaded, as in servers: a process started, with {toolkit.wheels()}/lib/libcudart.so.13" in done.stdout
    places = {"cudart": "cu13", "cublas": "cu13", "cudnn": "cudnn", "nvrtc": "cu13", "nccl": "nccl"}
    for name, place in places.items():
        rows = [row.split() for row in done.stdout.splitlines() if row.split()[:1] == [name]]
        assert [row[1].rpartition(".")[0] for row in rows] == [f"{toolkit.wheels().parent}/{place}/lib/lib{name}.so"]


@pytest.mark.parametrize(
    ("command", "message"),
    {
        "doctor": "launch.device=auto selects cpu",
        "doctor --plan experiment=train_70b": "Fits a GPU of 79.6 GiB",
        "plan-sync experiment=train_70b": "server",
        "rehearse experiment=train_70b": "classes of ranks, ",  # minutes
    }.items(),
)
def test_a_login_node_without_a_driver_plans(command: str, message: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    program = [sys.executable, "-m", "megatron_collab.commands", *command.split()]
    done = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert message in done.stdout
