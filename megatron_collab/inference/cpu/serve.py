"""`python -m megatron_collab.inference.cpu.serve <SGLang's arguments>`: SGLang's HTTP server.

On a machine without a GPU, the patches of SGLang are applied first, and its processes are forked. Otherwise SGLang
spawns them, and a spawned process imports the main module again, so the code of this module runs in all of them.
"""
# ruff: noqa: E402 (the order of the imports is the point)

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from megatron_collab.inference import (
    CHECK_VARIABLE,
    CLIENT_KEY_VARIABLE,
    KEY_VARIABLE,
    MEETING,
    PARENT_VARIABLE,
    SCORES_FLAG,
    STACKS_VARIABLE,
)
from megatron_collab.runtime import stacks
from megatron_collab.runtime.process import die_with_parent, imports_done


def _register_stacks() -> None:
    file = Path(os.environ[STACKS_VARIABLE])
    stacks.register(file.parent, file.name)


def _end_with_parent() -> None:
    """End with the parent. SGLang's processes also do this, but only after imports that take many seconds."""
    die_with_parent()
    if os.getsid(os.getppid()) != os.getsid(0):  # the parent has already ended, and another process adopted this one
        os.kill(os.getpid(), signal.SIGKILL)


def _exact_attention(runner: Any) -> Any:
    """The attention backend for SGLang's model runner; imported only in the process that needs it."""
    from megatron_collab.inference.cpu.backend import ExactAttentionBackend

    return ExactAttentionBackend(runner)


def _exact_adapters() -> Any:
    """The backend class for adapters, for SGLang's registry."""
    from megatron_collab.inference.cpu.adapters import ExactLoRABackend

    return ExactLoRABackend


def _meet(url: str, timeout: timedelta = timedelta(minutes=30), **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Rendezvous: the prefix of the run's store that `url` names; all ranks of the server open the same."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    store = TCPStore(str(parts.hostname), int(parts.port or 0), is_master=False, timeout=timeout)
    yield PrefixStore(parts.path, store), int(query["rank"]), int(query["world_size"])
    raise RuntimeError("the ranks of a server rendezvous only once")


if __name__ == "__main__":
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
elif __name__ == "__mp_main__":
    _end_with_parent()
_register_stacks()

# Garbage collection over the objects of imports takes a quarter of the start-up, and later of some requests.
gc.disable()

from megatron_collab import patches
from megatron_collab.patches.sglang import (
    guard_from_clients,
    hide_unused_packages,
    keep_loads_in_temporary_folder,
    leave_offsets_unpinned,
    load_adapters_at_start,
    on_cpu,
    zero_biases_of_heads,
)

hide_unused_packages()
patches.apply("sglang")
if on_cpu():  # its processes are forked
    os.register_at_fork(after_in_child=_end_with_parent)
    os.register_at_fork(after_in_child=_register_stacks)

    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.lora.backend.lora_registry import register_lora_backend

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    register_attention_backend("torch_native")(_exact_attention)
    register_lora_backend("torch_native")(_exact_adapters)

from sglang.launch_server import run_server
from sglang.srt.entrypoints import engine as engine  # imports the code that spawned processes run
from sglang.srt.server_args import prepare_server_args
from torch.distributed import PrefixStore, Store, TCPStore, register_rendezvous_handler

register_rendezvous_handler(MEETING, _meet)  # for ranks of a server over several nodes
keep_loads_in_temporary_folder()
if f"--{SCORES_FLAG}" in sys.argv:
    zero_biases_of_heads()
if "--lora-paths" in sys.argv:
    load_adapters_at_start()
    if on_cpu():
        leave_offsets_unpinned()
imports_done()


if __name__ == "__main__":
    if server_args := os.environ.pop(CHECK_VARIABLE, None):
        from megatron_collab.inference.server_args import fault

        print("\n" + json.dumps(fault(json.loads(server_args), sys.argv[1:])))
        sys.exit()
    key, client_key = os.environ.pop(KEY_VARIABLE), os.environ.pop(CLIENT_KEY_VARIABLE, "")
    key_args = [f"--api-key={key}"]
    if client_key:
        guard_from_clients()
        key_args = [f"--api-key={client_key}", f"--admin-api-key={key}"]  # a person's key may begin with -
    run_server(prepare_server_args([*sys.argv[1:], *key_args]))
