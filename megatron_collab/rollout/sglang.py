"""The engine that samples: SGLang as a process of its own, and the client that asks it for turns."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import aiohttp

from megatron_collab import device, stacks, watch
from megatron_collab.config import Config, RolloutConfig, SamplingConfig
from megatron_collab.ports import HOST, bindable
from megatron_collab.processes import RunStopped
from megatron_collab.rollout.tools import ToolCall
from megatron_collab.sglang_cpu.key import KEY_VARIABLE, PARENT_VARIABLE, STACKS_VARIABLE
from megatron_collab.types import Finish, Turn

ATTEMPTS = 5
BACKOFF_SECONDS = 0.25
_Answer = TypeVar("_Answer")

# Left to itself, SGLang fills nearly all memory of the machine with its cache, and touches every page of it.
CPU_CACHE_TOKENS = 2**18

UNPUBLISHED = -1  # version of the weights that a server starts with: none of the run's
MEMORY = ("kv_cache", "weights")  # what a server can release, in this order
HEALTH_SECONDS = 30  # that a server may take to say that it is healthy
IDLE_SECONDS = 60  # that a server may take until the requests that it aborts have ended

# Linear layers in FP8, as SGLang's Fp8Config reads them from config.json.
FP8_BLOCKS = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}

_TORCHRUN_VARIABLES = re.compile(r"(LOCAL_|GROUP_|ROLE_|TORCHELASTIC_|MASTER_)|(RANK|WORLD_SIZE)$")

_LEFT_BEHIND = re.compile(r"/dev/shm/(?:sglang_loads_|sgl_shm_mq_|sem\.mp-)\S+")


class EngineError(RuntimeError):
    """The engine gave no turn; the reason is the text."""


class ServerGone(EngineError):
    """The server stayed away: its address takes no connection, or breaks it, at every try."""


class ServerError(RunStopped):
    """The server could not be started, or has ended; the message says which and shows its last words."""


class SGLangServer:
    """An SGLang server on this machine, started by the constructor; leaving the context ends all of it.

    It listens on the loopback interface only and serves whoever knows `api_key`, which is made for this run.
    It ends with the thread that started it, however that ends.
    `index` is its number in the run, `tp` its tensor-parallel size, `generation` how often it was started again, and
    `released` what of its memory it has given back: kv_cache, weights.
    """

    def __init__(self, config: Config, log: Path, index: int = 0) -> None:
        """Start serving model.path as the server number `index` of the run; its output goes to `log`.

        Raises ServerError for a busy port.
        """
        self.config, self.log, self.index = config, log, index
        self.tp = config.rollout.server.tp
        self.api_key = secrets.token_hex(32)
        self.generation = 0
        first = config.rollout.server.port
        try:
            port = bindable("rollout.server.port", first + index if first else 0)
        except ValueError as error:
            raise ServerError(str(error)) from error
        self.url = f"http://{HOST}:{port}"
        self._arguments = _arguments(config, port, index)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._start()

    def _start(self) -> None:
        self.released: set[str] = set()
        self._ready = False
        written = (self.log.parent / stacks.FOLDER / self.log.stem).resolve()
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_collab.sglang_cpu.serve", *self._arguments],
                env=_environment(self.config, self.api_key, self.index) | {STACKS_VARIABLE: str(written)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # SGLang kills its process group when a part of it fails
            )

    def __enter__(self) -> SGLangServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def alive(self) -> bool:
        return self.process.poll() is None

    def healthy(self) -> bool:
        """Whether requests are served."""
        watch.beat()  # however often that is asked: whoever waits for it has a deadline
        try:
            with urlopen(f"{self.url}/health", timeout=HEALTH_SECONDS):
                pass
            if not self._ready:
                # What start-up made is for good; looking through it again and again would stall requests.
                self._call("/freeze_gc")
                self._ready = True
        except (OSError, HTTPException, ServerError):
            return False
        return True

    def wait_healthy(self, timeout: float) -> None:
        """Return once requests are served; ServerError if the server ends first or needs longer than `timeout` s."""
        deadline = time.monotonic() + timeout
        while not self.healthy():
            if not self.alive():
                raise ServerError(f"SGLang ended with code {self.process.returncode}; {self.last_words()}")
            if time.monotonic() > deadline:
                raise ServerError(
                    f"SGLang was not healthy after rollout.server.start_timeout={timeout:g} s; {self.last_words()}"
                )
            time.sleep(0.1)

    def release(self) -> None:
        """Give the memory of KV cache and weights back, and with it what they hold; ServerError where that fails.

        What was given back already stays so.

        Requests under way are aborted, and later ones wait until the server is told to continue.
        """
        kept = [tag for tag in MEMORY if tag not in self.released]
        if not kept:
            return
        self._call("/pause_generation", mode="abort")
        self._call(f"/flush_cache?timeout={IDLE_SECONDS}")  # waits until it is idle: a busy server dies of a release
        for tag in kept:
            self._call("/release_memory_occupation", tags=[tag])
            self.released.add(tag)

    def resume(self, tag: str) -> None:
        """Take the memory of `tag` again, if it was released: its contents are lost. ServerError where that fails."""
        if tag in self.released:
            self._call("/resume_memory_occupation", tags=[tag])
            self.released.remove(tag)

    def restart(self) -> None:
        """End what is left of the server and start it again, with the same address and key."""
        self.stop()
        self.generation += 1
        self._start()

    def stop(self) -> None:
        """End the server with all its processes."""
        segments = _shared_memory(self.process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for segment in segments:
            segment.unlink(missing_ok=True)

    def last_words(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return "\n  ".join([f"the end of {self.log}:", *lines])

    def _call(self, path: str, **body: Any) -> None:
        watch.beat()
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        try:
            request = Request(self.url + path, json.dumps(body).encode(), headers)
            with urlopen(request, timeout=self.config.launch.timeout / 4) as answer:
                answer.read()
        except HTTPError as error:
            reason = " ".join(error.read().decode(errors="replace").split())
            raise ServerError(f"{self.url}{path}: status {error.code}: {reason[:300]}") from error
        except (OSError, HTTPException) as error:
            raise ServerError(f"{self.url}{path}: {error}") from error


def _arguments(config: Config, port: int, index: int) -> list[str]:
    server = config.rollout.server
    options: dict[str, Any] = {
        "model-path": config.model.path,
        "host": HOST,
        "port": port,
        "tp-size": server.tp,
        "ep-size": server.ep,
        "dtype": config.model.dtype,
        "max-running-requests": server.max_running_requests,
        "random-seed": config.run.seed,
        "weight-version": UNPUBLISHED,
        "log-level": "warning",
        "custom-weight-loader": "megatron_collab.publish.receiver.receive",
    }
    on_cpu = device.select(config.launch.device).type == "cpu"
    cache_tokens = server.max_total_tokens or (CPU_CACHE_TOKENS if on_cpu else None)
    if cache_tokens is not None:
        options["max-total-tokens"] = cache_tokens
    flags = ["sleep-on-idle", "skip-server-warmup"]
    if on_cpu:
        options |= {"device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch"}
        flags += ["disable-overlap-schedule", "disable-cuda-graph", "enable-deterministic-inference"]
    else:
        options["base-gpu-id"] = index * server.tp + (0 if server.colocated else config.launch.nproc_per_node)
        flags += ["enable-memory-saver"] if server.colocated else []
    if server.fp8:  # the weights in model.path are not in FP8: what is served comes from the trainer
        options |= {"load-format": "dummy", "json-model-override-args": json.dumps(FP8_BLOCKS)}
    pairs = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return pairs + [f"--{flag}" for flag in flags]


def _environment(config: Config, api_key: str, index: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not _TORCHRUN_VARIABLES.match(name)}
    settings = {
        KEY_VARIABLE: api_key,
        PARENT_VARIABLE: str(os.getpid()),
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_FORWARD_UNKNOWN_TOOLS": "1",  # the policy is told that there is no such tool
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device.select(config.launch.device).type == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        settings |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCH_COMPILE_DISABLE": "1",  # compiling costs seconds, and gains nothing at this size
        }
        tp = config.rollout.server.tp
        if tp > 1:
            bind = [str(cores[(index * tp + rank) % len(cores)]) for rank in range(tp)]
            settings["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bind)
    return inherited | settings


def _shared_memory(group: int) -> set[Path]:
    """What SGLang's processes made and have mapped: segments, semaphores. Killed, they do not unlink it."""
    segments: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == group:
                maps = (process / "maps").read_text()
                segments |= {Path(path) for path in _LEFT_BEHIND.findall(maps)}
        except (ProcessLookupError, FileNotFoundError):  # it has just ended
            continue
    return segments


class SGLangClient:
    """Asks a server for turns; one client serves any number of concurrent requests of one event loop.

    `counters` counts tokens of prompts: `prefill_tokens` were computed, `cached_tokens` the server had already.
    """

    def __init__(self, url: str, api_key: str, config: RolloutConfig) -> None:
        self.url = url
        self.timeout = config.turn_timeout
        self.tool_parser = config.tool_parser
        self.counters: Counter[str] = Counter()
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None
        self._reading: dict[tuple[int, ...], asyncio.Event] = {}

    async def generate(
        self, prompt_ids: tuple[int, ...], *, max_new_tokens: int, sampling: SamplingConfig, seed: int
    ) -> Turn:
        """Sample one turn of at most `max_new_tokens`; log-probs are of the distribution at the temperature.

        Of several requests at once with the same prompt one goes ahead; the others wait until it has been read.
        `seed` (64 bits, signed) decides the sample where the server is deterministic. Raises EngineError when
        the server refuses the request, does not answer in time, or stays away after several tries (ServerGone).
        """
        body = {
            "input_ids": list(prompt_ids),
            "return_logprob": True,
            "stream": True,
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "sampling_seed": seed,
                "stream_interval": max_new_tokens,  # the first token, then the whole
            },
        }
        async with self._reads(prompt_ids) as was_read:
            answer = await self._post("/generate", body, lambda response: _last_event(response, was_read))
        meta = answer["meta_info"]
        finish = Finish(meta["finish_reason"]["type"])
        if finish is not Finish.ABORT:
            self.counters["prefill_tokens"] += meta["prompt_tokens"] - meta["cached_tokens"]
            self.counters["cached_tokens"] += meta["cached_tokens"]
        return Turn(
            prompt_ids=tuple(prompt_ids),
            token_ids=tuple(answer["output_ids"]),
            log_probs=tuple(entry[0] for entry in meta["output_token_logprobs"]),
            versions=_versions(meta, len(answer["output_ids"])),
            finish=finish,
            text=answer["text"],
        )

    async def tool_calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """The calls in `text` as rollout.tool_parser finds them; EngineError as in `generate`."""
        body = {"text": text, "tools": list(schemas), "tool_call_parser": self.tool_parser}
        answer = await self._post("/parse_function_call", body, aiohttp.ClientResponse.json)
        return [ToolCall(call["name"], _arguments_of(call)) for call in answer["calls"]]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def _reads(self, prompt_ids: tuple[int, ...]) -> AsyncIterator[Callable[[], None]]:
        """Wait while another request reads this prompt, then go on; gives what to call once it has been read."""
        if first := self._reading.get(prompt_ids):
            await first.wait()
            yield lambda: None
            return
        read = self._reading[prompt_ids] = asyncio.Event()

        def was_read() -> None:
            self._reading.pop(prompt_ids, None)
            read.set()

        try:
            yield was_read
        finally:
            was_read()

    async def _post(
        self, path: str, body: dict[str, Any], read: Callable[[aiohttp.ClientResponse], Awaitable[_Answer]]
    ) -> _Answer:
        failure = EngineError("")
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            try:
                async with self._open().post(self.url + path, json=body) as response:
                    if response.status == 200:
                        return await read(response)
                    raise _Refused(response.status, await response.text())
            except TimeoutError:
                raise EngineError(f"no answer within rollout.turn_timeout={self.timeout:g} s") from None
            except _Refused as refused:
                failure = EngineError(f"{self.url}{path}: {refused}")
                if refused.status < 500:
                    break
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                failure = ServerGone(f"{self.url}{path}: {type(error).__name__}: {error}")
        raise failure

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=self.timeout),
            )
        return self._session


class _Refused(Exception):
    """The server answered with an HTTP status of failure."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {' '.join(text.split())[:300]}")
        self.status = status


async def _last_event(response: aiohttp.ClientResponse, began: Callable[[], None]) -> dict[str, Any]:
    """The last of the events in which SGLang streams a turn, each of them all there is so far.

    Calls `began` at the first one. Raises _Refused where an event is an error, and ClientPayloadError where the
    stream ends before the turn does.
    """
    rest, last = b"", b""
    async for piece in response.content.iter_any():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            began()
            if event != b"data: [DONE]":
                last = event
    answer = json.loads(last.removeprefix(b"data: ") or b"{}")
    if "error" in answer:
        raise _Refused(answer["error"]["code"], answer["error"]["message"])
    finish = answer.get("meta_info", {}).get("finish_reason")
    if finish is None:
        raise aiohttp.ClientPayloadError("the stream ended before the turn")
    if finish.get("status_code"):  # SGLang's scheduler turned the request away
        raise _Refused(finish["status_code"], finish["message"])
    return answer


def _versions(meta: Mapping[str, Any], tokens: int) -> tuple[int, ...]:
    """The version of the weights of each of a turn's `tokens`; spans of them where it changed on the way."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": tokens}]
    return tuple(int(span["version"]) for span in spans for _ in range(span["start"], span["end"]))


def _arguments_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a call was given; something else than a JSON object becomes an argument that no tool has."""
    arguments = json.loads(call["parameters"])
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}
