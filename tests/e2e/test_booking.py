"""The main job at small size: the real program under torchrun with Megatron-Core, SGLang, Ray and LiteLLM."""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from megatron_collab import train
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.inference import KEY_VARIABLE
from megatron_collab.types import Finish, Message
from tests.helpers import evaluation_rows, listening, transcript_rows
from tests.program import SFT, Program, Supervised, lines, steps_done

pytestmark = pytest.mark.processes

API_KEY = "sk-test-0123456789"  # in the environment of the undisturbed run

RL = [
    "experiment=booking",
    "train.steps=4",
    "train.checkpoint_every=1",
    "train.prompts_per_step=4",
    "train.rollouts_per_prompt=4",
    "rollout.futures=2",
    "train.eval_tasks=8",
    "train.eval_every=2",
]


RANDOM = ["reward.malformed=null", "reward.weights.token_amount=-0.01"]  # a random model ends no turn by itself


@dataclass(frozen=True)
class ProcessInfo:
    """A process: its command, the environment it was started with, the addresses at which it listens."""

    command: str
    environment: bytes
    addresses: frozenset[str]


def process_infos(program: Program) -> list[ProcessInfo]:
    infos = []
    for process, sockets in listening(program.processes()).items():
        with suppress(psutil.Error, OSError):  # it has just ended
            command, environment = " ".join(process.cmdline()), Path(f"/proc/{process.pid}/environ").read_bytes()
            infos.append(ProcessInfo(command or process.name(), environment, frozenset(host for host, _ in sockets)))
    return infos


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def starter(arguments: list[str], **environment: str) -> Program:
        programs.append(Program(arguments, tmp_path / f"console{len(programs)}.log", **environment))
        return programs[-1]

    yield starter
    for program in programs:
        program.end()


@pytest.fixture(scope="module")
def root(supervised: Supervised) -> Path:
    return supervised.root


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    """The keys of the undisturbed run, by environment variable."""
    return {"OPENAI_API_KEY": API_KEY}


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """A temporary folder for the programs, with a short path, since sockets are in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def shared() -> set[Path]:
    """The named shared memory of the undisturbed run's processes."""
    return set()


@pytest.fixture(scope="module")
def whole() -> list[ProcessInfo]:
    """The processes of the undisturbed run while it samples and trains."""
    return []


@pytest.fixture(scope="module")
def scratch() -> dict[Path, set[str]]:
    """The files in the undisturbed run's temporary folder while it trains, with the names of the keys in each."""
    return {}


@pytest.fixture(scope="module")
def trained(
    root: Path,
    keys: dict[str, str],
    temporary: Path,
    shared: set[Path],
    whole: list[ProcessInfo],
    scratch: dict[Path, set[str]],
) -> Path:
    """The undisturbed run on multiturn-aware reward."""
    program = Program(rl(root, "rl"), root / "rl.log", TMPDIR=str(temporary), **keys)
    program.when(lambda: steps_done(root / "rl") >= 1)
    shared |= shared_memory(program)
    whole += process_infos(program)
    keys |= {name: value for name in (KEY_VARIABLE, "RAY_AUTH_TOKEN") for value in program.values(name)}
    for file in temporary.rglob("*"):
        with suppress(OSError):  # it has just been removed
            if file.is_file():
                text = file.read_bytes()
                scratch[file] = {name for name, key in keys.items() if key.encode() in text}
    program.finish()
    assert program.gone() == []
    return root / "rl"


def rl(root: Path, name: str) -> list[str]:
    return [*RL, f"run.dir={root}/{name}", f"data.dir={root}/world", f"model.path={root}/sft/hf"]


def rl_at_random(root: Path, name: str) -> list[str]:
    """As `rl`, but from a random model, which needs no earlier run."""
    return [*rl(root, name), f"model.path={root}/world/model", *RANDOM]


def parameters(run: Path) -> bytes:
    return (run / "hf" / "model.safetensors").read_bytes()


def shared_memory(program: Program) -> set[Path]:
    files: set[Path] = set()
    for process in program.processes():
        with suppress(psutil.Error):
            maps = process.memory_maps(grouped=False)
            files |= {Path(mapping.path) for mapping in maps if mapping.path.startswith("/dev/shm/")}
    return {file for file in files if file.exists()}  # most have lost their name already


def kill(program: Program) -> None:
    """SIGKILL the process that the user started; all others must end too."""
    program.process.kill()
    program.wait()
    assert program.gone() == []


def test_supervised_training_learns_and_exports_a_hugging_face_folder(supervised: Supervised) -> None:
    run = supervised.run
    metrics = lines(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(60))
    assert metrics[-1]["loss"] < 0.5 * metrics[0]["loss"]
    assert (run / "hf" / "config.json").exists()
    evaluations = json.loads((run / "evaluations.json").read_text())
    losses = {record["step"]: record["score/loss"] for record in evaluations.values()}
    assert list(losses) == [0, 20, 40, 60] and losses[60] < 0.5 * losses[0]
    best = json.loads((run / "best.json").read_text())
    assert best["value"] == min(losses.values()) and (run / best["checkpoint"] / "state.json").exists()


def test_nothing_of_a_run_listens_beyond_loopback(supervised: Supervised) -> None:
    """torchrun's store and the ranks' gloo; a server of its own: tests/inference/test_server.py."""
    assert [hosts for hosts in supervised.addresses if hosts] == [{"127.0.0.1"}] * 3


@pytest.mark.slow
def test_a_fork_that_is_killed_ends_with_the_parameters_of_the_run_that_it_continues(
    supervised: Supervised, temporary: Path, start: Callable[..., Program]
) -> None:
    """To the last bit, with the same settings; it leaves nothing in the temporary folder."""
    root, finished = supervised.root, supervised.run
    run, shared = root / "forked", finished / "checkpoints" / "step_40" / "__0_0.distcp"
    arguments = [*SFT, "train.checkpoint_every=10", f"run.from={finished}@40", f"run.dir={run}"]
    arguments.append(f"data.dir={root}/world")
    killed = start(arguments, TMPDIR=str(temporary))
    killed.when(lambda: steps_done(run) >= 11)
    kill(killed)
    assert any(temporary.iterdir())
    assert shared.exists() and (run / "checkpoints" / "step_40" / shared.name).samefile(shared)
    resumed = start(arguments, TMPDIR=str(temporary))
    resumed.finish()
    assert "Warning" not in resumed.log.read_text()
    assert not list(temporary.iterdir())
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == list(range(40, 60))
    assert parameters(run) == parameters(finished)
    assert json.loads((run / "fork.json").read_text()) == {"from": str(finished.resolve()), "step": 40}
    evaluations = json.loads((run / "evaluations.json").read_text())
    assert {name: record["step"] for name, record in evaluations.items()} == {"before": 40, "after": 60}


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["online_dpo", "best_of_n"])
def test_the_best_of_a_group_is_learned_from(tmp_path: Path, start: Callable[..., Program], algo: str) -> None:
    run, few = tmp_path / algo, ["train.steps=2", "train.prompts_per_step=8", "train.eval_tasks=0"]
    start([*rl_at_random(tmp_path, algo), f"algo={algo}", *few]).finish()
    first, second = lines(run / "metrics.jsonl")
    assert first["reward"] == first["reward"] and second["grad_norm"] > 0
    if algo == "best_of_n":
        assert first["loss"] > 0 and "kl" not in first
        return
    assert first["loss"] == pytest.approx(0.6931472, abs=1e-4) and abs(first["dpo/margin"]) < 1e-4
    assert 1 <= first["dpo/pairs"] == 8 - first["dpo/groups_without_pair"]


def test_what_is_sampled_is_what_is_trained(trained: Path) -> None:
    """The engine's log-probs of its samples are the trainer's, at the start and after every update."""
    metrics = lines(trained / "metrics.jsonl")
    assert len(metrics) == 4
    for line in metrics:
        assert line["mismatch/max_abs"] <= 1e-4
    assert abs(metrics[0]["ratio_mean"] - 1) <= 1e-4
    assert abs(metrics[0]["kl"]) <= 1e-6
    assert metrics[-1]["kl"] > 1e-9, "three updates have moved the policy"


def test_every_number_and_transcript_is_in_place(trained: Path) -> None:
    result = json.loads((trained / "result.json").read_text())
    for name in ("ask_when_missing", "needless", "accuracy"):
        assert 0 <= result[f"{name}_before"] <= 1 and 0 <= result[f"{name}_after"] <= 1
    evaluations = json.loads((trained / "evaluations.json").read_text())
    assert {name: record["step"] for name, record in evaluations.items()} == {"before": 0, "step_2": 2, "after": 4}
    for record in evaluations.values():
        assert record["tasks"] == 8
        low, high = (record[f"score_{end}/booking_right"] for end in ("low", "high"))
        assert 0 <= low <= record["score/booking_right"] <= high <= 1 and low < high
    assert len(evaluation_rows(trained, "step_2")) == 8
    transcripts = transcript_rows(trained)
    assert {line["step"] for line in transcripts} == {0, 1, 2, 3}
    assert (trained / "report.html").exists()
    assert list(trained.glob("tensorboard/events*"))


def test_no_file_of_a_run_holds_a_key(trained: Path, keys: dict[str, str], scratch: dict[Path, set[str]]) -> None:
    assert keys.keys() == {"OPENAI_API_KEY", KEY_VARIABLE, "RAY_AUTH_TOKEN"}
    files = [file for file in trained.rglob("*") if file.is_file()]
    assert any(file.suffix == ".log" for file in files), "logs of the servers are there"
    for file in files:
        text = file.read_bytes()
        assert [name for name, key in keys.items() if key.encode() in text] == [], file
    assert any("raylet" in file.name for file in scratch), "files of Ray's session are there"
    assert {file: names for file, names in scratch.items() if names} == {}


def test_no_process_of_a_run_has_inherited_a_key(trained: Path, whole: list[ProcessInfo], keys: dict[str, str]) -> None:
    """Except Ray's token, which Ray's processes and their clients have, and the key of a server in its own process."""
    kinds = Counter(kind(process) for process in whole)
    assert kinds["rank"] == 2 and kinds["agent"] == 1 and kinds["server"] >= 2, kinds
    assert {"gcs_server", "raylet", "ray::ConversationWorker", "ray::RewardWorker"} <= kinds.keys()
    for process in whole:
        names = {name for name, key in keys.items() if key.encode() in process.environment}
        assert [name for name, key in keys.items() if key in process.command] == [], process.command
        assert names <= ({KEY_VARIABLE} if kind(process) == "server" else {"RAY_AUTH_TOKEN"}), (process.command, names)


def test_nothing_of_a_whole_run_listens_beyond_loopback(trained: Path, whole: list[ProcessInfo]) -> None:
    """Neither ranks and servers, nor Ray's processes, whose default is every interface (runtime/ray_cluster.py)."""
    listens = {kind(process) for process in whole if process.addresses}
    assert {"rank", "agent", "server", "gcs_server", "raylet", "ray::ConversationWorker"} <= listens
    assert {address for process in whole for address in process.addresses} == {"127.0.0.1", "::ffff:127.0.0.1"}


def kind(process: ProcessInfo) -> str:
    """The part of a run that a process is."""
    for part, name in {
        "megatron_collab.launch.torchrun": "agent",
        "megatron_collab.train": "rank",
        "megatron_collab.inference": "server",
    }.items():
        if f"-m {part}" in process.command:
            return name
    return process.command.split()[0].rpartition("/")[2].partition(".")[0]


def test_nothing_is_left_in_the_temporary_folder_and_no_shared_memory(
    trained: Path, temporary: Path, shared: set[Path]
) -> None:
    assert not list(temporary.iterdir())
    assert not [file for file in shared if file.exists()]


def test_a_finished_run_is_not_trained_again(trained: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (trained / "metrics.jsonl").stat().st_mtime_ns
    assert train.main(rl(root, "rl")) == 0 and "all 4 steps are done" in capsys.readouterr().out
    assert (trained / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.slow
def test_turns_are_credited_by_what_they_told_the_policy(root: Path, start: Callable[..., Program]) -> None:
    """The gains of step 0 are those of the start's model in float64, by transformers."""
    from transformers import AutoModelForCausalLM

    credit = ["rollout.futures=0", "reward.turn_credit=igpo", "reward.weights.information_gain=1", "train.steps=2"]
    start([*rl(root, "gain"), *credit]).finish()
    metrics = lines(root / "gain" / "metrics.jsonl")
    assert [line["step"] for line in metrics if "score/information_gain" in line] == [0, 1]
    model = AutoModelForCausalLM.from_pretrained(root / "sft" / "hf", dtype=torch.float64)
    renderer = ChatRenderer(str(root / "sft" / "hf"))
    answers = {task["id"]: task["answer"] for task in lines(root / "world" / "train.jsonl")}
    compared = 0
    for row in transcript_rows(root / "gain"):
        gains = row.get("turn_scores", {}).get("information_gain", ())
        messages, answer = [Message(**message) for message in row["messages"]], renderer.tokens(answers[row["task"]])
        replies = [at for at, message in enumerate(messages) if message.role == "assistant"][-len(gains) :]
        if row["step"] or len(gains) < 2:
            continue
        probabilities = []
        for at in replies:
            ids = torch.tensor([*renderer.first(messages[:at]), *answer])
            with torch.no_grad():
                log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            probabilities.append(log_probs[-len(answer) :].mean().exp().item())
        np.testing.assert_allclose(gains, [*np.diff(probabilities), 0.0], atol=1e-5)
        assert row["scores"]["information_gain"] == pytest.approx(sum(gains)) != 0
        compared += 1
    assert compared


@pytest.mark.slow
def test_sampling_runs_ahead_of_training(tmp_path: Path, start: Callable[[list[str]], Program]) -> None:
    """Servers receive weights in the middle of requests, and every sample is at most one version behind.

    Two ranks as DP2; every publish compares the server's weights with those that were sent.
    """
    ahead = ["rollout.max_staleness=1", "rollout.server.colocated=false", "algo.correction=truncated"]
    options = [*ahead, "parallel.tp=1", "publish.verify=1", "train.eval_tasks=0"]
    start([*rl_at_random(tmp_path, "ahead"), *options]).finish()
    metrics = lines(tmp_path / "ahead" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert metrics[0]["staleness/max"] == 0 and metrics[0]["mismatch/max_abs"] <= 1e-4  # there was no older version
    assert max(line["staleness/max"] for line in metrics) == 1
    assert all(line["ending/error"] == 0 for line in metrics if "ending/error" in line)
    streams = [
        (line["step"], line["task"], line["rollout"], line["future"]) for line in transcript_rows(tmp_path / "ahead")
    ]
    assert len(streams) == len(set(streams))
    assert len({stream[:3] for stream in streams}) == 4 * 4 * 4  # of which a malformed one has no second future


@pytest.mark.slow
def test_a_run_that_is_killed_while_conversations_pause_ends_with_the_same_parameters(
    tmp_path: Path, start: Callable[..., Program]
) -> None:
    """Servers share the ranks' devices, so conversations of step 2 pause while step 1 is trained.

    How far they are then depends on timing. So the run goes on, and a copy of its folder at this moment resumes: step 2
    continues from the same tokens, with the weights of both steps made anew from the journal.
    """
    run, finished, copied = (tmp_path / name for name in ("paused", "finished", "copied"))
    ahead = ["rollout.max_staleness=1", "algo.correction=truncated", "train.checkpoint_every=10"]
    ahead.append("rollout.server.max_running_requests=4")  # first come, first served: the groups ahead are later
    arguments = [*rl_at_random(tmp_path, run.name), *ahead, "train.steps=3", "train.eval_tasks=0"]
    record = run / "journal" / "step_1.paused"
    program = start(arguments)
    program.when(record.exists)
    shutil.copytree(run, copied)
    program.finish()
    _, by_stream = pickle.loads((copied / "journal" / record.name).read_bytes())
    turns = [turn for turns in by_stream.values() for _, turn in turns]
    assert any(turn.finish is Finish.ABORT and turn.token_ids for turn in turns), "some pause in the middle of a turn"
    run.rename(finished)
    copied.rename(run)
    start(arguments).finish()
    assert parameters(run) == parameters(finished)
    metrics, expected = (without_clock(lines(folder / "metrics.jsonl")) for folder in (run, finished))
    assert metrics == expected
    assert [line["staleness/max"] for line in metrics] == [0, 1, 1]
    assert transcript_rows(run) == transcript_rows(finished)


def without_clock(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without seconds, and without what is counted only for groups that are played."""
    prefixes = ("time", "count/", "seconds", "idle/", "llm/", "servers/")
    return [{name: value for name, value in line.items() if not name.startswith(prefixes)} for line in metrics]
