"""Checkpoints become Hugging Face folders and come from them, bit for bit, in little memory."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors.torch import load_file

from megatron_collab.checkpoint.checkpointer import Checkpoints
from megatron_collab.commands.__main__ import run
from megatron_collab.inference.client import SGLangClient
from megatron_collab.inference.server import SGLangServer
from megatron_collab.inference.spec import ClientSpec
from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.models import hf_to_megatron
from megatron_collab.settings import SamplingConfig
from megatron_collab.trainer.trainer import PolicyTrainer
from tests.conftest import serving_config
from tests.helpers import in_turn, make_model, policy_servers
from tests.ranks import HF, init_parallel, make_config, run_ranks

FAMILIES = ("qwen3", "qwen2", "llama", "mistral", "qwen3_moe")
TIED = ("qwen2",)
LAYOUTS: dict[str, dict[str, object]] = {"tp2": {"parallel.tp": 2}, "pp2": {"parallel.pp": 2}}
PROMPT = [[7, 250, 31, 4, 99, 120, 18, 3]]


def tool(*arguments: object) -> int:
    return run("convert", [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each family the models source and other, the checkpoints start, and those of training in each layout."""
    folder = tmp_path_factory.mktemp("convert")
    for family in FAMILIES:
        for name, seed in (("source", 0), ("other", 1)):
            make_model(folder / family / name, family=family, seed=seed, vocab=301, tied=family in TIED)
        assert (
            tool(folder / family / "source", folder / family / "start", "--to-megatron", "--shard-size", "100KB") == 0
        )
    for began in run_ranks(save_in_every_layout, 2, folder):
        assert began == [(0, {})] * len(LAYOUTS) * len(FAMILIES)
    return folder


def save_in_every_layout(folder: Path) -> list[object]:
    """As one of two ranks: what each model started from."""
    began = []
    for layout, settings in LAYOUTS.items():
        with init_parallel(make_config(folder, settings)):
            began += [start_and_save(folder / family, layout, settings) for family in FAMILIES]
    return began


def start_and_save(folder: Path, layout: str, settings: dict[str, object]) -> object:
    """Start from the converted checkpoint `folder`/start in a model of other weights, save one of training."""
    if "moe" in folder.name and "parallel.tp" in settings:
        settings = settings | {"parallel.sequence_parallel": True, "parallel.ep": 2}
    config = make_config(folder / "other", {**settings, "algo.kl_coef": 0.0, "optim.weight_decay": 0.0})
    actor = PolicyTrainer(trainer_spec(config))
    with Checkpoints(folder / "start", keep=1, timeout=60.0) as checkpoints:
        began = checkpoints.load_latest(actor.trainables)
    for optimizer in actor.policy.optimizer.chained_optimizers:  # a step with no gradient: state, and the same weights
        optimizer._init_optimizer_states_with_dummy_values()
    with Checkpoints(folder / layout, keep=1, timeout=60.0) as checkpoints:
        checkpoints.save(1, actor.trainables, {})
    return began


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.processes
@pytest.mark.parametrize(("family", "layout"), in_turn(FAMILIES, [*LAYOUTS]))
def test_round_trip_is_bit_equal(folder: Path, tmp_path: Path, family: str, layout: str) -> None:
    source = folder / family / "source"
    out = tmp_path / "out"
    assert tool(folder / family / layout, out, "--model", source, "--shard-size", "100KB") == 0
    expected, actual = tensors(source), tensors(out)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    sizes = [file.stat().st_size for file in out.glob("*.safetensors")]
    assert len(sizes) > 3 and max(sizes) < 110_000
    assert {file.name for file in source.iterdir() if file.suffix != ".safetensors"} <= {
        file.name for file in out.iterdir()
    }
    assert greedy(out) == greedy(source)


def greedy(folder: Path) -> list[int]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = model.generate(torch.tensor(PROMPT), max_new_tokens=12, do_sample=False)
    return [int(token) for token in tokens[0]]


@pytest.mark.processes
def test_another_dtype_is_the_rounded_model(folder: Path, tmp_path: Path) -> None:
    source = folder / "qwen3" / "source"
    assert tool(folder / "qwen3" / "tp2", tmp_path / "out", "--model", source, "--dtype", "bfloat16") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    converted = tensors(tmp_path / "out")
    assert all(torch.equal(converted[name], tensor.bfloat16()) for name, tensor in tensors(source).items())


@pytest.mark.processes
@pytest.mark.slow
def test_verify_compares_with_transformers(folder: Path, tmp_path: Path) -> None:
    source = folder / "qwen3" / "source"
    checkpoint = folder / "qwen3" / "tp2"
    same = run_process(checkpoint, tmp_path / "out", "--model", source, "--dtype", "bfloat16", "--verify")
    assert same.returncode == 0, same.stderr
    assert float(same.stdout.split("log-probs: ")[1].split(",")[0]) < 1e-4
    other = run_process(source, tmp_path / "start", "--to-megatron", "--verify", program=WRONG_TABLE + RUN)
    assert other.returncode == 1, other.stderr
    assert "ABOVE" in other.stdout


RUN = """
import sys
from megatron_collab.commands.__main__ import run
sys.exit(run("convert", sys.argv[1:]))
"""
# gate and up change places
WRONG_TABLE = """
from dataclasses import replace
from megatron_collab.models import hf_to_megatron
right = hf_to_megatron.table
hf_to_megatron.table = lambda shape: tuple(
    replace(entry, hf=entry.hf[::-1]) if "linear_fc1" in entry.megatron else entry for entry in right(shape)
)
"""


def run_process(*arguments: object, program: str = RUN) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


SHARD = 12 << 20
MEASURE = """
import sys
from pathlib import Path
from megatron_collab import patches
patches.apply("megatron")
from megatron_collab.checkpoint import convert

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

def extra(run):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before

folder, shard = Path(sys.argv[1]), int(sys.argv[2])
print(extra(lambda: convert.to_checkpoint(folder / "hf", folder / "checkpoints", None, shard)))
print(extra(lambda: convert.to_hf(folder / "checkpoints" / "step_0", folder / "out", folder / "hf", None, shard)))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_model_larger_than_the_memory_it_takes(tmp_path: Path) -> None:
    hf = {**HF, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 32, "head_dim": 64}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(hf))
    rng = np.random.default_rng(0)
    shapes = hf_to_megatron.hf_shapes(hf_to_megatron.ModelShape.from_hf(hf))
    model = {name: rng.random(shape, dtype=np.float32) for name, shape in shapes.items()}
    size = sum(tensor.nbytes for tensor in model.values())
    assert size > 9 * SHARD
    safetensors.numpy.save_file(model, tmp_path / "hf" / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), str(SHARD)], capture_output=True, text=True, check=True
    )
    peaks = [int(line) for line in done.stdout.split()]
    assert len(peaks) == 2 and max(peaks) < 2 * SHARD, peaks
    converted = tensors(tmp_path / "out")
    assert all(np.array_equal(converted[name].numpy(), tensor) for name, tensor in model.items())


@pytest.mark.processes
def test_bad_input_is_one_line_and_exit_2(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, checkpoint = folder / "qwen3" / "source", folder / "qwen3" / "tp2" / "step_1"
    torn = Path(shutil.copytree(checkpoint, tmp_path / "step_1"))
    (torn / "__1_0.distcp").unlink()
    smaller = Path(shutil.copytree(source, tmp_path / "smaller"))
    config = json.loads((smaller / "config.json").read_text())
    (smaller / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, "layer_types": None}))
    (tmp_path / "no weights").mkdir()
    (tmp_path / "no weights" / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    for arguments, message in [
        ((tmp_path / "none", out, "--model", source), "none: contains no checkpoint; give a run, RUN@STEP"),
        ((tmp_path / "step_9", out, "--model", source), "step_9: contains no checkpoint"),
        ((torn, out, "--model", source), "step_1: is damaged (__1_0.distcp is missing); give another checkpoint"),
        ((checkpoint, out, "--model", folder / "qwen2" / "source"), "--model="),
        ((checkpoint, out, "--model", smaller), "has layers=2, and the model in the checkpoint layers=3"),
        ((checkpoint, out, "--model", tmp_path), "contains no config.json"),
        ((checkpoint, tmp_path, "--model", source), f"{tmp_path}: exists; give another folder"),
        ((tmp_path / "no weights", out, "--to-megatron"), "model.safetensors is missing"),
    ]:
        assert tool(*arguments) == 2, message
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
        assert not out.exists()


def broken(folder: Path, tmp_path: Path, file: str, content: str | None) -> Path:
    """A copy of `folder` whose `file` has other `content`; None: it is not there."""
    copy = Path(shutil.copytree(folder, tmp_path / folder.name))
    (copy / file).unlink(missing_ok=True)
    if content is not None:
        (copy / file).write_text(content)
    return copy


@pytest.mark.processes
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("state.json", "[1]", "is damaged (no valid state.json)"),
        ("state.json", "{", "is damaged (no valid state.json)"),
        ("state.json", '{"step": 1}', "is damaged (no valid state.json)"),
        ("state.json", '{"step": 1, "ranks": 1, "state": {}}', ".metadata is missing"),
    ],
)
def test_a_checkpoint_that_is_not_whole(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    content: str,
    message: str,
) -> None:
    checkpoint = broken(folder / "qwen3" / "tp2" / "step_1", tmp_path, file, content)
    (checkpoint / ".metadata").unlink()
    assert tool(checkpoint, tmp_path / "out", "--model", folder / "qwen3" / "source") == 2
    error = capsys.readouterr().err
    assert message in error and "give another checkpoint" in error and error.count("\n") == 1, error


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json: cannot be read as JSON"),
        ("config.json", "[]", "config.json: holds a list"),
        ("config.json", '{"model_type": "llama", "hidden_size": "64"}', "config.json: "),
        ("model.safetensors.index.json", "{", "model.safetensors.index.json has no valid weight_map"),
        ("model.safetensors.index.json", "{}", "model.safetensors.index.json has no valid weight_map"),
        ("model.safetensors.index.json", "[]", "model.safetensors.index.json has no valid weight_map"),
        ("model.safetensors.index.json", '{"weight_map": [1]}', "model.safetensors.index.json has no valid weight_map"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": 1}}',
            "model.safetensors.index.json has no valid weight_map",
        ),
    ],
)
def test_a_model_that_cannot_be_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    content: str,
    message: str,
) -> None:
    make_model(tmp_path / "made" / "model", vocab=301)
    model = broken(tmp_path / "made" / "model", tmp_path, file, content)
    capsys.readouterr()
    assert tool(model, tmp_path / "out", "--to-megatron") == 2
    error = capsys.readouterr().err
    assert message in error and "; give a" in error and error.count("\n") == 1, error


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path / "model", vocab=301)
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert tool(tmp_path / "model", tmp_path / "file" / "out", "--to-megatron") == 2
    error = capsys.readouterr().err
    assert "out: cannot be used (" in error and "choose another OUT" in error and error.count("\n") == 1, error


@pytest.mark.parametrize("to_megatron", [True, False])
def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], to_megatron: bool) -> None:
    """A limit on the size of a file stands in for it: writing fails half-way. Nothing is left behind."""
    make_model(tmp_path / "model", vocab=301)
    assert tool(tmp_path / "model", tmp_path / "start", "--to-megatron") == 0
    model = tmp_path / "model"
    arguments = [model, "--to-megatron"] if to_megatron else [tmp_path / "start", "--model", model]
    capsys.readouterr()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        assert tool(*arguments, tmp_path / "out") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert "out: cannot be written (" in error and "free disk space" in error and error.count("\n") == 1, error
    assert {path.name for path in tmp_path.iterdir()} == {"model", "start"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: source, out"),
        (("a", "b"), "give --model HF to convert a checkpoint, or --to-megatron"),
        (("a", "b", "--to-megatron", "--dtype", "int8"), "--dtype: invalid choice: 'int8'"),
        (("a", "b", "--to-megatron", "--shard-size", "0"), "--shard-size: '0' is not a size; give one such as 5GB"),
    ],
    ids=str,
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        tool(*arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("megatron-collab: ") and error.count("\n") == 1
    assert message in error


@pytest.mark.processes
@pytest.mark.slow
def test_sglang_samples_what_the_source_samples(folder: Path, tmp_path: Path) -> None:
    source = folder / "qwen3" / "source"
    assert tool(folder / "qwen3" / "pp2", tmp_path / "out", "--model", source) == 0

    async def sample(server: SGLangServer) -> list[int]:
        client = SGLangClient(server.url, server.api_key, ClientSpec(60.0, "qwen25"))
        try:
            turn = await client.generate(tuple(PROMPT[0]), max_new_tokens=12, sampling=SamplingConfig(top_k=1), seed=0)
        finally:
            await client.close()
        return [*PROMPT[0], *turn.token_ids]

    with SGLangServer(policy_servers(serving_config(tmp_path / "out")), tmp_path / "server.log") as server:
        server.wait_healthy(400.0)
        assert asyncio.run(sample(server)) == greedy(source)
