"""SGLang's own models, built and loaded on one CPU process as any rank of a server, beside models/hf_to_sglang.py.

No process groups are made: the layers ask them only for a size and a rank. Run by test_hf_to_sglang.py in a process of
its own, as SGLang decides at import that there is no GPU.
"""
# ruff: noqa: E402 (the missing parts come first)

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
from megatron_collab import patches

patches.apply("torchvision", "sglang")

import torch
from sglang.srt import runtime_context
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models import llama, qwen2, qwen3, qwen3_moe
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig

from megatron_collab.models import hf_to_megatron, hf_to_sglang
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_sglang import Parameter, ServerLayout

MODELS = {
    "llama": llama.LlamaForCausalLM,
    "mistral": llama.LlamaForCausalLM,
    "qwen2": qwen2.Qwen2ForCausalLM,
    "qwen3": qwen3.Qwen3ForCausalLM,
    "qwen3_moe": qwen3_moe.Qwen3MoeForCausalLM,
}


@contextmanager
def ranked(folder: Path, layout: ServerLayout, rank: int) -> Iterator[None]:
    """As on rank `rank` of a server."""
    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        tp_size=layout.tp,
        ep_size=layout.ep,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        dtype="float32",
        skip_tokenizer_init=True,
    )
    place = runtime_context.SpawnRanks(world_rank=rank, gpu_id=rank, dp_rank=None)
    runtime_context.publish(arguments, role="scheduler", ranks=place)
    parallel = runtime_context.get_parallel()

    def group(name: str) -> SimpleNamespace:
        size, own = getattr(parallel, f"{name}_size"), getattr(parallel, f"{name}_rank")
        return SimpleNamespace(world_size=size, rank_in_group=own, cpu_group=None)

    groups: dict[str, Any] = {f"{name}_group": group(name) for name in ("tp", "attn_tp", "moe_tp", "moe_ep")}
    alone = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True)
    with parallel.override(**groups, pp_group=alone):
        yield
    runtime_context.reset_context()


def numbered(shape: ModelShape) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, every element a number of its own."""
    found, start = {}, 1
    for name, sides in hf_to_megatron.hf_shapes(shape).items():
        count = torch.Size(sides).numel()
        found[name] = torch.arange(start, start + count, dtype=torch.float32).view(sides)
        start += count
    return found


def compare(hf: dict[str, Any], layout: ServerLayout, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(hf))
    shape = ModelShape.from_hf(hf)
    quantisation = Fp8Config(True, "dynamic", weight_block_size=[128, 128]) if layout.fp8 else None
    for rank in range(layout.tp):
        wanted = {parameter.name: parameter for parameter in hf_to_sglang.table(shape, layout, rank)}
        with ranked(folder, layout, rank), torch.no_grad():
            model = MODELS[hf["model_type"]](AutoConfig.from_pretrained(folder), quantisation)
            held = dict(model.named_parameters())
            scales = {name: held.pop(name) for name in list(held) if name.endswith("_scale_inv")}
            assert {name: tuple(value.shape) for name, value in held.items()} == {
                name: parameter.shape for name, parameter in wanted.items()
            }
            if layout.fp8:
                check_fp8(wanted, held, scales)
                check_kv_scales(wanted, held, model)
            else:
                check_elements(wanted, held, numbered(shape), model)


def check_fp8(wanted: dict[str, Parameter], held: dict[str, torch.Tensor], scales: dict[str, torch.Tensor]) -> None:
    from megatron_collab.weight_sync.encoding import fp8_scales

    quantised = {name: parameter for name, parameter in wanted.items() if parameter.quantised}
    assert {name for name, value in held.items() if value.dtype is torch.float8_e4m3fn} == quantised.keys()
    assert {name: (tuple(value.shape), value.dtype) for name, value in scales.items()} == {
        f"{name}_scale_inv": (fp8_scales(parameter.shape), torch.float32) for name, parameter in quantised.items()
    }


def check_kv_scales(wanted: dict[str, Parameter], held: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """After a publish has filled in the constants, what SGLang derives from them at its end multiplies by 1."""
    constants = {name: parameter.constant for name, parameter in wanted.items() if parameter.constant is not None}
    for name, value in constants.items():
        assert held[name].dtype is torch.float32 and not wanted[name].parts
        held[name].fill_(value)
    attention = {name: module for name, module in model.named_modules() if isinstance(module, RadixAttention)}
    scaled = {name: module for name, module in attention.items() if module.quant_method is not None}
    assert {f"{name}.{x}_scale" for name in scaled for x in "kv"} == constants.keys()
    for module in scaled.values():
        module.quant_method.process_weights_after_loading(module)
        assert (module.k_scale_float, module.v_scale_float) == (1.0, 1.0)


def check_elements(
    wanted: dict[str, Parameter], held: dict[str, torch.Tensor], hf: dict[str, torch.Tensor], model: torch.nn.Module
) -> None:
    for value in held.values():
        value.fill_(-1)
    model.load_weights(hf.items())
    for name, parameter in wanted.items():
        if (held[name] == -1).all():  # a tied head of Qwen3-MoE, which SGLang does not load
            assert name == "lm_head.weight" and parameter.parts[0].hf == "model.embed_tokens.weight"
            continue
        for part in parameter.parts:
            block = held[name][part.shard_index]
            assert (block == hf[part.hf][part.hf_index].view(block.shape)).all(), (name, part)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float32)
    for case in json.loads(sys.argv[1]):
        compare(case["hf"], ServerLayout(**case["server"]), Path(sys.argv[2]))
        print(case["hf"]["model_type"], case["server"], "as SGLang has it", flush=True)
