"""The doctor lists what was found and what replaces the rest, and the GPU memory that a run needs."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from aiohttp import web

from megatron_collab import patches
from megatron_collab.commands import doctor
from megatron_collab.commands.__main__ import run
from megatron_collab.config import CONF
from megatron_collab.data.datasets import write_jsonl
from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_to_megatron import ModelShape, WeightEntry
from megatron_collab.runtime.device import Probe, probes
from megatron_collab.runtime.process import EXIT_BAD_INPUT
from tests.checkpoint.test_model_folders import BOUND, EQUAL, REFUSED, SMALL
from tests.helpers import make_model
from tests.llm.endpoint import Endpoint, fails, says

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.processes
def test_every_probe_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", []) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows.pop(1).split()[:2] == ["python", platform.python_version()]
    assert [row.split()[0] for row in rows[1 : len(probes()) + 1]] == [probe.name for probe in probes()]
    for row, probe in zip(rows[1:], probes(), strict=False):
        assert probe.detail in row and probe.enables in row
        assert ("missing" in row) != probe.available
        assert probe.available or f"-> {probe.fallback}" in row
    printed = "\n".join(rows)
    assert all(patch.name in printed for patch in patches.register() if patch.when())
    assert "launch.device=auto selects" in rows[-1]


def test_what_is_required_and_missing_ends_in_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = [Probe("ray", False, "not installed", "conversations and scoring", "")]
    monkeypatch.setattr(doctor.device, "probes", lambda: lacking)
    assert run("doctor", []) == 1
    printed = capsys.readouterr().out
    assert "missing: not installed" in printed and "-> nothing: required" in printed
    assert "Required and missing: ray. Run make setup." in printed


@pytest.mark.processes
def test_a_plan_needs_nothing_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither model nor data nor devices nor TransformerEngine, which this run would use."""
    assert run("doctor", ["--plan", "experiment=train_70b"]) == 0
    printed = capsys.readouterr().out
    assert "on 128 GPUs: launch.nodes=16 x launch.nproc_per_node=8" in printed and "data parallel 4" in printed
    rows = {line[:34].strip(): line[34:].split() for line in printed.splitlines()}
    names = ["parameters", "gradients", "optimizer", "reference", "activations"]
    names += ["head", "server: weights", "server: KV cache", "weight sync buckets"]  # of the last stage, the fullest
    for column in range(2):
        assert float(rows["sum"][column]) == pytest.approx(sum(float(rows[name][column]) for name in names), abs=0.05)
    assert "The largest part is server: KV cache." in printed and "Fits a GPU of 79.6 GiB" in printed
    assert (
        "if 512 samples add 512 tokens each (--sample-tokens); mfu is of 989 TFLOP/s" in printed
        and "Faster" not in printed
    )


@pytest.mark.seconds
def test_a_plan_names_a_faster_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """The pipeline of four stages before it had virtual ones: (4 - 1) of 8 + 4 - 1 passes are its bubble."""
    plain = ["parallel.vpp=1", "train.tokens_per_micro_batch=8192"]
    assert run("doctor", ["--plan", "experiment=train_70b", *plain]) == 0
    printed = capsys.readouterr().out
    assert "pipeline bubble 27% with 8 micro-batches" in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("Faster, "))
    assert "parallel.vpp=4" in line and "parallel.tp" not in line


@pytest.mark.processes
def test_a_plan_that_does_not_fit_names_a_layout_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Although it is hardly faster."""
    assert run("doctor", ["--gpu-gib", "70", "--plan", "experiment=train_70b", "parallel.pp=2"]) == 1
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if line.startswith("Fits, "))
    assert "parallel.pp=4" in line and "Does not fit a GPU of 70 GiB" in printed and "Faster" not in printed


@pytest.mark.seconds
def test_a_search_prints_layouts_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", ["--search", "--plan", "experiment=train_8b", "--sample-tokens", "1024"]) == 0
    printed = capsys.readouterr().out
    assert "if 256 samples add 1024 tokens each" in printed
    rows = [line.partition(": ") for line in printed.splitlines() if ": parallel." in line]
    assert [before.split()[-1] for before, _, _ in rows] == ["set", "1", "2", "3", "4", "5"]
    seconds = [float(before.split()[0]) for before, _, _ in rows]
    assert seconds[1:] == sorted(seconds[1:]) and seconds[1] <= seconds[0]
    assert run("doctor", ["--search", "--plan", "experiment=train_8b", "--gpu-gib", "9"]) == 1
    assert "No layout fits" in capsys.readouterr().out
    assert run("doctor", ["--search", "--plan", "experiment=train_8b", "launch.device=cpu"]) == 2
    assert "--search: times are those of GPUs in bfloat16; set launch.device=cuda" in capsys.readouterr().err


def plan_on_a_login_node(folder: Path, *broken: str) -> subprocess.CompletedProcess[str]:
    """The plan of train_70b where importing one of `broken` raises what a library without its driver raises."""
    for library in broken:
        (folder / f"{library}.py").write_text("raise OSError('libcuda.so.1: cannot open')")
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "megatron_collab.commands", "doctor", "--plan", "experiment=train_70b"]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.processes
def test_a_plan_needs_no_library_of_gpus(tmp_path: Path) -> None:
    done = plan_on_a_login_node(tmp_path, "flash_mla", "deep_ep", "transformer_engine")
    assert done.returncode == 0, done.stderr
    assert "Fits a GPU of 79.6 GiB" in done.stdout


@pytest.mark.processes
def test_a_plan_without_what_it_needs_is_refused_in_one_line(tmp_path: Path) -> None:
    done = plan_on_a_login_node(tmp_path, "torch")
    assert done.returncode == 2 and done.stdout == ""
    message = "--plan: torch or Megatron-Core cannot be imported on this machine: OSError: libcuda.so.1: cannot open"
    assert done.stderr == f"megatron-collab: {message}\n"


@pytest.mark.seconds
def test_a_plan_that_does_not_fit_ends_in_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", ["--gpu-gib", "40", "--plan", "experiment=train_70b", "parallel.offload=true"]) == 1
    printed = capsys.readouterr().out
    assert "Does not fit a GPU of 40 GiB" in printed
    assert "pinned in host memory of a node until the run ends: 51.0 GiB, for the optimizer state" in printed


@pytest.mark.seconds
def test_a_plan_names_gpus_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    for replicas, idle in ((8, False), (2, True)):
        assert run("doctor", ["--plan", "experiment=train_8b", f"rollout.server.replicas={replicas}"]) == 0
        printed = capsys.readouterr().out
        assert ("6 of the 8 GPUs of a node have no server" in printed) == idle
        assert "pinned in host memory of a node until the run ends: 90.0 GiB" in printed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=/models/unknown", "model.path=/models/unknown: neither"),
        ("parallel.tp=16", "parallel.tp=16: does not divide the model's 8 key/value heads"),
        ("parallel.pp=3", "x parallel.pp=3 x parallel.cp=1 does not divide the 128 ranks"),
        ("parallel.pq=3", "parallel.pq"),
    ],
)
def test_a_plan_of_what_cannot_be(capsys: pytest.CaptureFixture[str], override: str, message: str) -> None:
    assert run("doctor", ["--plan", "experiment=train_70b", override]) == 2
    printed, line = capsys.readouterr()
    assert printed == "" and line.count("\n") == 1 and message in line


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama", "hidden_size": "64"}'])
def test_a_plan_of_a_broken_description(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert run("doctor", ["--plan", "experiment=train_70b", f"model.path={tmp_path}"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and f"model.path={tmp_path}: config.json: " in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-gib", "0"], "--gpu-gib: invalid positive value: '0'"),
        (["--gpu-gib", "-1"], "--gpu-gib: invalid positive value: '-1'"),
        (["--gpu-gib", "nan"], "--gpu-gib: invalid positive value: 'nan'"),
        (["--gpu-gib", "much"], "--gpu-gib: invalid positive value: 'much'"),
        (["--plan"], "--plan: expected at least one argument"),
        (["--pan"], "unrecognized arguments: --pan"),
        (["--search"], "--search: needs --plan with the options of a run"),
        (["--sample-tokens", "0"], "--sample-tokens: invalid positive value: '0'"),
    ],
    ids=str,
)
def test_wrong_options_of_the_doctor(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run("doctor", arguments)
    printed, line = capsys.readouterr()
    assert ended.value.code == 2 and printed == ""
    assert line.startswith("megatron-collab: ") and line.count("\n") == 1 and message in line


@pytest.mark.seconds
def test_the_folder_of_the_model_comes_before_the_known_shapes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "Llama-3.3-70B-Instruct"
    folder.mkdir()
    smaller = (CONF / "shapes" / "Llama-3.1-8B-Instruct.json").read_text()
    (folder / "config.json").write_text(smaller)
    assert run("doctor", ["--plan", "experiment=train_70b", f"model.path={folder}", "--gpu-gib", "30"]) == 0
    assert "Fits a GPU of 30 GiB" in capsys.readouterr().out


def test_data_is_shown_as_it_would_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"from": "human", "value": "A table, please."}, {"from": "gpt", "value": "For how many?"}]
    rows = {
        "tasks": [{"question": f"{i} + {i}?", "answer": f"#### {2 * i}"} for i in range(7)],
        "chats": [{"conversations": turns}, {"conversations": turns[1:]}],
        "sft": [{"prompt": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}],
        "other": [{"a": 1}],
        "graded": [{"prompt": [{"role": "user", "content": "hi"}], "rubrics": [{"criterion": "Greets.", "points": 1}]}],
    }
    for name, entries in rows.items():
        write_jsonl(tmp_path / f"{name}.jsonl", entries)
    assert run("doctor", ["--data", str(tmp_path / "tasks.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert "read as question_answer, since it has question, answer" in printed and "7 rows, 7 tasks" in printed
    assert printed.count("\ntask ") == 5 and "answer:    8" in printed and "answer:    10" not in printed
    assert run("doctor", ["--data", f"{{source: {tmp_path}/chats.jsonl}}"]) == 0
    printed = capsys.readouterr().out
    assert "2 rows, 1 tasks; left out: 1 that are not user and assistant in turn" in printed
    assert run("doctor", ["--data", str(tmp_path / "sft.jsonl")]) == 0
    assert "1 rows, 1 conversations" in capsys.readouterr().out
    assert run("doctor", ["--data", str(tmp_path / "graded.jsonl")]) == 0
    assert "1 rows, 1 tasks" in capsys.readouterr().out
    both = f"[{{source: {tmp_path}/tasks.jsonl, weight: 2}}, {{source: {tmp_path}/chats.jsonl}}]"
    evaluated = f"{{source: {tmp_path}/tasks.jsonl, samples: 4}}"
    for source, shown in ((both, ["7 rows, 7 tasks", "2 rows, 1 tasks"]), (evaluated, ["7 rows, 7 tasks"])):
        assert run("doctor", ["--data", source]) == 0
        printed = capsys.readouterr().out
        assert printed.count("read as") == len(shown) and all(part in printed for part in shown)
    for source, message in (
        (
            f"[{{source: {tmp_path}/tasks.jsonl, wieght: 2}}]",
            "--data[0].wieght: no such setting; the nearest is weight",
        ),
        (tmp_path / "other.jsonl", "the columns a match no known format"),
        ("none", "no such file"),
    ):
        assert run("doctor", ["--data", str(source)]) == 2
        assert message in (error := capsys.readouterr().err) and error.count("\n") == 1


async def by_model(request: web.Request) -> web.StreamResponse:
    refused = (await request.json())["model"] == "judge"
    return await (fails(401, "wrong key") if refused else says({"answer": "yes"}))(request)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """An endpoint on a thread of its own, which refuses openai/judge."""
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    loop, endpoint = asyncio.new_event_loop(), Endpoint(by_model)
    thread = Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(endpoint.__aenter__(), loop).result()
    yield endpoint
    asyncio.run_coroutine_threadsafe(endpoint.__aexit__(None, None, None), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


PHONE = """
from megatron_collab.rollout.tools.shared import SharedTools


class Phone(SharedTools):
    USER_FUNCTIONS = ("restart",)

    def restart(self) -> str:
        \"\"\"Restarts.\"\"\"
        return "on"
"""


@pytest.mark.processes
def test_each_model_that_a_run_asks_is_called_once(
    judge: Endpoint, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = f"http://127.0.0.1:{judge.port}/v1"
    run_of = ["experiment=gsm8k", f"data.train={tmp_path}/none.jsonl", "user.name=llm", "user.model=openai/gpt-4o-mini"]
    run_of += ["users.other={model: policy}"]
    settings = [*run_of, f"user.api_base={base}", "reward=verl", f"reward.judge.api_base={base}"]
    settings += ["reward.judge.model=openai/judge"]
    assert run("doctor", ["--llm", *settings]) == 1
    _, *rows, _, fault = capsys.readouterr().out.splitlines()
    cells = {row.split()[0]: row.split()[1:] for row in rows}  # in the order of the answers
    assert cells["users.other.model"][:3] == ["policy", "-", "-"]
    name, seconds, tokens, price = cells["user.model"]
    assert (name, tokens) == ("openai/gpt-4o-mini", "120") and float(seconds) > 0 and float(price) > 0
    assert cells["reward.judge.model"][0] == "openai/judge" and cells["reward.judge.model"][3] == "failed"
    assert fault.startswith("reward.judge.model: openai/judge: AuthenticationError: ") and "wrong key" in fault
    assert len(judge.requests) == 2
    assert run("doctor", ["--llm", *settings, "reward.metrics.accuracy.model=policy"]) == 2
    assert "reward.metrics.accuracy.model=policy: the policy cannot be a judge" in capsys.readouterr().err


@pytest.mark.processes
def test_a_user_in_a_chat_is_called_as_a_run_calls_it(
    judge: Endpoint, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With text as the answer, and with tools if it has some, which its server must take."""
    (tmp_path / "phone.py").write_text(PHONE)
    settings = [
        "experiment=gsm8k",
        f"data.train={tmp_path}/none.jsonl",
        "user.name=llm",
        "user.model=openai/gpt-4o-mini",
    ]
    settings += [f"user.api_base=http://127.0.0.1:{judge.port}/v1", "user.form=chat"]
    settings += [f"rollout.tools=[{tmp_path}/phone.py:Phone]"]
    assert run("doctor", ["--llm", *settings, "user.tools=[restrat]"]) == 2
    assert "no function restrat for users; there are restart; the nearest is restart" in capsys.readouterr().err
    settings += ["user.tools=[restart]"]
    assert run("doctor", ["--llm", *settings, "rollout.max_tool_calls=0"]) == 2
    assert "max_tool_calls=0: leaves no round for calls of user.tools; raise it, or" in capsys.readouterr().err
    assert run("doctor", ["--llm", *settings]) == 0
    assert "user.model  openai/gpt-4o-mini" in capsys.readouterr().out
    (request,) = judge.requests
    assert [message["role"] for message in request["messages"]] == ["system", "user"] and len(request["tools"]) == 1
    assert "response_format" not in request


@pytest.mark.processes
def test_a_server_that_is_not_there_is_not_waited_for(judge: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the deadline, and what answers is shown all the same."""
    settings = ["experiment=gsm8k", "reward=verl", "data.train=none.jsonl", "user.name=llm"]
    settings += ["user.model=openai/m", f"user.api_base=http://127.0.0.1:{judge.port}/v1", "user.deadline=1e7"]
    settings += ["reward.judge.model=hosted_vllm/j", "reward.judge.api_base=http://127.0.0.1:9/v1"]
    began = time.monotonic()
    assert run("doctor", ["--llm", *settings, "reward.judge.deadline=1e7", "reward.judge.timeout=1e7"]) == 1
    assert time.monotonic() - began < 60
    printed = capsys.readouterr().out
    assert "reward.judge.model: hosted_vllm/j: InternalServerError" in printed and "user.model " in printed


def test_a_model_that_does_not_take_a_setting_is_not_called(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["experiment=gsm8k", "reward=verl", "reward.judge.model=openai/gpt-5", "data.train=none.jsonl"]
    assert run("doctor", ["--llm", *settings]) == 2
    printed, line = capsys.readouterr()
    assert printed == "" and line.count("\n") == 1 and "reward.judge.temperature=0.0: openai/gpt-5" in line


@pytest.mark.seconds
def test_the_users_of_an_evaluation_are_asked_too(
    judge: Endpoint, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    task = {"prompt": [{"role": "user", "content": "hi"}], "goal": "g", "user": "reveal"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    sets = f"data.eval=[{{source: {tmp_path}/tasks.jsonl, user: llm}}]"
    run_of = [f"data.train={tmp_path}/tasks.jsonl", f"run.dir={tmp_path}/run", "model.path=m"]
    run_of += ["reward.weights={token_amount: 1}"]
    run_of += ["user.model=openai/gpt-4o-mini", f"user.api_base=http://127.0.0.1:{judge.port}/v1"]
    assert run("doctor", ["--llm", *run_of]) == 0
    assert capsys.readouterr().out == "This run calls no language model.\n" and not judge.requests
    assert run("doctor", ["--llm", *run_of, sets]) == 0
    assert "user.model  openai/gpt-4o-mini" in capsys.readouterr().out and len(judge.requests) == 1


def test_a_run_that_asks_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", ["--llm", "experiment=gsm8k", "data.train=none.jsonl"]) == 0
    assert capsys.readouterr().out == "This run calls no language model.\n"


VARIANTS = [
    "tied",
    "head_dim apart from hidden_size",
    "one key head",
    "epsilon",
    "theta in two places",
    "two groups",
    "linear of old",
    "yarn, mscale",
    "a window of the whole context",
    "norms in float32",
    "files",
    "more rows than tokens",
]


@pytest.fixture
def rank_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the only rank, which the comparison leaves in the environment."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


@pytest.mark.processes
@pytest.mark.parametrize("names", [[VARIANTS[0], VARIANTS[-1]], pytest.param(VARIANTS[1:], marks=pytest.mark.slow)])
def test_models_as_training_reads_them_equal_transformers(
    rank_variables: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], names: list[str]
) -> None:
    for number, name in enumerate(names):
        family, arguments, change = EQUAL[name]
        change(folder := make_model(tmp_path / str(number), family=family, **(SMALL | arguments)))
        assert run("doctor", ["--model", str(folder)]) == 0, capfd.readouterr()
        out = capfd.readouterr().out
        assert f"{family}, 2 layers, " in out and ", within 0.0002" in out, f"{name}: {out}"
        assert float(out.split("log-probs: ")[1].split(",")[0]) < BOUND
        assert ("the embedding (tied)" in out) == (name == "tied")
    assert "461 rows for " in out and "ends a turn with '<|im_end|>'" in out


@pytest.mark.processes
def test_a_model_that_differs_from_transformers(
    rank_variables: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """gate and up change places in the table of weights."""
    table = hf_to_megatron.table

    def wrong(shape: ModelShape) -> tuple[WeightEntry, ...]:
        entries = table(shape)
        return tuple(
            replace(entry, hf=entry.hf[::-1]) if "linear_fc1" in entry.megatron else entry for entry in entries
        )

    monkeypatch.setattr(hf_to_megatron, "table", wrong)
    assert run("doctor", ["--model", str(make_model(tmp_path / "model", **SMALL))]) == 1
    assert ", ABOVE 0.0002" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["tied by the settings alone", "a stale index", "activation", "fp8", "no folder"])
def test_a_model_that_cannot_be_trained(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    if name != "no folder":
        family, arguments, change, _ = REFUSED[name]
        change(make_model(folder, family=family, **(SMALL | arguments)))
    capsys.readouterr()
    assert run("doctor", ["--model", str(folder)]) == EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and str(folder) in err and "; " in err
