"""LiteLLM: no network at its import, and what its calls print and write down."""

from __future__ import annotations

import os
from functools import partial

from megatron_collab.patches import Patch


def be_quiet() -> None:
    """Have LiteLLM raise its errors without printing advice on standard output first."""
    import litellm

    litellm.suppress_debug_info = True


_litellm = partial(Patch, "litellm")

PATCHES = (
    _litellm(
        "prices from the package",
        why="At its import LiteLLM would download the prices of models, and wait where there is no network.",
        upstream="litellm_core_utils/get_model_cost_map.py:383 (environment variable)",
        until="LiteLLM downloads prices only on request",
        test="tests/patches/test_litellm.py::test_importing_litellm_opens_no_connection",
        apply=lambda: os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True"),
    ),
    _litellm(
        "no advice on standard output",
        why="Before it raises an error, LiteLLM prints where to ask for help: lines in the logs for every failed call.",
        upstream="litellm_core_utils/exception_mapping_utils.py:2386; issue 5942",
        until="LiteLLM logs instead of printing",
        test="tests/patches/test_litellm.py::test_an_error_prints_nothing",
        uses=("litellm.suppress_debug_info",),
    ),
)
