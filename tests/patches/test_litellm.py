"""LiteLLM is imported without network access, raises without printing, and its calls have no callbacks."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import litellm
import pytest
from litellm._internal_context import is_internal_call

from megatron_collab.llm.answer import Field, LlmError
from megatron_collab.llm.client import LlmClient
from megatron_collab.settings import EndpointConfig


@pytest.mark.processes
def test_importing_litellm_opens_no_connection() -> None:
    program = """
import socket
from megatron_collab import patches

def refuse(*_):
    raise AssertionError("a connection")

socket.socket.connect = refuse
patches.apply("litellm")
import litellm
from litellm.litellm_core_utils.get_model_cost_map import get_model_cost_map_source_info
print(get_model_cost_map_source_info()["source"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["local"], done.stderr


def ask() -> None:
    endpoint = EndpointConfig(model="no/model", attempts=1, timeout=5.0)
    asyncio.run(LlmClient().ask(endpoint, [{"role": "user", "content": "hello"}], [Field("answer", "", str)]))


def test_an_error_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LlmError):
        ask()
    assert capsys.readouterr().out == ""


def test_calls_are_internal(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    async def look(**_: object) -> None:
        seen.append(is_internal_call.get())
        raise TimeoutError

    monkeypatch.setattr(litellm, "acompletion", look)
    with pytest.raises(LlmError):
        ask()
    assert seen == [True]
