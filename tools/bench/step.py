"""One update of a small Qwen3, against TRL's GRPOTrainer doing the same update on the same tokens.

    .venv/bin/python tools/bench/step.py [--smoke]

A random Qwen3 of 25 million parameters; 128 sequences, a prompt and a reply each, with lognormal lengths; GRPO with
the token mean, no reference, AdamW, clipped gradient; float32, one process, one thread. Both sides get the padded
or packed batch as in a run and do forward, backward, clipping and the optimizer's step. They alternate; TRL has the
micro-batch size that was faster in its first update. `trl_over_ours` is the ratio of the median times,
`loss_diff` the difference of the losses of the first update, `norm_diff` the relative one of the gradient norms.
--smoke: 16 sequences, one micro-batch size, one timed update.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_collab import patches
from megatron_collab.launch.trainer_specs import network_spec, trainer_spec

warnings.filterwarnings("ignore")
sys.path.append(str(Path(sys.prefix) / "compared"))  # TRL, installed by tools/setup_env.sh
patches.apply("megatron")

import torch  # noqa: E402
from random_models import save_qwen3  # noqa: E402
from transformers import Qwen3ForCausalLM  # noqa: E402

from megatron_collab.algo.advantages import with_advantages  # noqa: E402
from megatron_collab.config import Config  # noqa: E402
from megatron_collab.runtime.network import single_rank  # noqa: E402
from megatron_collab.trainer.megatron import parallel  # noqa: E402
from megatron_collab.trainer.trainer import PolicyTrainer  # noqa: E402
from megatron_collab.types import Batch, Credit, Sample, ScoredBatch  # noqa: E402

SEQUENCES, SMOKE_SEQUENCES = 128, 16
GROUP, VOCAB, LR, CLIP = 8, 32_768, 1e-5, 1.0
SIZES = {"hidden": 384, "ffn": 1024, "layers": 7, "heads": 6, "kv_heads": 2}
MEAN_LOG, SIGMA, SHORTEST, LONGEST = 3.7, 0.8, 8, 1024
TRL_MICRO_BATCHES = (8, 32)


def make_samples(count: int) -> list[Sample]:
    """Sequences of which the second half is the reply; rewards are compared within groups of eight."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(MEAN_LOG, SIGMA, count), SHORTEST, LONGEST).astype(int)
    samples = []
    for number, length in enumerate(lengths):
        prompt = int(length) // 2
        mask = (np.arange(length) >= prompt).astype(np.float32)
        group = str(number // GROUP)
        credit = Credit(((prompt, int(length)),), float(rng.normal()), peers=group, scale=group)
        samples.append(Sample(rng.integers(0, VOCAB, length), mask, np.zeros(length, np.float32), (credit,)))
    return samples


def ours(folder: Path, samples: list[Sample]) -> Callable[[], dict[str, float]]:
    config = Config()
    config.launch.device, config.model.dtype, config.model.path = "cpu", "float32", str(folder)
    config.optim.lr, config.optim.clip_grad, config.algo.kl_coef = LR, CLIP, 0.0
    actor = PolicyTrainer(trainer_spec(config))
    batch = Batch(tuple(samples))
    return lambda: actor.update(with_advantages(actor.score(batch), config.algo))


def trl(folder: Path, samples: list[Sample], micro_batch: int) -> Callable[[], dict[str, float]]:
    """TRL's trainer on the batch in its own form: prompts padded left, replies right."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[EOS]": 1}, unk_token="[PAD]"))
    steps = len(samples) // micro_batch
    trainer = GRPOTrainer(
        model=Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            learning_rate=LR,
            max_grad_norm=CLIP,
            adam_beta2=0.95,
            weight_decay=0.0,
            beta=0.0,
            loss_type="dapo",
            num_generations=GROUP,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=steps,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * len(samples)),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]"),
    )
    trainer.create_optimizer()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = steps
    inputs = padded(samples)
    parts = [
        {name: value[start : start + micro_batch] if value.dim() else value for name, value in inputs.items()}
        for start in range(0, len(samples), micro_batch)
    ]

    def update() -> dict[str, float]:
        total = 0.0
        for part in parts:
            loss = trainer._compute_loss(trainer.model, part)
            trainer.accelerator.backward(loss)  # the loss is divided by the tokens of the whole batch already
            total += loss.item()
        norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), CLIP)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return {"loss": total, "grad_norm": float(norm)}

    return update


def padded(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """The samples in the form that GRPOTrainer's loss takes."""
    assigned = with_advantages(ScoredBatch(tuple(samples)), Config().algo).advantages or ()
    prompts = [int(np.flatnonzero(sample.loss_mask)[0]) for sample in samples]
    replies = [len(sample.token_ids) - prompt for sample, prompt in zip(samples, prompts, strict=True)]
    columns = {
        name: torch.zeros(len(samples), max(prompts), dtype=torch.long) for name in ("prompt_ids", "prompt_mask")
    }
    columns |= {
        name: torch.zeros(len(samples), max(replies), dtype=torch.long)
        for name in ("completion_ids", "completion_mask")
    }
    for row, (sample, prompt, reply) in enumerate(zip(samples, prompts, replies, strict=True)):
        token_ids = torch.from_numpy(sample.token_ids)
        columns["prompt_ids"][row, max(prompts) - prompt :] = token_ids[:prompt]
        columns["prompt_mask"][row, max(prompts) - prompt :] = 1
        columns["completion_ids"][row, :reply] = token_ids[prompt:]
        columns["completion_mask"][row, :reply] = 1
    advantages = torch.tensor([float(values[-1]) for values in assigned])
    return columns | {"advantages": advantages, "num_items_in_batch": torch.tensor(sum(replies))}


def time_update(update: Callable[[], dict[str, float]]) -> tuple[dict[str, float], float]:
    """What an update reports, and its seconds."""
    start = time.perf_counter()
    return update(), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="timed updates of each side")
    parser.add_argument("--smoke", action="store_true", help="a few sequences, once: its ratio says nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= single_rank("bench")
    config = Config()
    config.launch.device = "cpu"
    with tempfile.TemporaryDirectory() as scratch, parallel.init_parallel(config.launch, network_spec(config)):
        folder = Path(scratch) / "model"
        parameters = save_qwen3(folder, **SIZES, vocab=VOCAB, tie_word_embeddings=True)
        samples = make_samples(SMOKE_SEQUENCES if arguments.smoke else SEQUENCES)
        lengths = [len(sample.token_ids) for sample in samples]
        print(f"{parameters / 1e6:.1f} M parameters, {sum(lengths)} tokens, the longest {max(lengths)}", flush=True)
        update = ours(folder, samples)
        micro_batches = TRL_MICRO_BATCHES[: 1 if arguments.smoke else None]
        peers = {size: trl(folder, samples, size) for size in micro_batches}
        first, _ = time_update(update)
        trl_results = {size: time_update(peer) for size, peer in peers.items()}
        fastest = min(trl_results, key=lambda size: trl_results[size][1])
        rounds = range(1 if arguments.smoke else arguments.rounds)
        times = [(time_update(update)[1], time_update(peers[fastest])[1]) for _ in rounds]
    our_median, trl_median = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"ours {our_median:.2f} s, TRL {trl_median:.2f} s with micro-batches of {fastest}")
    differences = [abs(first["loss"] - peer["loss"]) for peer, _ in trl_results.values()]
    norms = [abs(first["grad_norm"] / peer["grad_norm"] - 1) for peer, _ in trl_results.values()]
    values = {"trl_over_ours": trl_median / our_median, "loss_diff": max(differences), "norm_diff": max(norms)}
    print(json.dumps({"name": "step", "values": {name: round(value, 8) for name, value in values.items()}}))


if __name__ == "__main__":
    main()
