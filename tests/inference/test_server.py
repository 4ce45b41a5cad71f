"""The real server: seeds decide samples, log-probs are the model's, keys are required, processes end."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
import psutil
import pytest

from megatron_collab.config import Config
from megatron_collab.data.chat_template import ChatRenderer, load_tokenizer
from megatron_collab.inference import KEY_VARIABLE, PARENT_VARIABLE
from megatron_collab.inference import server as server_module
from megatron_collab.inference.assistant import Renderer
from megatron_collab.inference.client import EngineError, SGLangClient
from megatron_collab.inference.router import Router
from megatron_collab.inference.server import ServerError, SGLangServer
from megatron_collab.inference.spec import ClientSpec
from megatron_collab.rollout import thinking
from megatron_collab.runtime import device, files, stacks, toolkit
from megatron_collab.settings import SamplingConfig
from megatron_collab.types import Finish, ToolCall, Turn
from tests.conftest import Served, serving_config
from tests.helpers import make_model, policy_servers
from tests.ranks import EXPERTS, HF

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPTS = [tuple(row) for row in np.random.default_rng(0).integers(3, 500, (40, 24)).tolist()]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def with_client(server: SGLangServer, use: Callable[[SGLangClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        client = SGLangClient(server.url, server.api_key, ClientSpec(60.0, "qwen25"))
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


def sample(
    server: SGLangServer,
    requests: list[tuple[tuple[int, ...], int]],
    at_once: bool,
    tokens: int = 12,
    sampling: SamplingConfig | None = None,
) -> list[Turn]:
    """One turn for each (prompt, seed), all concurrently or one after the other."""
    return sample_and_count(server, requests, at_once, tokens, sampling)[0]


def sample_and_count(
    server: SGLangServer,
    requests: list[tuple[tuple[int, ...], int]],
    at_once: bool,
    tokens: int = 12,
    sampling: SamplingConfig | None = None,
) -> tuple[list[Turn], Counter[str]]:
    """As `sample`, and how many tokens of the prompts were computed and how many were cached."""

    async def use(client: SGLangClient) -> tuple[list[Turn], Counter[str]]:
        calls = [
            client.generate(prompt, max_new_tokens=tokens, sampling=sampling or SamplingConfig(), seed=seed)
            for prompt, seed in requests
        ]
        turns = await asyncio.gather(*calls) if at_once else [await call for call in calls]
        return turns, client.counters

    return with_client(server, use)


def flush(server: SGLangServer) -> None:
    headers = {"Authorization": f"Bearer {server.api_key}"}
    with urlopen(Request(server.url + "/flush_cache", b"", headers), timeout=60) as answer:
        assert answer.status == 200


@pytest.fixture
def server(servers: dict[str, Served]) -> SGLangServer:
    return servers["untied"].server


@pytest.mark.processes
def test_a_turn_that_is_followed_is_the_same_turn(server: SGLangServer) -> None:
    texts: list[str] = []

    async def use(client: SGLangClient) -> list[Turn]:
        options: Any = {"max_new_tokens": 40, "sampling": SamplingConfig(), "seed": 1}
        return [await client.generate(PROMPTS[0], **options, **more) for more in ({}, {"progress": texts.append})]

    whole, followed = with_client(server, use)
    assert whole == followed and len(whole.token_ids) > 12
    assert len(texts) > 2 and texts[-1] == whole.text and all(whole.text.startswith(text) for text in texts)


@pytest.mark.processes
def test_a_seed_decides_the_sample_whatever_the_batch(server: SGLangServer) -> None:
    requests = [(prompt, 100 + i) for i, prompt in enumerate(PROMPTS)]
    alone = sample(server, requests[:6], at_once=False)
    together = sample(server, requests, at_once=True)
    reordered = sample(server, requests[::-1], at_once=True)[::-1]
    # equal to the last bit, log-probs included
    assert together[:6] == alone
    assert reordered == together


@pytest.mark.processes
def test_a_seed_decides_the_sample_whatever_is_cached(server: SGLangServer) -> None:
    first = sample(server, [(prompt, i) for i, prompt in enumerate(PROMPTS)], at_once=True)
    longer = [(turn.prompt_ids + turn.token_ids + (9, 9), i) for i, turn in enumerate(first)]
    from_the_cache, warm = sample_and_count(server, longer, at_once=True)
    flush(server)
    from_nothing, cold = sample_and_count(server, longer, at_once=True)
    # equal to the last bit, log-probs included
    assert from_the_cache == from_nothing
    # all but what is new: the last token sampled, which was never read, and the two after it
    assert warm["prefill_tokens"] == 3 * len(PROMPTS)
    assert cold["cached_tokens"] < 0.05 * cold["prefill_tokens"]


@pytest.mark.processes
def test_a_prompt_asked_for_at_once_is_read_once(server: SGLangServer) -> None:
    flush(server)
    turns, tokens = sample_and_count(server, [(PROMPTS[2], seed) for seed in range(8)], at_once=True)
    assert len({turn.token_ids for turn in turns}) == 8
    # SGLang computes the last token of a prompt again for every request
    assert tokens["prefill_tokens"] == len(PROMPTS[2]) + 7


@pytest.mark.processes
def test_sampling_is_what_was_asked_for(server: SGLangServer) -> None:
    requests = [(PROMPTS[0], seed) for seed in range(40)]
    greedy = sample(server, requests, at_once=True, sampling=SamplingConfig(top_k=1))
    assert len({turn.token_ids for turn in greedy}) == 1
    few = sample(server, requests, at_once=True, tokens=1, sampling=SamplingConfig(top_k=3))
    assert len({turn.token_ids for turn in few}) == 3
    nucleus = SamplingConfig(top_p=0.5)
    likely = sample(server, requests, at_once=True, tokens=1, sampling=nucleus)
    assert likely == sample(server, requests[::-1], at_once=True, tokens=1, sampling=nucleus)[::-1]
    distinct = {turn.token_ids: math.exp(turn.log_probs[0]) for turn in likely}
    assert sum(distinct.values()) - min(distinct.values()) < 0.5


@pytest.mark.processes
def test_the_engine_finds_calls_of_tools_known_or_not(server: SGLangServer) -> None:
    async def use(client: SGLangClient) -> list[list[ToolCall]]:
        texts = [f"so: {CALL}", "no call", CALL.replace("add", "subtract")]
        return [await client.tool_calls(text, [SCHEMA]) for text in texts]

    assert with_client(server, use) == [[ToolCall("add", {"a": 1})], [], [ToolCall("subtract", {"a": 1})]]


@pytest.mark.processes
def test_another_seed_gives_another_sample(server: SGLangServer) -> None:
    turns = sample(server, [(PROMPTS[0], seed) for seed in range(40)], at_once=True)
    assert len({turn.token_ids for turn in turns}) == 40


@pytest.mark.processes
@pytest.mark.parametrize("count", [1000, pytest.param(3000, marks=pytest.mark.slow)])
def test_samples_follow_the_log_probs(server: SGLangServer, count: int) -> None:
    turns = sample(server, [(PROMPTS[1], seed) for seed in range(count)], at_once=True, tokens=1)
    probability = {turn.token_ids[0]: math.exp(turn.log_probs[0]) for turn in turns}
    seen = Counter(turn.token_ids[0] for turn in turns)
    frequent = [token for token in seen if probability[token] * count >= 5]
    assert len(frequent) > 20
    # Tokens of small probability are pooled, those never seen included.
    expected = [probability[token] * count for token in frequent]
    observed = [seen[token] for token in frequent]
    expected.append(count - sum(expected))
    observed.append(count - sum(observed))
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(frequent)
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.processes
def test_a_turn_ends_at_its_budget_or_with_its_end(server: SGLangServer) -> None:
    requests = [(prompt, seed) for prompt in PROMPTS for seed in range(3)]  # about every fifth ends by itself
    turns = sample(server, requests, at_once=True, tokens=60)
    for turn in turns:
        ended = turn.token_ids[-1] == 2
        assert turn.finish is (Finish.STOP if ended else Finish.LENGTH)
        assert ended or len(turn.token_ids) == 60
        assert 2 not in turn.token_ids[:-1]
        assert "<|im_end|>" not in turn.text
    assert {turn.finish for turn in turns} == {Finish.STOP, Finish.LENGTH}


class Closing:
    """The part of a renderer that thinking budgets use; token 5 ends a thought of this model."""

    thought_end = 5

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        return True

    def tokens(self, text: str) -> tuple[int, ...]:
        return (7, 5, 8)


@pytest.mark.processes
def test_a_thought_and_its_reply_are_sampled_as_one_turn_would_be(server: SGLangServer) -> None:
    """In two requests, bitwise equal; and after a forced end of the thought as after a prompt that contains it."""
    budgets = SamplingConfig(thinking_budget=30, max_new_tokens=30)

    async def use(client: SGLangClient) -> list[tuple[Turn, Turn, Turn | None]]:
        async def sample_both(seed: int, prompt: tuple[int, ...]) -> tuple[Turn, Turn, Turn | None]:
            ask = partial(client.generate, sampling=budgets, seed=seed)
            turn = await thinking.sample_turn(ask, cast(Renderer, Closing()), prompt, budgets, 1000)
            closed = turn.forced[1]
            after = await ask(prompt + turn.token_ids[:closed], max_new_tokens=30) if closed else None
            return turn, await ask(prompt, max_new_tokens=60), after

        return await asyncio.gather(*(sample_both(seed, prompt) for seed, prompt in enumerate(PROMPTS * 2)))

    results = with_client(server, use)
    assert {bool(turn.forced[1]) for turn, *_ in results} == {True, False}
    for turn, plain, after in results:
        sampled = turn.forced[0] if after else min(len(turn.token_ids), len(plain.token_ids))
        assert turn.token_ids[:sampled] == plain.token_ids[:sampled]
        assert turn.log_probs[:sampled] == plain.log_probs[:sampled]
        if after:
            assert sampled == 30 and turn.token_ids[30:33] == (7, 5, 8)
            assert (turn.token_ids[33:], turn.log_probs[33:]) == (after.token_ids, after.log_probs)
            assert turn.finish is after.finish


@pytest.mark.processes
def test_turns_that_pause_are_those_that_do_not(servers: dict[str, Served]) -> None:
    """With the same weights, bitwise and with their texts; the server aborts each up to twice, wherever it is."""
    server = servers["untied"].server
    renderer = ChatRenderer(str(servers["untied"].folder))

    async def run() -> tuple[list[Turn], list[Turn], list[Turn]]:
        address = [(server.url, server.api_key)]
        router = Router(address, ClientSpec(60.0, "qwen25"), unpublished=True, decode=renderer.text)
        ask = partial(router.generate, sampling=SamplingConfig(), affinity="a")
        try:
            undisturbed = await asyncio.gather(*(ask(p, seed=n, max_new_tokens=60) for n, p in enumerate(PROMPTS)))
            with router.group("a", 0, []):
                tasks = [asyncio.create_task(ask(p, seed=n, max_new_tokens=60)) for n, p in enumerate(PROMPTS)]
                kept = list[Turn]()
                for seed in (1000, 1001):
                    await ask(PROMPTS[0], seed=seed, max_new_tokens=8)
                    router.pause()
                    await asyncio.to_thread(server.ask, "/pause_generation", {"mode": "abort"})
                    kept += [turn for _, turn in (await router.paused())["a"]]
                    await asyncio.to_thread(server.ask, "/continue_generation", {})
                    router.resume()
                return undisturbed, await asyncio.gather(*tasks), kept
        finally:
            await router.close()

    undisturbed, paused, kept = asyncio.run(run())
    assert len([turn for turn in kept if turn.finish is Finish.ABORT and turn.token_ids]) > len(PROMPTS) // 2
    assert paused == undisturbed


@pytest.mark.processes
def test_markers_of_calls_are_in_the_text_if_there_are_tools(servers: dict[str, Served]) -> None:
    """Mistral's is a special token."""
    spec = ClientSpec(60.0, "mistral", calls_tools=True)
    served = servers["untied"]
    special = load_tokenizer(str(served.folder), "model.path").added_tokens_decoder

    async def run() -> tuple[list[Turn], list[ToolCall]]:
        client = SGLangClient(served.server.url, served.server.api_key, spec)
        try:
            pending = (client.generate(p, max_new_tokens=60, sampling=SamplingConfig(), seed=0) for p in PROMPTS)
            called = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'
            return await asyncio.gather(*pending), await client.tool_calls(called, [SCHEMA])
        finally:
            await client.close()

    turns, calls = asyncio.run(run())
    assert calls == [ToolCall("add", {"a": 1})]
    shown = 0
    for turn in turns:
        marks = [special[token].content for token in turn.token_ids if token in special and token != 2]
        shown += len(marks)
        assert all(mark in turn.text for mark in marks) and special[2].content not in turn.text
    assert shown > 0


@pytest.mark.processes
@pytest.mark.parametrize(
    "path", ["/begin_weight_update", "/update_weights_from_tensor", "/update_weights_from_disk", "/generate"]
)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_nothing_is_served_without_the_key(server: SGLangServer, path: str, headers: dict[str, str]) -> None:
    request = Request(server.url + path, b"{}", {"Content-Type": "application/json", **headers})
    with pytest.raises(HTTPError) as refused:
        urlopen(request, timeout=60)
    assert refused.value.code == 401


@pytest.mark.processes
def test_weights_stay_what_they_are_without_the_key(servers: dict[str, Served]) -> None:
    server, other_model = servers["untied"].server, servers["tied"].folder
    requests = [(prompt, seed) for seed, prompt in enumerate(PROMPTS[:4])]
    before = sample(server, requests, at_once=True)
    body = json.dumps({"model_path": str(other_model), "flush_cache": True}).encode()
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        request = Request(
            server.url + "/update_weights_from_disk", body, {"Content-Type": "application/json", **headers}
        )
        with pytest.raises(HTTPError, match="401"):
            urlopen(request, timeout=60)
    assert sample(server, requests, at_once=True) == before


@pytest.mark.processes
def test_a_server_listens_on_its_own_address_only(servers: dict[str, Served]) -> None:
    server = servers["untied"].server
    listening = {
        (socket.laddr.ip, socket.laddr.port)
        for process in group(server.process.pid)
        for socket in psutil.Process(process).net_connections("inet")
        if socket.status == psutil.CONN_LISTEN
    }
    assert urlsplit(server.url).port in {port for _, port in listening}
    assert {address for address, _ in listening} == {"127.0.0.1"}


@pytest.mark.processes
def test_a_wrong_key_is_an_engine_error(server: SGLangServer) -> None:
    async def run() -> None:
        client = SGLangClient(server.url, "wrong", ClientSpec(10.0, "qwen25"))
        try:
            await client.generate((5, 6), max_new_tokens=1, sampling=SamplingConfig(), seed=0)
        finally:
            await client.close()

    with pytest.raises(EngineError, match="401"):
        asyncio.run(run())


@pytest.mark.processes
def test_the_key_is_in_no_argument_and_no_log(servers: dict[str, Served]) -> None:
    for served in servers.values():
        server = served.server
        for process in group(server.process.pid):
            assert server.api_key not in Path(f"/proc/{process}/cmdline").read_text()
        assert server.api_key not in server.log.read_text()


@pytest.mark.processes
def test_a_server_is_told_with_whose_end_it_ends(servers: dict[str, Served]) -> None:
    for served in servers.values():
        environment = Path(f"/proc/{served.server.process.pid}/environ").read_bytes().split(b"\0")
        assert f"{PARENT_VARIABLE}={os.getpid()}".encode() in environment


@pytest.mark.processes
def test_a_restarted_server_has_the_same_address_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], str]] = []
    popen = subprocess.Popen

    def sleeps(command: list[str], env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        started.append((command, env[KEY_VARIABLE]))
        return popen(["sleep", "600"], env=env, **options)

    monkeypatch.setattr(subprocess, "Popen", sleeps)
    with SGLangServer(policy_servers(serving_config(tmp_path)), tmp_path / "log") as server:
        url, key = server.url, server.api_key
        server.released = {"weights"}
        os.kill(server.process.pid, signal.SIGKILL)
        assert wait_until(lambda: not server.alive(), 60)
        server.restart()
        assert server.alive() and (server.url, server.api_key, server.generation) == (url, key, 1)
        assert server.released == set(), "a new process has its memory"
    (command, first_key), second_start = started
    assert (
        second_start == (command, first_key)
        and first_key == key
        and f"--port {urlsplit(url).port}" in " ".join(command)
    )


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A model for servers on GPUs."""
    monkeypatch.setattr(device, "select", lambda setting: device.Device("cuda", "nccl"))
    (tmp_path / "config.json").write_text(json.dumps(HF))
    return tmp_path


def arguments(
    model: Path, index: int, nodes: int = 1, adapter: Path | None = None, **server: object
) -> dict[str, str | None]:
    """Arguments of a server, by name; None: a flag."""
    config = Config()
    config.model.path, config.launch.nproc_per_node, config.launch.nodes = str(model), 4, nodes
    for name, value in server.items():
        setattr(config.rollout.server, name, value)
    words = server_module.arguments(policy_servers(config), "http://10.0.0.1:30000", index, adapter=adapter)
    return {
        word[2:]: None if following.startswith("--") else following
        for word, following in pairwise([*words, "--"])
        if word.startswith("--")
    }


def test_arguments_on_gpus(on_gpus: Path) -> None:
    expected = {
        "model-path": str(on_gpus),
        "host": "10.0.0.1",
        "port": "30000",
        "tp-size": "2",
        "ep-size": "2",
        "dtype": "bfloat16",
        "max-running-requests": "256",
        "random-seed": "0",
        "weight-version": "-1",
        "log-level": "warning",
        "custom-weight-loader": "megatron_collab.weight_sync.receiver.receive",
        "base-gpu-id": "2",
        "sleep-on-idle": None,
        "skip-server-warmup": None,
        "enable-memory-saver": None,
    }
    assert arguments(on_gpus, 1, tp=2, ep=2, replicas=2) == expected
    del expected["enable-memory-saver"]
    assert arguments(on_gpus, 1, tp=2, ep=2, replicas=2, colocated=False) == expected | {"base-gpu-id": "6"}


def test_gpus_are_counted_within_a_node(on_gpus: Path) -> None:
    devices = [arguments(on_gpus, index, nodes=2, tp=2, replicas=4)["base-gpu-id"] for index in range(4)]
    assert devices == ["0", "2", "0", "2"]
    assert arguments(on_gpus, 3, nodes=2, tp=2, replicas=4, colocated=False)["base-gpu-id"] == "6"


def test_a_server_in_fp8_is_told_its_blocks_and_loads_no_weights(on_gpus: Path) -> None:
    added = dict(arguments(on_gpus, 0, fp8=True).items() - arguments(on_gpus, 0).items())
    blocks = json.loads(added.pop("json-model-override-args") or "")
    assert added == {"load-format": "dummy"}
    assert blocks == {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    }


def test_a_server_with_adapters_has_a_slot_for_them_and_gets_its_base_back(on_gpus: Path) -> None:
    added = dict(arguments(on_gpus, 0, adapter=Path("/made")).items() - arguments(on_gpus, 0).items())
    adapters = {"lora_name": "policy", "lora_path": "/made", "pinned": True}
    assert json.loads(added.pop("lora-paths") or "") == adapters
    assert added == {"max-loras-per-batch": "2", "enable-weights-cpu-backup": None}
    assert "enable-weights-cpu-backup" not in arguments(on_gpus, 0, adapter=Path("/made"), colocated=False)


def test_experts_are_computed_by_a_kernel_that_takes_their_weights_as_they_are(on_gpus: Path) -> None:
    assert "moe-runner-backend" not in arguments(on_gpus, 0)
    (on_gpus / "config.json").write_text(json.dumps(HF | EXPERTS))
    assert arguments(on_gpus, 0)["moe-runner-backend"] == "triton"


def test_servers_on_a_cpu_have_products_whose_rows_do_not_depend_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKL_CBWR", raising=False)
    config = Config()
    config.launch.device = "cpu"
    assert server_module._environment(policy_servers(config), "key", 0)["MKL_CBWR"] == "AUTO,STRICT"


def test_the_environment_on_gpus(on_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(toolkit, "cuda_home", lambda: "/opt/cuda")
    monkeypatch.setattr(toolkit, "wheels", lambda: Path("/wheels/cu13"))
    monkeypatch.setattr(toolkit, "libraries", lambda: ["/wheels/cu13/lib"])
    monkeypatch.setenv("CUDA_PATH", "/opt/cuda-12.4")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    environment = server_module._environment(policy_servers(Config()), "key", 0)
    assert environment["CUDA_HOME"] == "/opt/cuda" and environment["LD_LIBRARY_PATH"] == "/wheels/cu13/lib:/opt/lib"
    assert "CUDA_PATH" not in environment
    # SGLang would refuse to start with these.
    assert not [name for name in environment if "ALLOC_CONF" in name or "MEMORY_SAVER" in name]
    # Without it a first start in FP8 exceeds start_timeout.
    assert environment["SGLANG_JIT_DEEPGEMM_FAST_WARMUP"] == "1"
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    for name in ("SGLANG_CACHE_DIR", "SGLANG_JIT_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        assert socket.gethostname() in Path(environment[name]).parts
    monkeypatch.setenv("SGLANG_CACHE_DIR", "/scratch")
    assert server_module._environment(policy_servers(Config()), "key", 0)["SGLANG_CACHE_DIR"] == "/scratch"


@pytest.mark.processes
def test_a_busy_port_is_one_line_that_names_the_setting(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        config = serving_config(tmp_path)
        config.rollout.server.port = busy.getsockname()[1]
        with pytest.raises(ServerError, match=r"^rollout\.server\.port=\d+: address already in use; choose another.*$"):
            SGLangServer(policy_servers(config), tmp_path / "log")


@pytest.mark.slow
@pytest.mark.processes
def test_a_server_that_dies_shows_its_last_words_and_leaves_no_files(tmp_path: Path) -> None:
    with SGLangServer(policy_servers(serving_config(tmp_path / "no-model")), tmp_path / "log") as server:
        process = psutil.Process(server.process.pid)
        assert wait_until(process.environ, 30), "the kernel shows none until the program has been loaded"
        folder = Path(process.environ()["TMPDIR"])
        (folder / "left").touch()
        with pytest.raises(
            ServerError, match=r"SGLang server 0: it ended with code 1; the end of .*log:(.|\n)*no-model"
        ):
            server.wait_healthy(120.0)
        assert not server.alive()
    assert not folder.exists()


def group(leader: int) -> list[int]:
    """Processes of the group that have not ended."""
    members = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if os.getpgid(int(process.name)) == leader and state != "Z":
                members.append(int(process.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return members


def wait_until(holds: object, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_trainer_takes_its_server_along(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    code = (
        "import time\nfrom pathlib import Path\nfrom tests.conftest import serving_config\n"
        "from tests.helpers import policy_servers\n"
        "from megatron_collab.inference.server import SGLangServer\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "spec = policy_servers(serving_config(folder / 'model'))\n"
        "print(SGLangServer(spec, folder / 'log').process.pid, flush=True)\n"
        "time.sleep(600)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None
        leader = int(trainer.stdout.readline())
        # SGLang, the scheduler, the detokenizer
        assert wait_until(lambda: len(group(leader)) == 3, 120)
        folder = Path(psutil.Process(leader).environ()["TMPDIR"])
        assert list(folder.iterdir()), "its sockets are there"
        trainer.send_signal(signal.SIGKILL)
        assert wait_until(lambda: not group(leader), 60)
        files.remove_abandoned()  # as the next start does
        assert not folder.exists()
    finally:
        trainer.kill()
        trainer.wait()
        for process in group(leader):
            os.kill(process, signal.SIGKILL)


@pytest.mark.processes
def test_every_process_of_a_server_says_where_it_stands(servers: dict[str, Served]) -> None:
    written = servers["untied"].folder.parent / "stacks"
    began = time.monotonic()
    stacks.ask(written, 30.0)
    assert time.monotonic() - began < 30.0, "not every process has written"
    assert any("in event_loop" in file.read_text() for file in written.glob("untied-*.txt"))
