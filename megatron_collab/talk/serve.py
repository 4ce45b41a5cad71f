"""Serve a model of a run to other programs by SGLang's OpenAI-compatible server: the newest checkpoint, or another.

    megatron-collab serve RUN [--step before|best|N] [--port 8000]

It prints the base URL and a key, drawn at each start unless MEGATRON_COLLAB_SERVE_KEY has one, and answers to this
machine only until Ctrl-C; --host ADDRESS: to others too, without encryption. The model's name is that of the run's
folder. Chat template and precision are the run's; prompts and temperatures are those of the requests.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

from megatron_collab.commands import ArgumentParser
from megatron_collab.config import EvaluateConfig
from megatron_collab.inference.server import ServerError, ServerProcess, SGLangServer
from megatron_collab.inference.spec import ServerSpec
from megatron_collab.runtime import keys, network
from megatron_collab.runtime.console import show, show_secret
from megatron_collab.runtime.files import ScratchFolder
from megatron_collab.runtime.process import EXIT_STOPPED
from megatron_collab.settings import ConfigError, require
from megatron_collab.talk.models import RunModel, find_model, hf_folder
from megatron_collab.talk.settings import run_settings, spec_in

KEY_VARIABLE = "MEGATRON_COLLAB_SERVE_KEY"
_POLL_SECONDS = 1.0


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("serve", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a training run")
    parser.add_argument("--step", default="after", help="before, best, a step, or after: the newest model [after]")
    parser.add_argument("--port", type=int, default=0, help="port [a free one]")
    parser.add_argument("--host", default=network.HOST, help="IPv4 address to listen on [%(default)s]")
    parser.add_argument("option", nargs="*", help="option=value: other settings than the run's")
    options = parser.parse_intermixed_args(arguments)
    model = find_model(options.run, options.step)
    config, _ = run_settings(options.run, 1, options.option, scores=False)
    key, host, port = os.environ.get(KEY_VARIABLE, ""), *_place(options.host, options.port)
    is_valid = keys.is_key(KEY_VARIABLE, key) and key.isascii() and key.isprintable() and " " not in key
    rule = f"at least {keys.SHORTEST} characters, printable ones of ASCII, without spaces"
    require(not key or is_valid, f"{KEY_VARIABLE}: give {rule}")
    with suppress(KeyboardInterrupt):
        try:
            _serve(config, model, Path(os.path.realpath(options.run)).name, host, port, key)
        except ServerError as error:
            print(f"megatron-collab: {error}", file=sys.stderr)
            return EXIT_STOPPED
    return 0


def _serve(config: EvaluateConfig, model: RunModel, name: str, host: str, port: int, key: str) -> None:
    """Serve until Ctrl-C. Raises ServerError if the server fails, ConfigError if the checkpoint is damaged."""
    with ExitStack() as stack:
        folder = stack.enter_context(ScratchFolder())
        path = stack.enter_context(hf_folder(model, show))
        client_key = key or secrets.token_hex(32)
        start = partial(ServerProcess, port=port, host=host, client_key=client_key)
        show(f"{model.name}: starting SGLang")
        spec = _for_programs(config, folder, path, name)
        server = stack.enter_context(SGLangServer(spec, folder / "sglang.log", start=start))
        server.wait_healthy(spec.host.start_timeout)
        server.ask("/update_weight_version", {"new_version": str(model.step), "abort_all_requests": False})
        show(f"{model.name}: model {name} at {server.url}/v1")
        show_secret(f"key: that of {KEY_VARIABLE}" if key else f"key: {client_key}")
        while server.alive():
            time.sleep(_POLL_SECONDS)
        raise ServerError(f"SGLang server: {server.process.ended()}; {server.log_end()}")


def _for_programs(config: EvaluateConfig, folder: Path, model: Path, name: str) -> ServerSpec:
    """The server, with what other programs see: the model's name, tool calls if the run had tools."""
    serving = spec_in(config, folder, model).serving
    assert serving
    client, policy = serving.client, serving.policy
    tools = {"tool-call-parser": client.tool_parser} if client.calls_tools else {}
    return replace(policy, args={"served-model-name": name, **tools, **policy.args})


def _place(host: str, port: int) -> tuple[str, int]:
    """Address and port to listen on. Raises ConfigError if that is impossible."""
    try:
        address = str(IPv4Address(host))
    except ValueError as error:
        raise ConfigError(f"--host={host}: {error}") from None
    try:
        return address, network.bindable("--port", port, host)
    except ValueError as error:
        raise ConfigError(f"{error} (--host={host})") from None
