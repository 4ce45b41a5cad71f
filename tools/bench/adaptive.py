"""Whether rollout.futures=adaptive(2,6) makes the policy gradient less noisy than 4 futures for every turn.

`python tools/bench/adaptive.py [--tasks 32] [--pool 24] [--root runs/adaptive]`, in the booking world, on the
supervised model: `tasks` tasks are played with 8 trained turns each, and every trained turn with `pool` futures. From
that pool futures are drawn without replacement, 400 times: 4 for every turn, and as many as adaptive(2,6) gives each,
which is the same number for a group. Each draw yields advantages A_i and the gradient sum_i A_i g_i, where g_i is the
gradient of the log-probability of trained turn i (transformers, float32).

`future_variance_ratio` = variance of the gradient over the draws, trained turns fixed: what futures can change.
`total_variance_ratio` = variance of a group's gradient over tasks, turns and futures: what the optimizer sees.
Both are adaptive over fixed, below 1 is better. `bias` = distance of the two mean gradients over the length of the
fixed one. `tokens_ratio` = tokens in the futures that were drawn. The last line is one JSON object.
"""
# ruff: noqa: E402 (patches come before the libraries)

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from megatron_collab import patches

patches.apply("litellm", "torchvision")

from megatron_collab.algo.advantages import grpo
from megatron_collab.config import Config, future_range, load
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.data.datasets import load_tasks
from megatron_collab.inference.router import Router
from megatron_collab.inference.server import SGLangServer
from megatron_collab.llm.client import LlmClient
from megatron_collab.reward import metrics
from megatron_collab.rollout.adaptive import allocate
from megatron_collab.rollout.group import Player
from megatron_collab.rollout.users import Users
from megatron_collab.types import Conversation, Group, Missing, Rollout, Score, Task

ADAPTIVE, FIXED, DRAWS = "adaptive(2,6)", 4, 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--pool", type=int, default=24)
    parser.add_argument("--root", type=Path, default=Path("runs/adaptive"))
    arguments = parser.parse_args()
    root = arguments.root
    world = [f"data.dir={root}/world"]
    sft = ["experiment=booking_sft", f"run.dir={root}/sft", *world]
    subprocess.run([sys.executable, "-m", "megatron_collab.train", *sft], check=True)
    futures = f"rollout.futures={arguments.pool}"
    config = load(["experiment=booking", f"run.dir={root}/run", f"model.path={root}/sft/hf", futures, *world])
    groups = asyncio.run(play(config, arguments.tasks))
    print(json.dumps({"name": "adaptive", "values": compare(groups, gram(groups, config.model.path))}))


class Rewards:
    """Scores in this process."""

    def __init__(self, config: Config) -> None:
        self.metrics = {
            name: metrics.find(name)(None, None) for name, weight in config.reward.weights.items() if weight
        }  # type: ignore[arg-type]

    async def score(self, task: Task, conversation: Conversation) -> dict[str, Score]:
        scores = {name: await metric.score(task, conversation) for name, metric in self.metrics.items()}
        return {name: score for name, score in scores.items() if score is not None}


async def play(config: Config, tasks: int) -> list[Group]:
    with SGLangServer(config, Path(config.run.dir) / "sglang.log") as server:
        server.wait_healthy(config.rollout.server.start_timeout)
        endpoints = [(server.url, server.api_key)]
        policy, users = Router(endpoints, config.rollout, unpublished=True), Users(config, LlmClient(), endpoints)
        player = Player(policy, ChatRenderer(config.model.path), users, Rewards(config), config)  # type: ignore[arg-type]
        chosen = load_tasks(Path(config.data.train))[:tasks]
        groups = await asyncio.gather(*(player.play(task, f"adaptive-{i}") for i, task in enumerate(chosen)))
        await policy.close()
    return [group for group in groups if all(played(rollout) for rollout in group.rollouts)]


def played(rollout: Rollout) -> bool:
    """Whether the trained turn has its futures, each with a value."""
    return not rollout.start.ending and not isinstance(rollout.reward.value, Missing) and not rollout.reward.missing


def gram(groups: Sequence[Group], model_path: str) -> np.ndarray:
    """The inner products of the trained turns' gradients, [turns, turns]; every group has as many turns."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    parameters = list(model.parameters())
    gradients = []
    for group in groups:
        for rollout in group.rollouts:
            (turn,) = rollout.start.turns
            ids = torch.tensor([turn.prompt_ids + turn.token_ids])
            log_probs = model(ids).logits[0, :-1].log_softmax(-1)
            chosen = log_probs[torch.arange(ids.shape[1] - 1), ids[0, 1:]][len(turn.prompt_ids) - 1 :]
            found = torch.autograd.grad(chosen.sum(), parameters)
            gradients.append(torch.cat([part.flatten() for part in found]))
    stacked = torch.stack(gradients)
    return (stacked @ stacked.T).double().numpy()


def compare(groups: Sequence[Group], gram_TT: np.ndarray) -> dict[str, float]:
    """Variances over the draws and over the groups; a gradient is its coefficients on the T trained turns."""
    rng = np.random.default_rng(0)
    low, high = future_range(ADAPTIVE)
    values = [
        np.array([[value(future.scores) for future in rollout.futures] for rollout in g.rollouts]) for g in groups
    ]
    tokens = [np.array([[written(f.conversation) for f in rollout.futures] for rollout in g.rollouts]) for g in groups]
    turns = len(values[0])
    drawn: dict[str, list[np.ndarray]] = {"fixed": [], "adaptive": []}
    spent = {"fixed": 0, "adaptive": 0}
    for _ in range(DRAWS):
        made: dict[str, list[np.ndarray]] = {"fixed": [], "adaptive": []}
        for values_GF, tokens_GF in zip(values, tokens, strict=True):
            order = rng.permuted(np.tile(np.arange(values_GF.shape[1]), (turns, 1)), axis=1)
            shuffled = np.take_along_axis(values_GF, order, axis=1)
            more = allocate(shuffled[:, :low].tolist(), turns * (FIXED - low), high)
            for name, counts in (("fixed", [FIXED] * turns), ("adaptive", [low + extra for extra in more])):
                means = [shuffled[i, :count].mean() for i, count in enumerate(counts)]
                made[name].append(grpo(np.array(means)))
                written_G = np.take_along_axis(tokens_GF, order, axis=1)
                spent[name] += int(sum(written_G[i, :count].sum() for i, count in enumerate(counts)))
        for name, parts_G in made.items():
            drawn[name].append(np.concatenate(parts_G))
    mean = {name: np.mean(draws, axis=0) for name, draws in drawn.items()}

    def square(coefficients: np.ndarray) -> float:
        return float(coefficients @ gram_TT @ coefficients)

    def by_group(coefficients: np.ndarray) -> list[float]:
        return [
            float(coefficients[span] @ gram_TT[span, span] @ coefficients[span])
            for span in (slice(i * turns, (i + 1) * turns) for i in range(len(groups)))
        ]

    futures = {name: float(np.mean([square(draw - mean[name]) for draw in draws])) for name, draws in drawn.items()}
    # Over groups: E |g|^2 - |E g|^2, the mean over groups being that of a batch.
    total = {
        name: float(np.mean([np.mean(by_group(draw)) for draw in draws])) - square(mean[name]) / len(groups) ** 2
        for name, draws in drawn.items()
    }
    return {
        "future_variance_ratio": round(futures["adaptive"] / futures["fixed"], 4),
        "total_variance_ratio": round(total["adaptive"] / total["fixed"], 4),
        "share_of_futures_in_total": round(futures["fixed"] / len(groups) / total["fixed"], 4),
        "bias": round((square(mean["adaptive"] - mean["fixed"]) / square(mean["fixed"])) ** 0.5, 4),
        "tokens_ratio": round(spent["adaptive"] / spent["fixed"], 4),
        "groups": len(groups),
    }


def value(scores: dict[str, Score]) -> float:
    """The booking world's reward of one future."""
    right, needless = scores["booking_right"], scores["needless_questions"]
    assert not isinstance(right, Missing) and not isinstance(needless, Missing)
    return right - 0.1 * needless


def written(conversation: Conversation) -> int:
    return sum(len(turn.token_ids) for turn in conversation.turns[1:])


if __name__ == "__main__":
    main()
