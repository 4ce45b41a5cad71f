"""A rank that measures what it holds in several layouts, one after the other."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_collab.config import Config
from tests.ranks import make_config, process_group

MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 1001,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
QWEN3 = {name: value for name, value in MOE.items() if "expert" not in name} | {"model_type": "qwen3"}
LAYOUTS: Mapping[str, tuple[Mapping[str, object], dict[str, object]]] = {
    "tp2": ({"parallel.tp": 2, "parallel.sequence_parallel": True, "model.dtype": "bfloat16"}, QWEN3),
    "pp2": ({"parallel.pp": 2}, {**QWEN3, "tie_word_embeddings": True}),
    "vpp2": ({"parallel.pp": 2, "parallel.vpp": 2, "parallel.recompute": "full"}, QWEN3),
    "ep2": ({"parallel.ep": 2, "model.dtype": "bfloat16"}, MOE),
}
MICRO_BATCHES = 4


def layout(settings: Mapping[str, object]) -> Config:
    """Two ranks unless `settings` say otherwise, micro-batches of 256 tokens."""
    sizes = {"launch.nproc_per_node": 2, "train.tokens_per_micro_batch": 256, "rollout.context_length": 256}
    return make_config(Path("unused"), {**sizes, **settings})


def main(folder: Path) -> None:
    from tests.planning.held import held

    for name, (settings, hf) in LAYOUTS.items():
        config = layout(settings)
        with process_group(config):
            found = held(config, hf, MICRO_BATCHES)
        (folder / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
