"""Shared helpers: tiny random Hugging Face models on disk, a free port, listening addresses of processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from megatron_collab.config import CallConfig, Config
from megatron_collab.inference.spec import ServerSpec
from megatron_collab.launch import server_specs
from megatron_collab.launch.validate import load
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import hf_shapes
from megatron_collab.runtime.network import bindable
from megatron_collab.settings import ConfigError

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet
    from transformers import PreTrainedTokenizerFast  # which takes seconds to import

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
CORPUS = [
    "the quick brown fox jumps over the lazy dog 0123456789 + - * / = ( ) user assistant system hello world\n",
    "a table for four people on friday evening at seven, please; how many people, which day, what time?\n",
]


def transcript_rows(run: Path) -> list[dict[str, Any]]:
    """Every future of a training run, in the order of its steps."""
    from megatron_collab.observability import transcripts  # needs Arrow, which a borrowed machine may lack

    return [dict(row) for row in transcripts.run_rows(run)]


def evaluation_rows(run: Path, name: str) -> list[dict[str, Any]]:
    """Every conversation of an evaluation of a run."""
    from megatron_collab.observability import evaluations, transcripts

    return [dict(row) for row in transcripts.rows_of_file(evaluations.file_of(run, name)) if row is not None]


def policy_servers(config: Config) -> ServerSpec:
    """The servers of the policy in a training run."""
    return server_specs.training(config).policy


def in_turn(rows: Iterable[object], columns: Sequence[object], fast: int = 1) -> list[ParameterSet]:
    """All combinations of two parameters; `fast` of every row, in turn, are fast, the others are marked slow.

    The longer one comes first: then some combination of every column is fast, too.
    """
    slow = pytest.mark.slow
    return [
        pytest.param(row, column, marks=[slow] * ((place - number) % len(columns) >= fast))
        for number, row in enumerate(rows)
        for place, column in enumerate(columns)
    ]


def selected(request: pytest.FixtureRequest, *parameters: str) -> list[tuple[str, ...]]:
    """The distinct values of these parameters in the selected tests of the file, for a fixture that measures them all.

    Tests that have only some of the parameters do not count.
    """
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    values = [call.params for call in calls if call is not None]
    return list(dict.fromkeys(tuple(of[name] for name in parameters) for of in values if of.keys() >= set(parameters)))


def configured[Options: CallConfig](config: Options, settings: Mapping[str, object]) -> Options:
    """`config` with `settings` by their dotted names."""
    for name, value in settings.items():
        group, _, option = name.rpartition(".")
        owner = attrgetter(group)(config)
        assert hasattr(owner, option), name
        setattr(owner, option, value)
    return config


def refused(*overrides: str) -> str:
    """The one-line error message for invalid overrides of experiment=gsm8k."""
    with pytest.raises(ConfigError) as error:
        load(["experiment=gsm8k", *overrides])
    assert "\n" not in str(error.value)
    return str(error.value)


def listening(processes: Iterable[psutil.Process]) -> dict[psutil.Process, set[tuple[str, int]]]:
    """TCP addresses and ports at which each process listens; processes that have ended are omitted."""
    addresses = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            sockets = process.net_connections("tcp")
            addresses[process] = {
                tuple(connection.laddr) for connection in sockets if connection.status == psutil.CONN_LISTEN
            }
    return addresses


_ports = set[int]()


def free_port() -> int:
    """A free port of the loopback interface, below the kernel's range of ephemeral ports.

    It is bound only later, so no other call in this process or in another worker of the session gives the same one.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while (port := bindable("port", 0, part=worker, parts=workers)) in _ports:
        pass
    _ports.add(port)
    return port


def make_model(
    folder: Path,
    *,
    family: str = "qwen3",
    seed: int = 0,
    vocab: int = 512,
    tied: bool = False,
    layers: int = 3,
    hidden: int = 64,
    ffn: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    **settings: object,
) -> Path:
    """Write a random fp32 model of `family` (qwen3, qwen2, llama, mistral, qwen3_moe) with tokenizer; return `folder`.

    `settings` are further fields of config.json; a model with experts has four of width 16, two per token.

    Weights are wide enough (0.2) that log-probs differ clearly between seeds; norms and biases are perturbed,
    so that a weight that lands in the wrong place is noticed.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = byte_level_tokenizer(vocab)
    tokenizer.save_pretrained(folder)
    fields = {"rope_theta": 10000.0, **(EXPERTS if family == "qwen3_moe" else {}), **settings}
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **fields,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 1:
                    weight.add_(
                        torch.randn_like(weight) * 0.2 if name.endswith(".bias") else torch.randn_like(weight) * 0.1
                    )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    return folder


def write_weights(folder: Path) -> None:
    """Write all-zero weights into a folder that has a config.json."""
    config = json.loads((folder / "config.json").read_text())
    shapes = hf_shapes(ModelShape.from_hf(config))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")


def nats_apart(first: Path, second: Path) -> float:
    """KL divergence of next-token distributions from the first model to the second, in nats, on random texts."""
    import torch
    from transformers import AutoModelForCausalLM

    texts = torch.randint(3, 500, (4, 48), generator=torch.Generator().manual_seed(0))
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (first, second)]
    with torch.no_grad():
        log_p, log_q = (model(texts).logits.log_softmax(-1) for model in models)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def make_reward_model(folder: Path, *, family: str = "qwen3", positions: int = 2048, vocab: int = 512) -> Path:
    """Write a random fp32 model of `family` with one output for up to `positions` tokens, and tokenizer; `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    tokenizer = byte_level_tokenizer(vocab)
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=positions,
        initializer_range=0.2,
        num_labels=1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def byte_level_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab` tokens (at least 259) with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
