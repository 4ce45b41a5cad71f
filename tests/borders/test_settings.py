"""Settings at their borders: each is refused in one line that names it, its value and what it may be, in no time."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest

from megatron_collab import evaluate
from megatron_collab.commands.__main__ import run
from megatron_collab.reproduce.__main__ import main as reproduce
from megatron_collab.runtime import console
from megatron_collab.runtime.process import EXIT_BAD_INPUT
from tests.borders.test_data import GOOD, MODEL, started
from tests.helpers import byte_level_tokenizer, write_weights

REFUSED = {
    # Numbers
    "optim.lr=inf": "optim.lr=inf: must be finite and above 0",
    "optim.clip_grad=inf": "optim.clip_grad=inf: must be finite and above 0",
    "optim.weight_decay=-1": "optim.weight_decay=-1.0: must be at least 0",
    "run.seed=-1": "run.seed=-1: must be at least 0",
    "run.seed=100000000000000000000": "run.seed=100000000000000000000: must be at least 0 and below 4294967296",
    "train.eval_tasks=-5": "train.eval_tasks=-5: must be at least 0",
    "train.steps=nan": "train.steps=nan: must be a whole number",
    "rollout.turn.top_p=2": "rollout.turn.top_p=2.0: must be above 0 and at most 1",
    "rollout.turn.top_k=0": "rollout.turn.top_k=0: samples from no token; set -1 for all, or 1 or more",
    "rollout.turn.top_k=-7": "rollout.turn.top_k=-7: must be at least -1",
    "rollout.turn.temperature=inf": "rollout.turn.temperature=inf: must be finite and above 0 and at most 10",
    "rollout.server.max_running_requests=0": "rollout.server.max_running_requests=0: must be at least 1",
    "rollout.server.max_total_tokens=-5": "rollout.server.max_total_tokens=-5: must be at least 1",
    "rollout.server.start_timeout=0": "rollout.server.start_timeout=0.0: must be at least 1",
    "rollout.server.port=99999": "rollout.server.port=99999: must be at least 0 and at most 65535",
    "rollout.server.port=-1": "rollout.server.port=-1: must be at least 0 and at most 65535",
    "rollout.turn_timeout=-1": "rollout.turn_timeout=-1.0: must be at least 0.1",
    "rollout.max_tool_calls=-1": "rollout.max_tool_calls=-1: must be at least 0",
    "rollout.tool_parser=nonsense": "rollout.tool_parser=nonsense: choose one of ",
    "reward.max_missing=7": "reward.max_missing=7.0: must be at least 0 and at most 1",
    "reward.max_missing=-1": "reward.max_missing=-1.0: must be at least 0 and at most 1",
    "reward.weights.token_amount=inf": "reward.weights.token_amount=inf: must be finite",
    "reward.weights.token_amount=nan": "reward.weights.token_amount=nan: must be finite",
    "reward.malformed=nan": "reward.malformed=nan: must be finite",
    "reward.clamp={token_amount: -1}": "reward.clamp.token_amount=-1.0: must be above 0",
    "llm.budget_usd=-5": "llm.budget_usd=-5.0: must be above 0",
    "llm.budget_usd=0": "llm.budget_usd=0.0: must be above 0",
    "llm.requests_per_minute=0": "llm.requests_per_minute=0: must be at least 1",
    "llm.tokens_per_minute=-1": "llm.tokens_per_minute=-1: must be at least 1",
    # Beside the model, each other and the machine
    "rollout.context_length=1000000": "rollout.context_length=1000000: the model has 256 positions; choose at most",
    "rollout.context_length=1": "rollout.context_length=1: must be at least 2",
    "rollout.turn.max_new_tokens=100000": "rollout.turn.max_new_tokens=100000: leaves no room for a prompt in ",
    "rollout.turn.thinking_budget=0": "rollout.turn.thinking_budget=0: must be at least 1",
    "rollout.future.enable_thinking=false": "rollout.future.enable_thinking: the chat template of ",
    "rollout.turn.thinking_budget=60": "rollout.turn.thinking_budget=60: the tokenizer of ",
    "algo.mini_batches=100000": "algo.mini_batches=100000: ",
    "rollout.workers=100000": "rollout.workers=100000: must be at least 1 and at most 10000",
    "rollout.server.replicas=9000": "rollout.server.replicas=9000: the processes of a node need ",
    "launch.nproc_per_node=5000": "launch.nproc_per_node=5000: must be at least 1 and at most 1024",
    "parallel.tp=3": "parallel.tp=3 x parallel.pp=1 x parallel.cp=1 does not divide the 1 ranks",
    # Words
    "foo.bar=1": "foo.bar: no such option (all options: --help)",
    "+foo.bar=1": "foo.bar: no such option (all options: --help)",
    "++optim.lerning_rate=5": "optim.lerning_rate: no such option; optim has lr, ",
    "--hepl": "--hepl: no such argument; give --help, --cfg or option=value",
    "-m": "-m: no such argument; give --help, --cfg or option=value",
    "data.train=~/no/such.jsonl": "/no/such.jsonl: no such file",
    "optim.lr=1e-3,1e-4": "optim.lr=1e-3,1e-4: sweeps are not supported; ",
    "run.dir=' '": "run.dir=' ': is blank; give a value",
    "user.stop=' '": "user.stop=' ': is blank; give a value",
    "user.model='\u200b'": r"user.model='\u200b': is blank; give a value",
    "model.path='\t'": r"model.path='\t': is blank; give a value",
    "run.wandb_tags=[a, '']": "run.wandb_tags='': is blank; give a value",
    f"run.wandb_tags=[a, {'x' * 65}]": f"run.wandb_tags={'x' * 65}: must have at most 64 characters; choose an",
    "run.wandb_project=team/runs": "run.wandb_project=team/runs: must have at most 128 characters, none of / \\ # ? %",
    f"run.wandb_project={'x' * 129}": f"run.wandb_project={'x' * 129}: must have at most 128 characters, none of ",
    # Seconds and steps
    "launch.timeout=1e-9": "launch.timeout=1e-09: must be at least 1",
    "rollout.deadline=1e-9": "rollout.deadline=1e-09: must be at least 0.1",
    "reward.judge.timeout=1e-9": "reward.judge.timeout=1e-09: must be at least 0.1",
    "optim.warmup_steps=101": "optim.warmup_steps=101: ends beyond the run, train.steps=100; lower it",
    "rollout.server.max_total_tokens=10": "rollout.server.max_total_tokens=10: must hold a conversation of ",
    # Addresses
    "user.api_base=notaurl": "user.api_base=notaurl: must begin with http:// or https://, as http://HOST:PORT",
    "reward.judge.api_base='http://h:99999'": "reward.judge.api_base=http://h:99999: port 99999 does not exist",
    "user.api_base='http://user@h/v1'": "user.api_base=http://***@h/v1: contains a user or a password; remove it",
    "users={a: {class: llm, api_base: 'file:x'}}": "users.a.api_base=file:x: must begin with http://",
    "rollout.mcp_servers={a: {url: 'http://h:0'}}": "rollout.mcp_servers.a.url=http://h:0: port 0 does not exist",
    "user.headers={X A: b}": "user.headers.X A: is no name of a header; use letters, digits and -",
    "user.headers={X-A: 'é'}": "user.headers.X-A=é: must be printable ASCII",
    # Files and folders to write
    "run.dir=/": "run.dir=/: is the root folder; choose another",
    "run.dir=/proc/x": "run.dir=/proc/x: cannot be used (No such file or directory: /proc); choose another run.dir",
    "llm.cache=/dev/null": "llm.cache=/dev/null: cannot be used (it is not a folder); choose another llm.cache",
    "llm.record=/dev/null/x": "llm.record=/dev/null/x: cannot be used (/dev/null is not a folder); choose another ",
    "data.dir='~nobody/x'": "data.dir=~nobody/x: only ~/ at the beginning of an option is expanded; give the whole",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_level_tokenizer(300).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(MODEL))
    write_weights(folder)
    return folder


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    began = time.monotonic()
    assert started(tmp_path, model, "d.jsonl", GOOD, "rl", setting) == EXIT_BAD_INPUT
    assert time.monotonic() - began < 60
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("megatron-collab: ") and err.count("\n") == 1, err
    assert REFUSED[setting] in err


BLOCKED = {  # by command: arguments that name what cannot be written, and the line
    "score": (
        "run --reward=run --out=folder",
        "--out=folder: cannot be used (it is a folder, not a file); choose anoth",
    ),
    "convert": ("run file/x --model=m", "OUT=file/x: cannot be used ("),
    "prepare-data": (
        "rows.jsonl --to=rl --out=file",
        "--out=file: cannot be used (it is not a folder); choose another",
    ),
    "users-from-logs": ("rows.jsonl --out=/", "--out=/: is the root folder; choose another"),
    "reproduce": ("booking --record=file/x/y", "--record=file/x/y: cannot be used ("),
    "quickstart": ("--root=~me/runs", "--root=~me/runs: only ~/ at the beginning of an option is expanded; give the "),
}


@pytest.mark.parametrize("command", BLOCKED)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    arguments, message = BLOCKED[command]
    console.begin()
    main = reproduce if command == "reproduce" else partial(run, command)
    assert main(arguments.split()) == EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"megatron-collab: {message}") and err.count("\n") == 1, err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


@pytest.mark.processes
def test_a_micro_batch_of_one_token_is_none_but_of_one_sequence(tmp_path: Path, model: Path) -> None:
    """The audit had it among what cannot be: a longer sequence goes alone, so it can."""
    assert started(tmp_path, model, "d.jsonl", GOOD, "rl", "train.tokens_per_micro_batch=1") == "started"


def test_a_name_that_is_too_long_is_refused_in_one_line(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system refuses to look for it."""
    settings = ["reward.weights={token_amount: -1}", f"run.dir={tmp_path}/run", f"model.path={model}"]
    assert evaluate.main([*settings, f"data.eval={tmp_path}/{'x' * 300}"]) == EXIT_BAD_INPUT
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "File name too long" in err
