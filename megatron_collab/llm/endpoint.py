"""Translates the settings of an endpoint into LiteLLM arguments, and checks that its model accepts them."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import replace
from typing import Any

from megatron_collab.llm.answer import LlmError
from megatron_collab.patches.litellm import be_quiet
from megatron_collab.runtime.keys import variables
from megatron_collab.settings import ConfigError, EndpointConfig, address_fault, header_fault, nearest, require
from megatron_collab.settings.values import leaves

ENVIRONMENT = "os.environ/"  # prefix of a variable's name, as in LiteLLM's own settings
POLICY = "policy"  # the trained model, on the run's SGLang servers
SERVED = "served/"  # prefix of a name in `servers`: a model that the run serves beside the policy

_SAMPLING = ("temperature", "top_p", "reasoning_effort")  # not sent if null
_NOT_PASSED_ON = {  # LiteLLM arguments that `extra` must not contain, and the setting to use instead
    **{name: f"set {name} itself" for name in ("model", "api_base", "max_tokens", "timeout", *_SAMPLING)},
    **dict.fromkeys(("base_url", "custom_llm_provider"), "set model and api_base"),
    "max_output_tokens": "set max_tokens",
    **dict.fromkeys(("max_retries", "num_retries"), "set attempts"),
    **dict.fromkeys(("headers", "extra_headers"), "set headers"),
    **dict.fromkeys(("messages", "response_format", "stream", "n", "tools", "tool_choice"), "each call sets it itself"),
}
COMPLETION = "max_completion_tokens"  # the name of max_tokens for newer models
_UNSUPPORTED = re.compile(r"support|permitted|allowed|unknown|unrecogni[sz]ed|unexpected|deprecated", re.IGNORECASE)
_SELF_HOSTED = ("hosted_vllm", "litellm_proxy", "lm_studio")  # providers without a default address
_KEYED = (  # public services that always require a key
    *("anthropic", "cerebras", "deepseek", "fireworks_ai", "gemini", "groq", "mistral", "openai", "perplexity"),
    *("together_ai", "xai"),
)
_KEYED_EVERYWHERE = ("anthropic", "gemini", "openai")  # LiteLLM requires a key for these at any address
_KEY = re.compile(r"KEY|TOKEN")
_SECRET = re.compile(r"((?<!cache[_-])key|token|secret|password|authorization|cookie|credentials)$", re.IGNORECASE)


def served_by_run(model: str | None) -> bool:
    """Whether the run itself serves the model of this name, so that it needs no key and has no limits and no price."""
    return model is not None and (model == POLICY or model.startswith(SERVED))


def arguments(endpoint: EndpointConfig) -> dict[str, Any]:
    """LiteLLM arguments except model, messages and api_base. Raises LlmError if a header's variable is not set here."""
    sampling = {name: value for name in _SAMPLING if (value := getattr(endpoint, name)) is not None}
    headers = {name: _read(value) for name, value in endpoint.headers.items()}
    options = {**endpoint.extra, **sampling}
    if endpoint.max_tokens is not None:
        options["max_tokens"] = endpoint.max_tokens
    return {**options, "extra_headers": headers} if headers else options


def token_budget(endpoint: EndpointConfig) -> int:
    """The token limit of an answer: max_tokens or extra.max_completion_tokens."""
    return endpoint.max_tokens or int(endpoint.extra[COMPLETION])


def with_token_budget(endpoint: EndpointConfig, tokens: int) -> EndpointConfig:
    """`endpoint` with another token limit, sent under the same name."""
    if endpoint.max_tokens is None:
        return replace(endpoint, extra={**endpoint.extra, COMPLETION: tokens})
    return replace(endpoint, max_tokens=tokens)


def way_out(endpoint: EndpointConfig, refusal: str) -> str:
    """The setting to change if the server's message `refusal` rejects an argument that was sent; empty otherwise."""
    sent = [name for name in arguments(endpoint) if re.search(rf"\b{name}\b", refusal)]
    if not sent or not _UNSUPPORTED.search(refusal):
        return ""
    name = sent[0]
    group = endpoint.group
    if name in _SAMPLING:
        return f"set {name}=null in {group} to leave it out"
    if name == "max_tokens":
        return f"set max_tokens=null and extra.{COMPLETION}={endpoint.max_tokens} in {group}"
    return f"remove {'headers' if name == 'extra_headers' else f'extra.{name}'} from {group}"


def identity(endpoint: EndpointConfig) -> dict[str, Any]:
    """The settings that an answer depends on, as JSON: part of its cache key.

    Settings added in later versions are omitted if they have no value, so that earlier cache keys stay valid.
    """
    original = ("model", "api_base", "temperature", "max_tokens")
    added = ("top_p", "reasoning_effort", "headers", "extra")
    return {name: value for name in (*original, *added) if (value := getattr(endpoint, name)) or name in original}


def question_of(endpoint: EndpointConfig) -> dict[str, Any]:
    """The settings that a recorded answer is looked up by, besides the messages, as JSON: without address and headers.

    A model that the run serves is identified by its name in `servers`.
    """
    settings = identity(endpoint)
    if settings["model"].startswith(SERVED):  # served/NAME/SAMPLE
        settings["model"] = SERVED + settings["model"].removeprefix(SERVED).partition("/")[0]
    return {name: value for name, value in settings.items() if name not in ("api_base", "headers")}


def check_settings(endpoint: EndpointConfig, group: str, in_use: bool = True) -> None:
    """Raises ConfigError for invalid headers and extra arguments of `group`; not `in_use`: variables may be unset."""
    out = f"set {group}.headers.NAME={ENVIRONMENT}VARIABLE, which is read when a request is sent"
    named = not (endpoint.model or "").endswith("/")
    require(named, f"{group}.model={endpoint.model}: names no model after the provider; give PROVIDER/MODEL")
    budget = endpoint.extra.get(COMPLETION)
    message = f"{group}.extra.{COMPLETION}={budget}: must be a whole number of at least 1"
    valid = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1
    require(COMPLETION not in endpoint.extra or valid, message)
    message = f"{group}.max_tokens=null: answers need a budget; set {group}.extra.{COMPLETION}, which is sent instead"
    require(endpoint.max_tokens is not None or valid, message)
    message = f"{group}.extra.{COMPLETION}: max_tokens is sent already; set {group}.max_tokens=null, or remove this"
    require(endpoint.max_tokens is None or budget is None, message)
    for name in endpoint.extra:
        require(name not in _NOT_PASSED_ON, f"{group}.extra.{name}: is not passed on; {_NOT_PASSED_ON.get(name)}")
    for name, value in leaves(endpoint.extra):
        require(not (_SECRET.search(name) and isinstance(value, str)), f"{group}.extra.{name}: holds a key; {out}")
    for name, value in endpoint.headers.items():
        variable = value.removeprefix(ENVIRONMENT) if value.startswith(ENVIRONMENT) else None
        require(variable is not None or not _SECRET.search(name), f"{group}.headers.{name}: holds a key; {out}")
        message = f"{group}.headers.{name}={value}: no such variable in the environment"
        is_set = variable is None or variable in os.environ or not in_use
        require(is_set, message + nearest(variable or "", os.environ))
        fault = header_fault(os.environ.get(variable or "", "unset"))
        require(not fault, f"{group}.headers.{name}={value}: the variable {fault}")


def check_support(endpoint: EndpointConfig, setting: str, group: str) -> None:
    """Raises ConfigError if LiteLLM rejects a setting of `group` for the model named by `setting`.

    Needs no network: LiteLLM translates the arguments as it does for each call, from its own table of models.
    """
    if served_by_run(endpoint.model):
        return
    from litellm.utils import get_optional_params  # which takes seconds

    model, provider, _, _ = _provider(endpoint, setting, group)
    options: dict[str, Any] = {}
    # Added one by one, to find out which is rejected; whether a temperature is accepted may depend on the effort.
    settings = {"reasoning_effort": None, **arguments(endpoint)}
    for name, value in settings.items():
        if value is None or name == "extra_headers":
            continue
        options[name] = value
        try:
            get_optional_params(model=model, custom_llm_provider=provider, **options)
        except Exception as error:  # LiteLLM raises many types for values that it does not expect
            reason = " ".join(str(error).partition("To drop")[0].split())
            reason = reason.removeprefix("litellm.UnsupportedParamsError: ").rstrip(". ,")
            known = name in _SAMPLING
            option = f"{group}.{name}" if known else f"{group}.extra.{name}"
            leaves_out = known and not group.startswith("data.eval")  # there null means the assistant's value
            out = f"set {option}=null to leave it out" if leaves_out else "remove it"
            raise ConfigError(f"{option}={value}: {endpoint.model} does not accept it ({reason}); {out}") from error


def check_access(endpoint: EndpointConfig, setting: str, group: str) -> None:
    """Raises ConfigError if every call of the model named by `setting` would fail: no address, or no key on this node.

    A key is required only if nothing else can authenticate. Clouds (Azure, Bedrock, Vertex AI, …) also accept machine
    identities, and a server at api_base, or one with headers, may need no key, unless LiteLLM itself requires one.
    """
    if served_by_run(endpoint.model):
        return
    from litellm import validate_environment

    _, provider, key, address = _provider(endpoint, setting, group)
    label = f"{setting}={endpoint.model}"
    message = f"{label}: the address of your own server is not set; set {group}.api_base=http://HOST:PORT/v1"
    require(provider not in _SELF_HOSTED or bool(address), message)
    _check_variables(provider, endpoint.api_base is None)
    absent = validate_environment(str(endpoint.model))["missing_keys"]
    if key or not absent or provider not in _KEYED:
        return
    start = absent[0].partition("_")[0] + "_"
    if any(name.startswith(start) and _KEY.search(name) for name in os.environ):  # LiteLLM reads more than one name
        return
    other_access = bool(endpoint.api_base or endpoint.headers) or absent[0].replace("KEY", "BASE") in os.environ
    hosted = f"hosted_vllm/{label.partition('/')[2]}"
    out = f"; if the server needs no key, set it to any value or name the model {hosted}"
    message = f"{label}: {' or '.join(absent)} is not set{out if endpoint.api_base else '; export it'}"
    require(other_access and provider not in _KEYED_EVERYWHERE, message)


def _check_variables(provider: str, addresses: bool) -> None:
    """Raises ConfigError if a key of `provider` in the environment, or one of its `addresses`, cannot be sent."""
    start = provider.partition("_")[0].upper()
    for name, value in sorted(variables(os.environ)):
        if value and name.startswith(start) and name.endswith("_API_KEY"):
            fault = header_fault(value)
            require(not fault, f"{name}: {fault}")  # without its value
        elif value and addresses and name.startswith(start) and name.endswith(("_API_BASE", "_BASE_URL")):
            fault = address_fault(value)
            require(not fault, f"{name}={value}: {fault}")


def _provider(endpoint: EndpointConfig, setting: str, group: str) -> tuple[str, str, str | None, str | None]:
    """As LiteLLM resolves them: the provider's name for the model, the provider, the key and the address."""
    from litellm import get_llm_provider  # which takes seconds
    from openai import OpenAIError

    be_quiet()
    try:
        resolved: tuple[str, str, str | None, str | None] = get_llm_provider(
            str(endpoint.model), api_base=endpoint.api_base
        )
    except OpenAIError as error:
        out = f"give PROVIDER/MODEL, e.g. openai/gpt-4o, or hosted_vllm/NAME for your own server at {group}.api_base"
        raise ConfigError(f"{setting}={endpoint.model}: LiteLLM knows no such provider; {out}") from error
    return resolved


def _read(value: str) -> str:
    if not value.startswith(ENVIRONMENT):
        return value
    variable = value.removeprefix(ENVIRONMENT)
    if variable not in os.environ:  # possible on nodes that did not check the settings
        raise LlmError(f"{value}: no such variable in the environment of {socket.gethostname()}")
    return os.environ[variable]
