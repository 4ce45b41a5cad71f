"""A batch-invariant adapter backend for SGLang on CPU, without the pinned memory that SGLang's backend needs."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
from sglang.srt.lora.utils import generate_sequence_lengths


class ExactLoRABackend(TorchNativeLoRABackend):
    """For one adapter; tokens may also use none. A and B are in slots, [slots, k r, in] and [slots, out, r].

    Products use F.linear, which patches/sglang.py makes batch-invariant.
    """

    def prepare_lora_batch(
        self,
        forward_batch: Any,
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        use_cuda_graph: bool,
        use_prefill_cuda_graph: bool = False,
    ) -> None:
        """`weight_indices`: the slot of each request; rank and scaling are 0 in a slot without an adapter."""
        lengths = generate_sequence_lengths(forward_batch, device="cpu")
        scale = torch.tensor(scalings, dtype=torch.float32)[weight_indices].repeat_interleave(lengths)
        self.slot = lora_ranks.index(max(lora_ranks))
        self.batch_info: Any = SimpleNamespace(scale=scale[:, None])  # SGLang adds attributes to it

    def run_lora_a_sgemm(self, x: torch.Tensor, weights: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """alpha / rank A x, [tokens, k r]; zero for tokens without the adapter."""
        return F.linear(x, weights[self.slot]) * self.batch_info.scale.to(x.dtype)

    def run_lora_b_sgemm(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        output_offset_cpu: torch.Tensor,
        base_output: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """`base_output` [tokens, out] plus B x; the rows of B between two offsets read their r columns of x."""
        rank = weights.shape[2]
        for number, (start, stop) in enumerate(pairwise(output_offset_cpu.tolist())):
            columns = x[:, number * rank : (number + 1) * rank]
            base_output[:, start:stop] += F.linear(columns, weights[self.slot, start:stop])
        return base_output

    def run_qkv_lora(
        self, x: torch.Tensor, qkv_lora_a: torch.Tensor, qkv_lora_b: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        return self.run_lora_b_sgemm(self.run_lora_a_sgemm(x, qkv_lora_a), qkv_lora_b, **options)

    def run_gate_up_lora(
        self, x: torch.Tensor, gate_up_lora_a: torch.Tensor, gate_up_lora_b: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        return self.run_lora_b_sgemm(self.run_lora_a_sgemm(x, gate_up_lora_a), gate_up_lora_b, **options)
