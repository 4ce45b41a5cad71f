"""Arguments of SGLang's server that the settings pass on: which the run decides itself, and whether SGLang takes them.

They are SGLang's own names without the dashes in front; `_` and `-` are the same. true gives an argument without a
value, false and null leave it out, also where the run would give it by itself.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentError, ArgumentParser
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from megatron_collab.config import nearest

# Names of SGLang's arguments, and the setting that decides them; GROUP is that of the server.
_BY_SETTING = {
    "model model-path tokenizer-path revision delete-ckpt-after-loading": "MODEL",
    "tp-size tensor-parallel-size": "GROUP.tp",
    "ep-size expert-parallel-size ep": "GROUP.ep",
    "max-running-requests": "GROUP.max_running_requests",
    "max-total-tokens": "GROUP.max_total_tokens",
    "enable-memory-saver enable-weights-cpu-backup": "GROUP.colocated",
    "random-seed": "run.seed",
    "device": "launch.device",
    "host": "launch.interface",
    "base-gpu-id gpu-id-step": "launch.nproc_per_node",
    "nnodes node-rank": "rollout.server.nnodes",
    "port nccl-port dist-init-addr nccl-init-addr": "rollout.server.port",
}
_BY_SETTING_OF_POLICY = {
    "dtype": "model.dtype",
    "context-length allow-auto-truncate": "rollout.context_length",
    "enable-return-routed-experts": "rollout.routing_replay",
}
# What the run relies on in any server: its processes and address, its key, the answers that its clients read.
_OF_THE_RUN = (
    "config api-key admin-api-key ssl-* enable-ssl-refresh *grpc* use-ray *sidecar* is-embedding skip-tokenizer-init "
    "encoder-* language-only language-model-only disaggregation-* incremental-streaming-output gated-launch-port "
    "dp-size data-parallel-size pp-size pipeline-parallel-size"
)
# What changes the parameters of a server of the policy, or where they are: the weight sync would not find them.
_OF_THE_WEIGHTS = (
    "weight-* custom-weight-loader load-format model-impl model-loader-extra-config json-model-override-args "
    "quantization* modelopt-* quantize-and-serve rl-quant-profile *lora* lora-* speculative-* "
    "decoupled-spec-* cpu-offload-gb offload-* ple-offload-* kt-* enable-draft-weights-cpu-backup "
    "remote-instance-weight-loader-* startup-weight-load-mode checkpoint-engine-* modelexpress-config model-checksum "
    "attn-dp-size attention-data-parallel-size enable-dp-attention attn-cp-size attention-context-parallel-size "
    "dcp-size decode-context-parallel-size moe-dp-size moe-data-parallel-size dwdp-size moe-dense-tp-size "
    "moe-a2a-backend moe-runner-backend ep-num-redundant-experts init-expert-location enable-eplb elastic-ep-* "
    "enable-elastic-expert-backup max-ep-size enable-paged-experts paged-experts-* enable-dp-lm-head "
    "enable-shared-experts-attn-tp shared-experts-tp-size enable-dense-mlp-attn-tp enable-w4a4-mxfp4-megamoe"
)
# What changes the distribution that is sampled from, unlike the log-probabilities.
_OF_THE_SAMPLES = "preferred-sampling-params enable-watermark watermark-*"
# On a machine without a GPU.
_OF_CPU = (
    "attention-backend prefill-attention-backend decode-attention-backend sampling-backend disable-overlap-schedule "
    "disable-cuda-graph enable-deterministic-inference"
)


def plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by SGLang's spelling of their names."""
    return {name.removeprefix("--").replace("_", "-"): value for name, value in arguments.items()}


def words(arguments: Mapping[str, Any]) -> list[str]:
    """The words of a command line; those that are false or None are left out."""
    found: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        found.append(f"--{name}")
        if isinstance(value, list):
            found += map(str, value)
        elif value is not True:
            found.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return found


def decided(arguments: Mapping[str, Any], group: str, on_cpu: bool, model: str = "") -> str | None:
    """Why the run does not pass an argument of `group`.args on, with the way out; None where it passes all.

    `model`: the setting of the server's own model; without one it samples from the policy.
    """
    for name in plain(arguments):
        said, remove = f"{group}.args.{name}: ", "remove it"
        for names, setting in (_BY_SETTING | ({} if model else _BY_SETTING_OF_POLICY)).items():
            if _among(name, names):
                owner = setting.replace("GROUP", group).replace("MODEL", model or "model.path")
                return f"{said}{owner} decides it; set that"
        if _among(name, _OF_THE_RUN):
            return f"{said}the run relies on its own way of starting and asking servers; {remove}"
        if not model and _among(name, _OF_THE_WEIGHTS):
            return f"{said}the weight sync knows no servers with other or otherwise placed parameters; {remove}"
        if not model and _among(name, _OF_THE_SAMPLES):
            return f"{said}rollout.turn and rollout.future decide what is sampled from; set these"
        if on_cpu and _among(name, _OF_CPU):
            return f"{said}launch.device=cpu decides it; {remove}"
    return None


def fault(arguments: Mapping[str, Any], command: Sequence[str]) -> str | None:
    """Why SGLang refuses an argument of the settings, as ".NAME…: …", in a `command` with them; None if it does not.

    In a process with a server's imports, which takes seconds; resolving the arguments leaves traces in it.
    """
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    given = plain(arguments)
    for name, value in given.items():
        if not _takes(parser, command, f"--{name}"):
            named = re.findall(r"--([\w-]+)", parser.format_help())
            return f".{name}: SGLang has no such argument{nearest(name, named)}"
        if value is False and _takes(parser, command, f"--no-{name}"):
            return f".{name}=false: is left out; set no-{name}: true"
    try:
        parser.parse_args(command)
    except ArgumentError as error:
        name = next(each for each in str(error.argument_name).split("/") if each.lstrip("-") in given).lstrip("-")
        return f".{name}={given[name]}: {error.message}"
    try:
        made = prepare_server_args(list(command))
        made.resolve_once()
        made.check_server_args()
    except Exception as error:  # whatever a library raises for settings that do not go together
        return f": SGLang refuses them: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
    return None


def _takes(parser: ArgumentParser, command: Sequence[str], argument: str) -> bool:
    try:
        return argument not in parser.parse_known_args([*command, argument])[1]
    except ArgumentError:  # it, or one before it, wants another value
        return True


def _among(name: str, patterns: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns.split())
