"""Calls to language models behind LiteLLM: for simulated users and judges."""
