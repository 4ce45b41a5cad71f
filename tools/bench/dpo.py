"""DPO of a small Qwen3, against TRL's DPOTrainer doing the same updates on the same pairs.

    .venv/bin/python tools/bench/dpo.py [--smoke]

A random Qwen3 of 4 million parameters; 32 pairs of two replies to a prompt, all with lognormal lengths; AdamW, clipped
gradient; float32, one process, one thread. Both sides have the reference's log-probs beforehand. Our update is that of
a run, from the samples: it packs them, and the replies of a pair share their prompt. TRL gets batches that are padded
beforehand, with the micro-batch size that was faster in its first update. The sides alternate.

    loss_diff     the largest difference of the losses of the first updates, for each loss that both have (sigmoid,
                  sigmoid_norm, ipo); after the first update the policy differs from the reference
    norm_diff     the largest relative difference of their gradient norms
    trl_over_ours ratio of the median times of an update of the sigmoid loss

TRL is installed by make setup in a separate folder. --smoke: our updates alone, of 8 pairs, without TRL. The last line
is one JSON object.
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
sys.path.append(str(Path(sys.prefix) / "compared"))  # see tools/setup_env.sh
patches.apply("megatron")

import torch  # noqa: E402
from random_models import save_qwen3  # noqa: E402
from transformers import Qwen3ForCausalLM  # noqa: E402

from megatron_collab.config import Config  # noqa: E402
from megatron_collab.runtime.network import single_rank  # noqa: E402
from megatron_collab.trainer.megatron import parallel  # noqa: E402
from megatron_collab.trainer.trainer import PolicyTrainer  # noqa: E402
from megatron_collab.types import Batch, Sample, ScoredBatch  # noqa: E402

PAIRS, SMOKE_PAIRS, UPDATES = 32, 8, 3
VOCAB, LR, CLIP, BETA = 4096, 1e-5, 1.0, 0.1
SIZES = {"hidden": 256, "ffn": 768, "layers": 4, "heads": 4, "kv_heads": 2}
MEAN_LOG_PROMPT, MEAN_LOG_REPLY, SIGMA, SHORTEST, LONGEST = 4.6, 3.7, 0.8, 8, 1024
TRL_MICRO_BATCHES = (4, 16)  # pairs
LOSSES = ("sigmoid_norm", "ipo", "sigmoid")
Metrics = dict[str, float]


def make_pairs(count: int) -> list[Sample]:
    """Samples 2 k and 2 k + 1 are replies to the same prompt."""
    rng = np.random.default_rng(0)

    def words(mean_log: float) -> np.ndarray:
        return rng.integers(2, VOCAB, int(np.clip(rng.lognormal(mean_log, SIGMA), SHORTEST, LONGEST)))

    samples = []
    for prompt in (words(MEAN_LOG_PROMPT) for _ in range(count)):
        for reply in (words(MEAN_LOG_REPLY), words(MEAN_LOG_REPLY)):
            ids = np.concatenate([prompt, reply])
            mask = (np.arange(len(ids)) >= len(prompt)).astype(np.float32)
            samples.append(Sample(ids, mask, np.zeros_like(mask)))
    return samples


def ours(folder: Path, samples: list[Sample], loss: str) -> Callable[[], Metrics]:
    config = Config()
    config.launch.device, config.model.dtype, config.model.path = "cpu", "float32", str(folder)
    config.train.stage, config.algo.dpo.loss, config.algo.dpo.beta = "dpo", loss, BETA
    config.optim.lr, config.optim.clip_grad = LR, CLIP
    trainer = PolicyTrainer(trainer_spec(config))
    batch = Batch(tuple(samples))
    scored = ScoredBatch(batch.samples, reference_log_probs=trainer.log_probs(trainer.chunks, batch))
    return lambda: trainer.update(scored)


def trl(folder: Path, samples: list[Sample], loss: str, micro_batch: int) -> Callable[[], Metrics]:
    """TRL's trainer on the batches that its collator makes of the pairs."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[EOS]": 1}, unk_token="[PAD]"))
    trainer = DPOTrainer(
        model=Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=DPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            learning_rate=LR,
            max_grad_norm=CLIP,
            adam_beta2=0.95,
            weight_decay=0.0,
            beta=BETA,
            loss_type=[loss],
            max_length=None,
            per_device_train_batch_size=micro_batch,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * micro_batch),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]"),
    )
    trainer.create_optimizer()
    parts = []
    for start in range(0, len(samples), 2 * micro_batch):
        inputs = trainer.data_collator([row(samples, at) for at in range(start, start + 2 * micro_batch, 2)])
        chosen, rejected = trainer.compute_ref_log_probs(trainer.ref_model, inputs)
        parts.append({**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected})
    trainer.precompute_ref_logps, trainer.ref_model = True, None
    trainer.model.train()

    def update() -> Metrics:
        total = 0.0
        for part in parts:
            value = trainer._compute_loss(trainer.model, dict(part), False) / len(parts)
            trainer.accelerator.backward(value)
            total += value.item()
        norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), CLIP)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return {"loss": total, "grad_norm": float(norm)}

    return update


def row(samples: list[Sample], at: int) -> dict[str, list[int]]:
    """A pair in the form that TRL's collator takes."""
    prompt = int(np.flatnonzero(samples[at].loss_mask)[0])
    sides = (samples[at].token_ids, samples[at + 1].token_ids)
    chosen, rejected = (side[prompt:].tolist() for side in sides)
    return {"prompt_ids": sides[0][:prompt].tolist(), "chosen_ids": chosen, "rejected_ids": rejected}


def time_update(update: Callable[[], Metrics]) -> tuple[Metrics, float]:
    """What an update reports, and its seconds."""
    start = time.perf_counter()
    return update(), time.perf_counter() - start


def compare(folder: Path, samples: list[Sample], rounds: int) -> Metrics:
    losses, norms, times = list[float](), list[float](), list[tuple[float, float]]()
    fastest = 0
    for loss in LOSSES:
        update = ours(folder, samples, loss)
        if not fastest:
            first = {size: time_update(trl(folder, samples, loss, size))[1] for size in TRL_MICRO_BATCHES}
            fastest = min(first, key=first.__getitem__)
        peer = trl(folder, samples, loss, fastest)
        for _ in range(max(UPDATES, rounds) if loss == LOSSES[-1] else UPDATES):
            (our_metrics, our_seconds), (trl_metrics, trl_seconds) = time_update(update), time_update(peer)
            losses.append(abs(our_metrics["loss"] - trl_metrics["loss"]))
            norms.append(abs(our_metrics["grad_norm"] / trl_metrics["grad_norm"] - 1))
            times.append((our_seconds, trl_seconds))
            print(
                f"{loss}: loss {our_metrics['loss']:.6f}, TRL's {trl_metrics['loss']:.6f}; "
                f"{our_seconds:.2f} s, {trl_seconds:.2f} s"
            )
            sys.stdout.flush()
    our_median, trl_median = (statistics.median(column) for column in zip(*times[2 * UPDATES :], strict=True))
    print(f"ours {our_median:.2f} s, TRL {trl_median:.2f} s with micro-batches of {fastest} pairs")
    return {"loss_diff": max(losses), "norm_diff": max(norms), "trl_over_ours": trl_median / our_median}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="timed updates of each side")
    parser.add_argument("--smoke", action="store_true", help="our updates alone, of few pairs: no figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= single_rank("bench")
    config = Config()
    config.launch.device = "cpu"
    with tempfile.TemporaryDirectory() as scratch, parallel.init_parallel(config.launch, network_spec(config)):
        folder = Path(scratch) / "model"
        parameters = save_qwen3(folder, **SIZES, vocab=VOCAB, positions=2 * LONGEST, tie_word_embeddings=True)
        samples = make_pairs(SMOKE_PAIRS if arguments.smoke else PAIRS)
        lengths = [len(sample.token_ids) for sample in samples]
        print(f"{parameters / 1e6:.1f} M parameters, {sum(lengths)} tokens, the longest {max(lengths)}", flush=True)
        if arguments.smoke:
            update = ours(folder, samples, LOSSES[-1])
            values = {f"{name}_{number}": update()[name] for number in (1, 2) for name in ("loss", "grad_norm")}
        else:
            values = compare(folder, samples, arguments.rounds)
    print(json.dumps({"name": "dpo", "values": {name: round(value, 8) for name, value in values.items()}}))


if __name__ == "__main__":
    main()
