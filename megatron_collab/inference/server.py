"""SGLang servers: their processes on this machine, their arguments, and the calls that manage their memory."""

from __future__ import annotations

import glob
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from megatron_collab.inference import (
    CHECK_VARIABLE,
    CLIENT_KEY_VARIABLE,
    KEY_VARIABLE,
    PARENT_VARIABLE,
    ROW_BY_ROW,
    SCORES_FLAG,
    STACKS_VARIABLE,
    adapters,
)
from megatron_collab.inference.server_args import plain, words
from megatron_collab.inference.spec import CPU_CACHE_TOKENS, ServerSpec, Serves
from megatron_collab.models import hf_config
from megatron_collab.runtime import affinity, device, gpu_environment, hub, keys, network, stacks, toolkit
from megatron_collab.runtime.files import CACHE, ScratchFolder
from megatron_collab.runtime.network import bindable
from megatron_collab.runtime.process import RunStopped, beat, wait_for
from megatron_collab.runtime.redact import redact

UNPUBLISHED = -1  # weight version of a server that has received no weights of the run
WEIGHT_LOADER = "megatron_collab.weight_sync.receiver.receive"  # receives the trainer's weights

# Linear layers in FP8, as SGLang's Fp8Config reads them from the quantization_config of config.json.
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

_TORCHRUN_VARIABLES = re.compile(r"(LOCAL_|GROUP_|ROLE_|TORCHELASTIC_|MASTER_)|(RANK|WORLD_SIZE)$")

# Settings of the trainer's allocator. torch-memory-saver, which releases a server's memory, works with none of them.
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "SGLANG_MEMORY_SAVER_CUDA_GRAPH")

_COMMAND = [sys.executable, "-m", "megatron_collab.inference.cpu.serve"]
_LEFT_BEHIND = re.compile(r"/dev/shm/(?:sgl_shm_mq_|sem\.mp-)\S+")

MEMORY = ("kv_cache", "weights")  # parts that a server can release, in this order
HEALTH_SECONDS = 30  # timeout of a health check
IDLE_SECONDS = 60  # timeout for aborted requests to end


class ServerError(RunStopped):
    """A server did not start, has ended, or failed a request; the message names the server and the reason."""


class Part(NamedTuple):
    """One node's part of a server over several nodes: `node` is its number, `store` the rendezvous URL of all ranks."""

    node: int
    store: str


class ServerProcess:
    """Server number `index` of the run, on this machine; it ends with the thread that started it, however that ends.

    It listens at `url` on launch.interface (default: loopback) and requires `api_key`. If the server is over several
    nodes, this is the `part` of one node; the first node's part answers requests.
    """

    def __init__(
        self,
        spec: ServerSpec,
        log: Path,
        index: int,
        api_key: str,
        port: int = 0,
        *,
        part: Part | None = None,
        host: str = "",
        client_key: str = "",
    ) -> None:
        """Start it; its output goes to `log`. `port`: of an earlier start. Raises ServerError if it is in use.

        `host`: IPv4 address to listen on instead. `client_key`: another key for other programs, with which they can
        sample, but not manage the server.
        """
        self._spec, self._log, self._index, self._api_key = spec, log, index, api_key
        self._client_key = client_key
        first = spec.host.port
        host, parts = host or network.address(spec.host.interface), spec.placement.per_node
        port = port or (first + index if first else 0)
        try:
            self._port = bindable("rollout.server.port", port, host, index % parts, parts)
        except ValueError as error:
            raise ServerError(str(error)) from error
        self.url = f"http://{host}:{self._port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = ScratchFolder()  # SGLang leaves sockets and files in the temporary folder
        self._process = self._launch(part)

    @property
    def pid(self) -> int:
        """Id of the first process, the leader of the server's process group."""
        return self._process.pid

    def start(self, part: Part | None = None) -> None:
        """Restart it, at the same address."""
        self._scratch = ScratchFolder()
        self._process = self._launch(part)

    def _launch(self, part: Part | None) -> subprocess.Popen[bytes]:
        # The rendezvous of its ranks. SGLang's default store would listen on all interfaces.
        store = part.store if part else (self._scratch.path / "store").as_uri()
        stack_files = (self._log.parent / stacks.FOLDER / self._log.stem).resolve()
        adapter, spec = None, self._spec
        if spec.adapters:
            adapter = self._scratch.path / "adapter"
            adapters.write(adapter, spec.model, spec.adapters)
        folder = hub.folder(spec.model).resolve()
        if glob.escape(str(folder)) != str(folder):  # SGLang takes it for a pattern
            link = self._scratch.path / "model"
            link.symlink_to(folder)
            spec = replace(spec, model=str(link))
        environment = _environment(self._spec, self._api_key, self._index) | {
            "TMPDIR": str(self._scratch.path),
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": store,
            STACKS_VARIABLE: str(stack_files),
            CLIENT_KEY_VARIABLE: self._client_key,
        }
        with self._log.open("ab") as output, affinity.unbound():
            return subprocess.Popen(
                _COMMAND + arguments(spec, self.url, self._index, part, adapter),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # SGLang kills its process group if a part of it fails
            )

    def ended(self) -> str | None:
        """How it ended; None if it is running."""
        code = self._process.poll()
        return None if code is None else f"it ended with code {code}"

    def stop(self) -> None:
        """End the server with all its processes."""
        left_behind = _left_behind(self.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for file in left_behind:
            file.unlink(missing_ok=True)
        self._scratch.remove()


class Process(Protocol):
    """The processes of a server: on this machine (ServerProcess), another (remote.RemoteProcess), or several."""

    @property
    def url(self) -> str: ...

    def start(self) -> None: ...

    def ended(self) -> str | None: ...

    def stop(self) -> None: ...


class SGLangServer:
    """An SGLang server, started by the constructor and stopped with the context.

    `index` is its number in the run, `tp` its tensor-parallel size, `generation` the number of restarts, and `released`
    the parts of its memory that are released: kv_cache, weights.
    """

    def __init__(
        self,
        spec: ServerSpec,
        log: Path,
        index: int = 0,
        start: Callable[[ServerSpec, Path, int, str], Process] = ServerProcess,
    ) -> None:
        """Start serving; `start` starts the processes. Raises ServerError if a local port is in use."""
        self.spec, self.log, self.index = spec, log, index
        self.tp = spec.placement.tp
        self.api_key = secrets.token_hex(32)
        self.generation = 0
        self.released: set[str] = set()
        self._ready = False
        self.process = start(spec, log, index, self.api_key)

    @property
    def url(self) -> str:
        """Its address. Raises ServerError if it could not be started on another machine."""
        return self.process.url

    def __enter__(self) -> SGLangServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def alive(self) -> bool:
        return self.process.ended() is None

    def healthy(self) -> bool:
        """Whether requests are served."""
        try:
            self.ask("/health", timeout=HEALTH_SECONDS)
            if not self._ready:
                # Objects of the start-up live forever; garbage collection over them would stall requests.
                self.ask("/freeze_gc", {})
                self._ready = True
        except ServerError:
            return False
        return True

    def wait_healthy(self, timeout: float) -> None:
        """Return once requests are served. Raises ServerError if it ends first or needs more than `timeout` seconds."""
        in_time = wait_for(lambda: self.healthy() or not self.alive(), timeout)
        late = "" if in_time else f"it was not healthy after rollout.server.start_timeout={timeout:g} s"
        if reason := self.process.ended() or late:
            raise ServerError(f"SGLang server {self.index}: {reason}; {self.log_end()}")

    def release(self) -> None:
        """Release the memory of KV cache and weights; their contents are lost. Raises ServerError if that fails.

        Running requests are aborted; later requests wait until generation continues.
        """
        tags = [tag for tag in MEMORY if tag not in self.released]
        if not tags:
            return
        self.ask("/pause_generation", {"mode": "abort"})
        self.ask(f"/flush_cache?timeout={IDLE_SECONDS}", {})  # waits until it is idle: a release crashes a busy server
        for tag in tags:
            self.ask("/release_memory_occupation", {"tags": [tag]})
            self.released.add(tag)

    def resume(self, tag: str) -> None:
        """Allocate the memory of `tag` again if it was released; contents are lost. Raises ServerError on failure."""
        if tag in self.released:
            self.ask("/resume_memory_occupation", {"tags": [tag]})
            self.released.remove(tag)

    def restart(self) -> None:
        """Stop the server and start it again with the same address and key."""
        self.stop()
        self.generation += 1
        self.released, self._ready = set(), False
        self.process.start()

    def stop(self) -> None:
        self.process.stop()

    def log_end(self) -> str:
        if not self.log.is_file():
            return f"no log at {self.log}"
        lines = redact(self.log.read_text(errors="replace")).splitlines()[-15:]
        return "\n  ".join([f"the end of {self.log}:", *lines])

    def cache_tokens(self) -> int:
        """Capacity of its KV cache in tokens; SGLang only warns if memory allows fewer than set. Raises ServerError."""
        return int(json.loads(self.ask("/get_server_info"))["max_total_num_tokens"])

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> str:
        """POST `body`, or GET without one; returns the answer. ServerError after `timeout` s (request_timeout)."""
        beat()  # cannot hide a hang: every caller has a deadline
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=timeout or self.spec.host.request_timeout)
        try:
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read().decode(errors="replace")
        except (OSError, HTTPException) as error:
            raise ServerError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if status != 200:
            raise ServerError(f"{self.url}{path}: status {status}: {' '.join(text.split())[:300]}")
        return text


def arguments(
    spec: ServerSpec, url: str, index: int, part: Part | None = None, adapter: Path | None = None
) -> list[str]:
    """SGLang's command-line arguments for server number `index` of `spec`, or for a part of it, at `url`.

    `adapter`: folder of the adapters that it holds besides the base.
    """
    placement, address = spec.placement, urlsplit(url)
    options: dict[str, Any] = {
        "model-path": hub.folder(spec.model),
        "host": address.hostname,
        "port": address.port,
        "tp-size": placement.tp,
        "ep-size": spec.ep,
        "dtype": spec.dtype,
        "max-running-requests": spec.max_running_requests,
        "random-seed": spec.seed,
        "weight-version": UNPUBLISHED,
        "log-level": "warning",
        "custom-weight-loader": WEIGHT_LOADER,
    }
    on_cpu = device.select(spec.host.device).type == "cpu"
    cache_tokens = spec.max_total_tokens or (CPU_CACHE_TOKENS if on_cpu else None)
    if cache_tokens is not None:
        options["max-total-tokens"] = cache_tokens
    options |= {"sleep-on-idle": True, "skip-server-warmup": True, SCORES_FLAG: spec.serves is Serves.SCORES}
    options["enable-return-routed-experts"] = spec.returns_experts
    if on_cpu:
        options |= {"device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch"}
        flags = ("disable-overlap-schedule", "disable-cuda-graph", "enable-deterministic-inference")
        options |= dict.fromkeys(flags, True)
    else:
        policy = spec.serves is Serves.POLICY
        options["mem-fraction-static"] = spec.memory_share
        options["base-gpu-id"] = placement.first_device(index)
        options["enable-memory-saver"] = placement.colocated
        # Weights that no sync sends must be restored with the memory.
        options["enable-weights-cpu-backup"] = placement.colocated and (not policy or bool(adapter))
        if policy and not spec.fp8 and hf_config.read(hub.folder(spec.model) / "config.json").experts:
            # By default SGLang uses a kernel on Blackwell that needs gate and up in the other order.
            options["moe-runner-backend"] = "triton"
    if spec.fp8:  # the model is not in FP8: weights come from the trainer
        override = json.dumps({"quantization_config": FP8_BLOCKS})
        options |= {"load-format": "dummy", "json-model-override-args": override}
    if adapter:
        options |= adapters.arguments(adapter, on_cpu)
    if part:
        options |= {"nnodes": placement.nnodes, "node-rank": part.node}
    return words(options | plain(spec.args))


def refusal(spec: ServerSpec) -> str | None:
    """Why SGLang refuses the settings' `args`, to append to their name; checked in a subprocess."""
    with ScratchFolder() as scratch:
        environment = _environment(spec, "", 0) | {
            "TMPDIR": str(scratch),
            STACKS_VARIABLE: str(scratch / "stacks"),
            CHECK_VARIABLE: json.dumps(spec.args),
        }
        command = _COMMAND + arguments(spec, f"http://{network.HOST}:{network.FIRST_PORT}", 0)
        process = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    lines = redact(process.stderr).strip().splitlines()[-1:] or [f"it ended with code {process.returncode}"]
    return f": SGLang failed to check them: {lines[0]}"


def _environment(spec: ServerSpec, api_key: str, index: int) -> dict[str, str]:
    place = index % spec.placement.per_node
    variables = keys.without(os.environ).items()
    inherited = gpu_environment.environment(
        {name: value for name, value in variables if not _TORCHRUN_VARIABLES.match(name)}
    )
    settings = network.variables(spec.host.interface) | {
        # Ranks of a server over several nodes listen here for each other.
        "SGLANG_HOST_IP": network.address(spec.host.interface),
        KEY_VARIABLE: api_key,
        PARENT_VARIABLE: str(os.getpid()),
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_FORWARD_UNKNOWN_TOOLS": "1",  # the policy is told that the tool does not exist
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device.select(spec.host.device).type == "cpu":
        # Compiling takes seconds and is no faster at this size.
        settings |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        settings |= dict([ROW_BY_ROW])
        settings["SGLANG_NCCL_SO_PATH"] = os.devnull  # with a torch for CUDA, ranks of a server would use its NCCL
        cores, tp = sorted(os.sched_getaffinity(0)), spec.placement.tp
        if tp > 1:
            bind = [str(cores[(place * tp + rank) % len(cores)]) for rank in range(tp)]
            settings["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bind)
        return inherited | settings
    for name in _ALLOCATOR_VARIABLES:
        inherited.pop(name, None)
    # Compiled kernels: one folder per machine, since machines that share a home must not write to it concurrently.
    cache = CACHE / "megatron-collab" / socket.gethostname()
    kernels = {
        "SGLANG_CACHE_DIR": str(cache),
        "SGLANG_JIT_CACHE_DIR": str(cache / "jit"),
        "FLASHINFER_WORKSPACE_BASE": str(cache),
        "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "1",  # else it first compiles for 10 to 20 minutes, according to its log
    }
    return kernels | inherited | settings | toolkit.compilers(cache / "lib")


def _left_behind(group: int) -> set[Path]:
    """Shared memory and semaphores of SGLang's processes, which do not unlink them if they are killed."""
    files: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, FileNotFoundError):  # the process has just ended
            if os.getpgid(int(process.name)) == group:
                files |= {Path(path) for path in _LEFT_BEHIND.findall((process / "maps").read_text())}
    return files
