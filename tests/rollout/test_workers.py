"""Groups on real Ray workers, with a fake policy, the scripted booking user and the booking metrics."""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import ray

from megatron_collab.config import Config
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.environments import booking, tiny_model
from megatron_collab.inference.client import EngineError
from megatron_collab.launch import server_specs
from megatron_collab.launch.play_specs import play_spec, reward_spec, user_directory
from megatron_collab.llm.client import LlmClient
from megatron_collab.llm.limiter import BudgetSpent
from megatron_collab.llm.served import ServedModel
from megatron_collab.reward.workers import RewardClient, RewardWorker
from megatron_collab.rollout import scheduler
from megatron_collab.rollout.conversation import FuturesPlayer
from megatron_collab.rollout.journal import Journal, WeightDigests
from megatron_collab.rollout.scheduler import Flight, GroupRequest, Slot, worker_error
from megatron_collab.rollout.users import Users
from megatron_collab.rollout.workers import Workers, start_workers
from megatron_collab.runtime.process import Hung
from megatron_collab.runtime.ray_cluster import ray_session, start_actor
from megatron_collab.settings.schema import RunConfig
from megatron_collab.types import Ending, Group, Message, Missing, Task
from tests.helpers import free_port
from tests.llm.endpoint import Endpoint, in_thread, says
from tests.proxy import RecordingProxy, recording_proxy
from tests.rollout.failing_worker import FailingWorker
from tests.rollout.fakes import CharacterRenderer, FakePolicy, config

pytestmark = [pytest.mark.processes, pytest.mark.slow]

BOOKING = "megatron_collab.environments.booking_metrics"
METRICS = {
    "booking_right": {"metric": f"{BOOKING}:BookingRight"},
    "ask_when_missing": {"metric": f"{BOOKING}:AskWhenMissing"},
    "ask_when_complete": {"metric": f"{BOOKING}:AskWhenComplete"},
}
WEIGHTS = {"booking_right": 1.0, "token_amount": -0.001, "ask_when_missing": 0.0, "ask_when_complete": 0.0}


def answer(prompt: str, seed: int) -> str:
    """Asks for all that is missing in the prompt, then books; every third seed books a guess at once."""
    if seed % 5 == 0:
        raise EngineError("the engine fell over")
    matches = {
        "people": re.search(r"for (\d+) people", prompt),
        "day": re.search(r"on (\w+day)", prompt),
        "time": re.search(r"at (\d+pm)", prompt),
    }
    open_ = [slot for slot, match in matches.items() if not match]
    if open_ and seed % 3:
        return booking.ask(open_)
    rng = random.Random(seed)
    return booking.final({s: match[1] if match else rng.choice(booking.SLOTS[s]) for s, match in matches.items()})


def tasks(n: int) -> list[Task]:
    """`n` tasks; two thirds of them leave something open."""
    task_list = []
    for i in range(n):
        goal = {slot: values[i % len(values)] for slot, values in booking.SLOTS.items()}
        text = " ".join([booking.REQUEST, booking.say(goal, list(booking.SLOTS)[: i % 3 + 1]), "."])
        task_list.append(Task(f"t{i}", (Message("user", text),), json.dumps(goal), booking.final(goal), booking.USER))
    return task_list


class FakeEngineWorker:
    """A ConversationWorker whose policy and chat template are fakes."""

    def __init__(self, config: Config, reward_worker: str) -> None:
        policy = FakePolicy(answer, wait=0.01)
        rewards = RewardClient([ray.get_actor(reward_worker)], reward_spec(config.reward))
        users = Users(user_directory(config), LlmClient())
        self.player = FuturesPlayer(policy, CharacterRenderer(), users, rewards, play_spec(config))

    async def play(self, task: Task, stream: str, eval_set: EvaluationSet | None = None, server: int = 0) -> Group:
        return await self.player.play(task, stream)

    async def omp_threads(self) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Config:
    settings = config(max_user_turns=2)
    settings.run.dir = str(tmp_path_factory.mktemp("run"))
    settings.reward.weights, settings.reward.metrics = dict(WEIGHTS), METRICS
    settings.train.rollouts_per_prompt = 4
    return settings


@pytest.fixture(scope="module")
def proxy() -> Iterator[RecordingProxy]:
    """Environment variables, also those of Ray's workers, name a proxy for all addresses except example.org."""
    with recording_proxy() as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in proxy.environment().items():
            patch.setenv(name, value)
        yield proxy


@pytest.fixture(scope="module")
def session(options: Config, proxy: RecordingProxy) -> Iterator[None]:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with ray_session(2):
        yield
    remaining = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    _, alive = psutil.wait_procs(remaining, timeout=60)
    assert alive == []


@pytest.fixture(scope="module")
def rewards(session: None, options: Config) -> Any:
    return start_actor(RewardWorker, reward_spec(options.reward), options.llm, Path(options.run.dir), name="scores")


@pytest.fixture(scope="module")
def worker(options: Config, rewards: Any) -> Any:
    return start_actor(FakeEngineWorker, options, "scores")


@pytest.fixture(scope="module")
def groups(worker: Any) -> list[Group]:
    return ray.get([worker.play.remote(task, f"train-0-{i}") for i, task in enumerate(tasks(6))], timeout=60)


def test_groups_come_back_whole(groups: list[Group]) -> None:
    assert [group.task.id for group in groups] == [task.id for task in tasks(6)]
    assert [len(group.rollouts) for group in groups] == [4] * 6
    for group in groups:
        for rollout in group.rollouts:
            assert len(rollout.futures) == (3 if rollout.start.turns else 1)
            for future in rollout.futures:
                assert future.conversation.ending is not None
                assert future.conversation.messages[: len(group.task.messages)] == group.task.messages
                assert future.conversation.turns[:1] == rollout.start.turns


def test_the_reward_is_that_of_the_last_replies(groups: list[Group]) -> None:
    for group in groups:
        for rollout in group.rollouts:
            whole = [f.conversation for f in rollout.futures if f.conversation.ending is not Ending.ERROR]
            if not whole:
                continue
            right = [conversation.turns[-1].text == group.task.answer for conversation in whole]
            tokens = [sum(len(turn.token_ids) for turn in conversation.turns) for conversation in whole]
            expected = sum(right) / len(right) - 0.001 * sum(tokens) / len(tokens)
            assert rollout.reward.value == pytest.approx(expected)
    values = {rollout.reward.value > 0.5 for group in groups for rollout in group.rollouts
              if not isinstance(rollout.reward.value, Missing)}  # fmt: skip
    assert values == {True, False}


def test_an_outage_is_counted_and_never_a_number(groups: list[Group]) -> None:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    unplayed = [rollout for rollout in rollouts if not rollout.start.turns]
    assert unplayed
    for rollout in unplayed:
        assert isinstance(rollout.reward.value, Missing)
        assert "the engine fell over" in rollout.reward.value.why
    broken = [r for r in rollouts if r.start.turns and any(f.conversation.ending is Ending.ERROR for f in r.futures)]
    assert broken
    assert all(rollout.reward.missing > 0 for rollout in broken)


def test_playing_again_gives_the_same_group(worker: Any, groups: list[Group]) -> None:
    assert ray.get(worker.play.remote(groups[0].task, "train-0-0"), timeout=60) == groups[0]


def test_a_reward_worker_that_dies_is_restarted(worker: Any, rewards: Any, groups: list[Group]) -> None:
    ray.kill(rewards, no_restart=False)
    assert ray.get(worker.play.remote(groups[1].task, "train-0-1"), timeout=60) == groups[1]


def test_workers_compute_in_one_thread(worker: Any) -> None:
    assert ray.get(worker.omp_threads.remote()) == "1"


def test_goals_stay_with_their_conversations(worker: Any) -> None:
    all_tasks = tasks(50)
    pending = [worker.play.remote(task, f"train-2-{i}") for i, task in enumerate(all_tasks)]
    for task, group in zip(all_tasks, ray.get(pending, timeout=60), strict=True):
        goal = json.loads(task.goal)
        for rollout in group.rollouts:
            for future in rollout.futures:
                for message in future.conversation.messages[len(task.messages) :]:
                    if message.role == "user" and booking.STOP not in message.content:
                        text = message.content.removeprefix(booking.REQUEST).strip(" .")
                        assert all(word in booking.say(goal, booking.SLOTS) for word in text.split())


KEY = "a key that only the workers know"


class FakeServer(BaseHTTPRequestHandler):
    """SGLang's /generate for requests with the key: every turn is a question mark of one token, then the end."""

    bodies: ClassVar[list[dict[str, Any]]] = []
    reply_ids: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self.send_error(401)
            return
        self.bodies.append(body)
        meta = {
            "output_token_logprobs": [[-0.5, token, None] for token in self.reply_ids],
            "weight_version": "3",
            "finish_reason": {"type": "stop"},
        }
        meta |= {"prompt_tokens": len(body["input_ids"]), "cached_tokens": 0}
        event = json.dumps({"text": "?", "output_ids": self.reply_ids, "meta_info": meta})
        answer = f"data: {event}\n\ndata: [DONE]\n\n".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


OTHER_NODE = "127.0.0.2"  # stands for the address of another node


@pytest.fixture
def helper() -> Iterator[Endpoint]:
    """A server of another model than the policy."""
    reply = says({"current_answer": "", "thought": "", "response": "please wait"})
    with in_thread(Endpoint(reply, host=OTHER_NODE)) as endpoint:
        yield endpoint


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer((OTHER_NODE, 0), FakeServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{OTHER_NODE}:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_conversation_worker_samples_from_its_servers(
    session: None,
    options: Config,
    server: str,
    helper: Endpoint,
    proxy: RecordingProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = tiny_model.word_tokenizer(booking.words())
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "system.j2").write_text("which day and what time ?\n")
    renderer = ChatRenderer(str(tmp_path), system="which day and what time ?")
    FakeServer.reply_ids = list(renderer.reply("?"))
    task = replace(tasks(1)[0], user="guest")

    nobody = f"http://127.0.0.1:{free_port()}"
    settings = replace(options, run=RunConfig(dir=str(tmp_path)), model=replace(options.model, path=str(tmp_path)))
    settings = replace(settings, users={"guest": {"class": booking.USER}})
    settings.rollout = replace(options.rollout, system_prompt=str(tmp_path / "system.j2"))
    settings.user = replace(options.user, model="served/helper")
    served = {"helper": ServedModel("/models/helper", ((f"http://{OTHER_NODE}:{helper.port}", KEY),))}
    client = server_specs.training(settings).client
    workers = start_workers(play_spec(settings), client, [(nobody, KEY), (server, KEY)], served)
    (worker,) = workers.conversations
    ray.get(worker.use_servers.remote([1]), timeout=60)
    began = time.time()
    group = ray.get(worker.play.remote(task, "train-0-0"), timeout=60)

    for rollout in group.rollouts:
        (turn,) = rollout.start.turns
        assert turn.prompt_ids == renderer.first(task.messages) != ChatRenderer(str(tmp_path)).first(task.messages)
        assert (turn.text, turn.versions, turn.log_probs) == ("?", (3, 3), (-0.5, -0.5))
        assert rollout.reward.value == pytest.approx(-0.001 * 2 * 3)
        for future in rollout.futures:
            texts = [message.content for message in future.conversation.messages[len(task.messages) :]]
            assert texts == ["?", "please book a table ."] * 2 + ["?"]
    seeds = [body["sampling_params"]["sampling_seed"] for body in FakeServer.bodies]
    assert len(set(seeds)) == len(seeds) == 4 * (1 + 3 * 2)
    counted = ray.get(worker.take_counters.remote(), timeout=60)
    assert counted["servers_lost"] == 0
    assert (counted["user/guest/turns"], counted["user/guest/turn_limit"]) == (4 * 3 * 2, 4 * 3)
    assert workers.available_results([reward.take_counters.remote() for reward in workers.rewards], 60) == [{}]
    spans = workers.busy_since(0.0, 60)
    assert spans is not None and [[*of_client] for of_client in spans] == [[server], []], "turns, and no user's"
    assert all(began < first < last < time.time() for first, last in spans[0][server])
    llm_group = ray.get(worker.play.remote(replace(task, user="llm"), "train-0-1"), timeout=60)
    replies = {future.conversation.messages[2:3] for rollout in llm_group.rollouts for future in rollout.futures}
    assert replies == {(Message("user", "please wait"),)}, llm_group.rollouts[0].futures[0].conversation
    assert helper.requests
    assert proxy.requests == [], "requests to the run's servers, on any node, go through no proxy"
    assert KEY not in json.dumps(ray.get_runtime_context().runtime_env)
    assert_secret(KEY, os.environ["RAY_AUTH_TOKEN"])
    monkeypatch.setattr(scheduler, "group_seconds", lambda play, groups: 2.0 * groups)
    gives_up_on_a_worker_that_hangs(worker, task, settings)


def assert_secret(*keys: str) -> None:
    """No key is in a file of Ray's session or in the arguments of a process, which all users can read."""
    folder = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    texts = {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert any("worker" in name for name in texts), "Ray's logs are there"
    for process in psutil.process_iter(["cmdline"]):
        texts[f"arguments of {process.pid}"] = " ".join(process.info["cmdline"] or []).encode()
    for name, text in texts.items():
        for key in keys:
            assert key.encode() not in text, name


def gives_up_on_a_worker_that_hangs(worker: Any, task: Task, config: Config) -> None:
    """While the process is suspended, waiting for it raises Hung; once it goes on, it writes its stack."""
    (file,) = Path(config.run.dir).glob("stacks/conversation-0-*.txt")
    process = psutil.Process(int(file.stem.rpartition("-")[2]))
    process.suspend()
    try:
        digests = WeightDigests(keep=1)
        digests.begin(0)
        journal = Journal(Path(config.run.dir) / "journal", digests)
        workers = Workers([worker], [], None)
        flight = Flight(play_spec(config), workers, journal, lambda: False)
        for number in range(2):
            slot = Slot(7, 0, number)
            flight.begin(GroupRequest(slot, slot.stream, task))
        with pytest.raises(Hung, match=r"waited 4 s for any of 2 groups.*train-7-0, train-7-1 on conversation-0"):
            flight.wait_for(2, "step 7")
            while flight.poll() != "finished":
                pass
        with pytest.raises(Hung, match=r"waited 1 s \(half of launch\.timeout\) for its counters"):
            workers.answers({"its counters": worker.take_counters.remote(), "what is there": ray.put(1)}, 1.0)
        assert workers.available_results([worker.take_counters.remote(), ray.put(1)], 1.0) == [1]
        assert file.stat().st_size == 0
    finally:
        process.resume()
    deadline = time.monotonic() + 60
    while "default_worker.py" not in file.read_text():  # the signal was pending meanwhile
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_error_that_stops_the_run_has_no_traces_of_workers(session: None) -> None:
    first, second = start_actor(FailingWorker), start_actor(FailingWorker)
    for other in (None, second):
        with pytest.raises(BudgetSpent) as stopped:
            ray.get(first.act.remote("stops", other))
        assert "Traceback" in str(stopped.value) or "ray::" in str(stopped.value)
        error = worker_error(stopped.value)
        assert type(error) is BudgetSpent and str(error) == "llm.budget_usd=1 is used up"
        with pytest.raises(ValueError) as failed:
            ray.get(first.act.remote("fails", other))
        assert worker_error(failed.value) is failed.value, "its traceback stays"
