"""Random models for benches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_qwen3(
    folder: Path,
    *,
    vocab: int,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 64,
    positions: int = 2048,
    dtype: torch.dtype = torch.float32,
    words: bool = False,
    **settings: Any,
) -> int:
    """Save a random Qwen3 of these sizes and further `settings`; returns its number of parameters.

    With `words` it has a tokenizer, which knows a word for each of the other tokens.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from megatron_collab.environments import tiny_model

    if words:
        tokenizer = tiny_model.word_tokenizer([f"word{number}" for number in range(vocab - len(tiny_model.SPECIAL))])
        tokenizer.save_pretrained(folder)
        settings |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
        settings |= {"pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        **settings,
    )
    model = Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
