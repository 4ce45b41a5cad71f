"""Arguments of SGLang's server from the settings: which ones the run reserves, and whether SGLang accepts the others.

They have SGLang's names without the leading dashes; `_` and `-` are equivalent. true passes an argument without a
value; false and null leave it out, even if the run would set it.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentError, ArgumentParser
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from megatron_collab.settings import nearest

# Names of SGLang's arguments: the setting that decides them. GROUP stands for the server's group of settings.
_BY_SETTING = {
    "model model-path tokenizer-path revision delete-ckpt-after-loading": "MODEL",
    "tp-size tensor-parallel-size": "GROUP.tp",
    "ep-size expert-parallel-size ep": "GROUP.ep",
    "max-running-requests": "GROUP.max_running_requests",
    "max-total-tokens": "GROUP.max_total_tokens",
    "mem-fraction-static": "GROUP.memory_share",
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
# Every server must keep these for the run: processes, address, key, and the format of the answers.
_OF_THE_RUN = (
    "config api-key admin-api-key ssl-* enable-ssl-refresh *grpc* use-ray *sidecar* is-embedding skip-tokenizer-init "
    "encoder-* language-only language-model-only disaggregation-* incremental-streaming-output gated-launch-port "
    "dp-size data-parallel-size pp-size pipeline-parallel-size"
)
# These change the parameters of a policy server or their placement: the weight sync would not find them.
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
# These change the distribution that is sampled from, but not the log-probabilities.
_OF_THE_SAMPLES = "preferred-sampling-params enable-watermark watermark-*"
# These are fixed on a machine without a GPU.
_OF_CPU = (
    "attention-backend prefill-attention-backend decode-attention-backend sampling-backend disable-overlap-schedule "
    "disable-cuda-graph enable-deterministic-inference"
)


def plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with their names in SGLang's spelling."""
    return {name.removeprefix("--").replace("_", "-"): value for name, value in arguments.items()}


def words(arguments: Mapping[str, Any]) -> list[str]:
    """The words of a command line; arguments that are false or None are left out."""
    parts: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        parts.append(f"--{name}")
        if isinstance(value, list):
            parts += map(str, value)
        elif value is not True:
            parts.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return parts


def conflict(arguments: Mapping[str, Any], group: str, on_cpu: bool, model: str = "") -> str | None:
    """Why the run refuses an argument of `group`.args, and how to fix it; None if it accepts all.

    `model`: the setting of the server's model; empty if the server samples from the policy.
    """
    for name in plain(arguments):
        prefix, remove = f"{group}.args.{name}: ", "remove it"
        for names, setting in (_BY_SETTING | ({} if model else _BY_SETTING_OF_POLICY)).items():
            if _among(name, names):
                owner = setting.replace("GROUP", group).replace("MODEL", model or "model.path")
                return f"{prefix}{owner} decides it; set that"
        if _among(name, _OF_THE_RUN):
            return f"{prefix}the run starts and queries servers in its own way; {remove}"
        if not model and _among(name, _OF_THE_WEIGHTS):
            return f"{prefix}the weight sync does not support other parameters or placements; {remove}"
        if not model and _among(name, _OF_THE_SAMPLES):
            return f"{prefix}rollout.turn and rollout.future decide the sampling; set these"
        if on_cpu and _among(name, _OF_CPU):
            return f"{prefix}launch.device=cpu decides it; {remove}"
    return None


def fault(arguments: Mapping[str, Any], command: Sequence[str]) -> str | None:
    """Why SGLang refuses one of the settings' `arguments` in `command`, as ".NAME…: …"; None if it accepts all.

    Call it in a separate process: it needs a server's imports, which take seconds, and resolving the arguments changes
    global state.
    """
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    options = plain(arguments)
    for name, value in options.items():
        if not _takes(parser, command, f"--{name}"):
            names = re.findall(r"--([\w-]+)", parser.format_help())
            return f".{name}: SGLang has no such argument{nearest(name, names)}"
        if value is False and _takes(parser, command, f"--no-{name}"):
            return f".{name}=false: is not passed on; set no-{name}: true"
    try:
        parser.parse_args(command)
    except ArgumentError as error:
        flags = [flag.lstrip("-") for flag in str(error.argument_name).split("/")]
        name = next(flag for flag in flags if flag in options)
        return f".{name}={options[name]}: {error.message}"
    try:
        server_args = prepare_server_args(list(command))
        server_args.resolve_once()
        server_args.check_server_args()
    except Exception as error:  # SGLang raises anything for incompatible settings
        return f": SGLang rejects them: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
    return None


def _takes(parser: ArgumentParser, command: Sequence[str], argument: str) -> bool:
    try:
        return argument not in parser.parse_known_args([*command, argument])[1]
    except ArgumentError:  # this argument, or an earlier one, needs a value
        return True


def _among(name: str, patterns: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns.split())
