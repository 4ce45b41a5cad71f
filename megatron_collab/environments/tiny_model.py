"""A tiny random Qwen3 with its tokenizer as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

PAD, UNKNOWN, END, USER, ASSISTANT, SYSTEM = SPECIAL = [
    "<|pad|>", "<|unknown|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>",
]  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per word; words are separated by spaces."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _with_chat(tokenizer)


def byte_tokenizer(texts: Iterable[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer learned from `texts`; it can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"special_tokens": SPECIAL, "initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet())}
    trainer = trainers.BpeTrainer(vocab_size=vocabulary_size, show_progress=False, **options)
    tokenizer.train_from_iterator(texts, trainer)
    return _with_chat(tokenizer)


def _with_chat(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokens = {"pad_token": PAD, "unk_token": UNKNOWN, "eos_token": END}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **tokens)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, context: int) -> None:
    """Write a random fp32 Qwen3 (3 layers, width 128, tied embeddings) for `tokenizer` and up to `context` tokens."""
    logging.disable_progress_bar()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
