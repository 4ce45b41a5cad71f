"""LiteLLM: no network at its import, and what its calls print and write down."""

from __future__ import annotations

import os
from typing import Any

from megatron_collab.patches import Patch

_LITELLM = ("litellm", ("1.106.2",))


def _use_local_prices() -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


def be_quiet() -> None:
    """Have LiteLLM raise its errors without printing advice on standard output first."""
    import litellm

    litellm.suppress_debug_info = True


def add_provider(name: str, handler: Any) -> None:
    """Have models called NAME/… answered by `handler`, a litellm.CustomLLM."""
    import litellm

    litellm.custom_provider_map += [{"provider": name, "custom_handler": handler}]


PATCHES = (
    Patch(
        "prices from the package",
        *_LITELLM,
        why="At its import LiteLLM would download the prices of models, and wait where there is no network.",
        upstream="litellm_core_utils/get_model_cost_map.py:383 (environment variable)",
        until="LiteLLM downloads prices only on request",
        test="tests/patches/test_litellm.py::test_importing_litellm_opens_no_connection",
        apply=_use_local_prices,
    ),
    Patch(
        "no advice on standard output",
        *_LITELLM,
        why="Before it raises an error, LiteLLM prints where to ask for help: lines in the logs for every failed call.",
        upstream="litellm_core_utils/exception_mapping_utils.py:2386; issue 5942",
        until="LiteLLM logs instead of printing",
        test="tests/patches/test_litellm.py::test_an_error_prints_nothing",
        attributes=("litellm.suppress_debug_info",),
    ),
    Patch(
        "providers of the package",
        *_LITELLM,
        why="The policy as simulated user is called by model name; LiteLLM takes custom providers from this list only.",
        upstream="litellm/__init__.py (custom_provider_map, documented)",
        until="never: this is LiteLLM's interface for it",
        test="tests/rollout/users/test_llm.py::test_a_server_that_is_gone_does_not_silence_the_user",
        attributes=("litellm.custom_provider_map",),
    ),
)
