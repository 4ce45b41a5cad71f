"""Does scoring keep its workers busy? The real RewardClient and two real RewardWorkers on Ray.

4,000 futures of three turns of 200 tokens end at the same time. Their one metric awaits 20 ms, which stands for a
remote call; a worker makes `reward.concurrency` = 8 scores at once. The ideal time is 4000 x 0.020 s / (2 workers x 8)
= 5 s; `time_over_ideal` is the time from the first request to the last score over that.
`python tools/bench/reward_loop.py [--smoke]` prints, last, one JSON object; with --smoke there are 80 futures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import ray

from megatron_collab.config import Config
from megatron_collab.launch.play_specs import reward_spec
from megatron_collab.reward.metrics import Metric
from megatron_collab.reward.workers import RewardClient, RewardWorker
from megatron_collab.runtime.ray_cluster import ray_session, start_actor
from megatron_collab.settings import TrainingRewardConfig
from megatron_collab.types import Conversation, Ending, Finish, Message, Score, Task, Turn

FUTURES, SMOKE_FUTURES = 4000, 80
WORKERS, CONCURRENCY = 2, 8
TURNS, TOKENS = 3, 200
TASK = Task("t", (Message("user", "a table please"),), "goal", "answer", "nobody")


class Waits(Metric):
    """After 20 ms, the first token id of the conversation."""

    seconds = 0.020

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        await asyncio.sleep(self.seconds)
        return float(conversation.token_ids[0])


def future(number: int) -> Conversation:
    conversation = Conversation(TASK.messages, (number,))
    for _ in range(TURNS):
        log_probs, versions = (-0.5,) * TOKENS, (0,) * TOKENS
        turn = Turn(conversation.token_ids, tuple(range(TOKENS)), log_probs, versions, Finish.STOP, "word " * TOKENS)
        conversation = conversation.add_turn(turn)
    return conversation.end(Ending.TURN_LIMIT)


async def score_all(client: RewardClient, futures: list[Conversation]) -> None:
    scores = await asyncio.gather(*(client.score(TASK, conversation) for conversation in futures))
    assert scores == [{"waits": float(number)} for number in range(len(futures))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few futures: shows that it runs, no figures")
    count = SMOKE_FUTURES if parser.parse_args().smoke else FUTURES
    config = Config(reward=TrainingRewardConfig(weights={"waits": 1.0}, workers=WORKERS, concurrency=CONCURRENCY))
    config.reward.metrics = {"waits": {"metric": f"{Path(__file__).resolve()}:Waits"}}
    reward = reward_spec(config.reward)
    futures = [future(number) for number in range(count)]
    with ray_session(WORKERS + 1):
        workers = [start_actor(RewardWorker, reward, config.llm, Path("unused")) for _ in range(WORKERS)]
        ray.get([worker.ready.remote() for worker in workers])
        began = time.monotonic()
        asyncio.run(score_all(RewardClient(workers, reward), futures))
        seconds = time.monotonic() - began
    ideal = count * Waits.seconds / (WORKERS * CONCURRENCY)
    print(f"{count} scores in {seconds:.2f} s; {ideal:.2f} s at best")
    print(json.dumps({"name": "reward_loop", "values": {"time_over_ideal": round(seconds / ideal, 3)}}))


if __name__ == "__main__":
    main()
