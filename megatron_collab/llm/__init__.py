"""Calls to language models behind LiteLLM: for simulated users and judges."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read at LiteLLM's import, which would ask the network
