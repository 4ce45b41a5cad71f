"""What the settings of an endpoint are to LiteLLM: the arguments of a call, and whether its model takes them."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import replace
from typing import Any

from megatron_collab.config import ConfigError, EndpointConfig, UserConfig, nearest, require
from megatron_collab.config.load import leaves
from megatron_collab.config.schema import AssistantConfig
from megatron_collab.llm.answer import LlmError
from megatron_collab.patches.litellm import be_quiet

ENVIRONMENT = "os.environ/"  # before the name of a variable, as in LiteLLM's own settings
POLICY = "policy"  # the trained model, on the run's SGLang servers
SERVED = "served/"  # before the name of one of `servers`, models that the run serves beside it

_SAMPLING = ("temperature", "top_p", "reasoning_effort")  # not sent where they are null
_TAKEN = {  # of LiteLLM's arguments, those that are no matter of `extra`, and what is
    **{name: f"set {name} itself" for name in ("model", "api_base", "max_tokens", "timeout", *_SAMPLING)},
    **dict.fromkeys(("base_url", "custom_llm_provider"), "set model and api_base"),
    "max_output_tokens": "set max_tokens",
    **dict.fromkeys(("max_retries", "num_retries"), "set attempts"),
    **dict.fromkeys(("headers", "extra_headers"), "set headers"),
    **dict.fromkeys(("messages", "response_format", "stream", "n", "tools", "tool_choice"), "each call sets it itself"),
}
_COMPLETION = "max_completion_tokens"  # what newer models call max_tokens
_UNSUPPORTED = re.compile(r"support|permitted|allowed|unknown|unrecogni[sz]ed|unexpected|deprecated", re.IGNORECASE)
_OWN_SERVERS = ("hosted_vllm", "litellm_proxy", "lm_studio")  # providers without an address of their own
_KEYED = (  # public services that let nobody in without a key
    *("anthropic", "cerebras", "deepseek", "fireworks_ai", "gemini", "groq", "mistral", "openai", "perplexity"),
    *("together_ai", "xai"),
)
_KEYED_EVERYWHERE = ("anthropic", "gemini", "openai")  # for which LiteLLM sends nothing to any address without a key
_KEY = re.compile(r"KEY|TOKEN")
_SECRET = re.compile(r"((?<!cache[_-])key|token|secret|password|authorization|cookie|credentials)$", re.IGNORECASE)


def of_run(model: str | None) -> bool:
    """Whether the run itself serves the model called so: without keys, rate limits and prices."""
    return model is not None and (model == POLICY or model.startswith(SERVED))


def arguments(endpoint: EndpointConfig) -> dict[str, Any]:
    """LiteLLM's arguments beside model, messages and api_base; LlmError where a header's variable is not set here."""
    sampling = {name: value for name in _SAMPLING if (value := getattr(endpoint, name)) is not None}
    headers = {name: _read(value) for name, value in endpoint.headers.items()}
    given = {**endpoint.extra, **sampling}
    if endpoint.max_tokens is not None:
        given["max_tokens"] = endpoint.max_tokens
    return {**given, "extra_headers": headers} if headers else given


def token_budget(endpoint: EndpointConfig) -> int:
    """The most tokens of an answer, by whichever name it is sent."""
    return endpoint.max_tokens or int(endpoint.extra[_COMPLETION])


def with_token_budget(endpoint: EndpointConfig, tokens: int) -> EndpointConfig:
    """`endpoint` with another budget of an answer, sent by the same name."""
    if endpoint.max_tokens is None:
        return replace(endpoint, extra={**endpoint.extra, _COMPLETION: tokens})
    return replace(endpoint, max_tokens=tokens)


def way_out(endpoint: EndpointConfig, said: str) -> str:
    """What to set where a server refuses, in the words `said`, an argument that it was sent; empty if it does not."""
    sent = [name for name in arguments(endpoint) if re.search(rf"\b{name}\b", said)]
    if not sent or not _UNSUPPORTED.search(said):
        return ""
    name = sent[0]
    group = {AssistantConfig: "assistant", UserConfig: "user (or users.NAME)"}.get(type(endpoint), "reward.judge")
    if name in _SAMPLING:
        return f"set {name}=null in {group}, and it is not sent"
    if name == "max_tokens":
        return f"set max_tokens=null and extra.{_COMPLETION}={endpoint.max_tokens} in {group}"
    return f"remove {'headers' if name == 'extra_headers' else f'extra.{name}'} from {group}"


def identity(endpoint: EndpointConfig) -> dict[str, Any]:
    """The settings that an answer depends on, JSON: a part of the key of a cached answer.

    Settings that earlier versions did not have are left out where they have no value, which keeps earlier keys.
    """
    first = ("model", "api_base", "temperature", "max_tokens")
    later = ("top_p", "reasoning_effort", "headers", "extra")
    return {name: value for name in (*first, *later) if (value := getattr(endpoint, name)) or name in first}


def question_of(endpoint: EndpointConfig) -> dict[str, Any]:
    """What a recorded answer is found by, beside messages, JSON: not where the model is, nor how it is let in to.

    A model that the run serves has its name in `servers`.
    """
    found = identity(endpoint)
    if found["model"].startswith(SERVED):  # served/NAME/SAMPLE
        found["model"] = SERVED + found["model"].removeprefix(SERVED).partition("/")[0]
    return {name: value for name, value in found.items() if name not in ("api_base", "headers")}


def check_settings(endpoint: EndpointConfig, group: str, asked: bool = True) -> None:
    """ConfigError for headers and extra arguments that cannot be, as settings of `group`; it may not be `asked`."""
    out = f"set {group}.headers.NAME={ENVIRONMENT}VARIABLE, which is read when a request is sent"
    budget = endpoint.extra.get(_COMPLETION)
    message = f"{group}.extra.{_COMPLETION}={budget}: must be a whole number of at least 1"
    whole = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1
    require(_COMPLETION not in endpoint.extra or whole, message)
    message = f"{group}.max_tokens=null: answers need a budget; set {group}.extra.{_COMPLETION}, which is sent instead"
    require(endpoint.max_tokens is not None or whole, message)
    message = f"{group}.extra.{_COMPLETION}: max_tokens is sent already; set {group}.max_tokens=null, or remove this"
    require(endpoint.max_tokens is None or budget is None, message)
    for name in endpoint.extra:
        require(name not in _TAKEN, f"{group}.extra.{name}: is not passed on; {_TAKEN.get(name)}")
    for name, value in leaves(endpoint.extra):
        require(not (_SECRET.search(name) and isinstance(value, str)), f"{group}.extra.{name}: holds a key; {out}")
    for name, value in endpoint.headers.items():
        variable = value.removeprefix(ENVIRONMENT) if value.startswith(ENVIRONMENT) else None
        require(variable is not None or not _SECRET.search(name), f"{group}.headers.{name}: holds a key; {out}")
        message = f"{group}.headers.{name}={value}: no such variable in the environment"
        there = variable is None or variable in os.environ or not asked
        require(there, message + nearest(variable or "", os.environ))


def check_support(endpoint: EndpointConfig, setting: str, group: str) -> None:
    """ConfigError where LiteLLM says that the model called `setting` does not take a setting of `group`.

    It needs no network: LiteLLM translates the arguments as it will for each call, with its own table of models.
    """
    if of_run(endpoint.model):
        return
    from litellm.utils import get_optional_params  # which takes seconds

    model, provider, _, _ = _provider(endpoint, setting, group)
    given: dict[str, Any] = {}
    # One after the other, so that it shows which is refused; the temperature may depend on the effort.
    wanted = {"reasoning_effort": None, **arguments(endpoint)}
    for name, value in wanted.items():
        if value is None or name == "extra_headers":
            continue
        given[name] = value
        try:
            get_optional_params(model=model, custom_llm_provider=provider, **given)
        except Exception as error:  # LiteLLM stumbles in many ways over values that it does not expect
            reason = " ".join(str(error).partition("To drop")[0].split())
            reason = reason.removeprefix("litellm.UnsupportedParamsError: ").rstrip(". ,")
            known = name in _SAMPLING
            shown = f"{group}.{name}" if known else f"{group}.extra.{name}"
            leaves_out = known and not group.startswith("data.eval")  # where null is the assistant's own
            out = f"set {shown}=null, and it is not sent" if leaves_out else "remove it"
            raise ConfigError(f"{shown}={value}: {endpoint.model} does not take it ({reason}); {out}") from error


def check_access(endpoint: EndpointConfig, setting: str, group: str) -> None:
    """ConfigError where every call of the model called `setting` would fail: no address, or no key on this node.

    A key is asked for only where there is no other way in. Clouds (Azure, Bedrock, Vertex AI, …) know users by their
    machine too, and a server at api_base, or headers, may do without one, unless LiteLLM sends nothing without a key.
    """
    if of_run(endpoint.model):
        return
    from litellm import validate_environment

    _, provider, key, address = _provider(endpoint, setting, group)
    said = f"{setting}={endpoint.model}"
    message = (
        f"{said}: is on a server of your own, whose address is not known; set {group}.api_base=http://HOST:PORT/v1"
    )
    require(provider not in _OWN_SERVERS or bool(address), message)
    absent = validate_environment(str(endpoint.model))["missing_keys"]
    if key or not absent or provider not in _KEYED:
        return
    start = absent[0].partition("_")[0] + "_"
    if any(name.startswith(start) and _KEY.search(name) for name in os.environ):  # LiteLLM reads more than one name
        return
    elsewhere = bool(endpoint.api_base or endpoint.headers) or absent[0].replace("KEY", "BASE") in os.environ
    out = (
        f"; for a server that asks for none set it to any value, or name the model hosted_vllm/{said.partition('/')[2]}"
    )
    message = f"{said}: {' or '.join(absent)} is not set{out if endpoint.api_base else '; export it'}"
    require(elsewhere and provider not in _KEYED_EVERYWHERE, message)


def _provider(endpoint: EndpointConfig, setting: str, group: str) -> tuple[str, str, str | None, str | None]:
    """The name of the model with its provider, and the provider's, the key and the address that LiteLLM takes."""
    from litellm import get_llm_provider  # which takes seconds
    from openai import OpenAIError

    be_quiet()
    try:
        found: tuple[str, str, str | None, str | None] = get_llm_provider(
            str(endpoint.model), api_base=endpoint.api_base
        )
    except OpenAIError as error:
        out = f"give PROVIDER/MODEL, as openai/gpt-4o, or hosted_vllm/NAME for a server of your own at {group}.api_base"
        raise ConfigError(f"{setting}={endpoint.model}: LiteLLM knows no such provider; {out}") from error
    return found


def _read(value: str) -> str:
    if not value.startswith(ENVIRONMENT):
        return value
    variable = value.removeprefix(ENVIRONMENT)
    if variable not in os.environ:  # on another node than the one that checked the settings
        raise LlmError(f"{value}: no such variable in the environment of {socket.gethostname()}")
    return os.environ[variable]
