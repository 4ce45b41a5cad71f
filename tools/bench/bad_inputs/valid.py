"""The valid command line of each command and the files that it needs. Bad inputs are made from these."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

OUT = "OUTPUT-FOLDER"  # in arguments: a new folder of each attempt
CALLED = "http://127.0.0.1:9/v1"  # address of language models; no input gets as far as a call
_SHORT = ("rollout.context_length=256", "rollout.turn.max_new_tokens=24", "rollout.future.max_new_tokens=24")
_PLAYS = ("reward.weights={token_amount: -1}", "user.name=replay", *_SHORT, "launch.device=cpu")

ROW: dict[str, Any] = {
    "id": "0",
    "prompt": [{"role": "user", "content": "hi"}],
    "goal": "g",
    "answer": "a",
    "metadata": {"replay": ["thanks"]},
}
SPOKEN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
CONVERSATION: dict[str, Any] = {"messages": SPOKEN}
PAIR: dict[str, Any] = {
    "prompt": SPOKEN[:1],
    "chosen": [{"role": "assistant", "content": "hello"}],
    "rejected": [{"role": "assistant", "content": "no"}],
}


class Input(NamedTuple):
    name: str
    command: str
    arguments: Sequence[str]


def line(row: Any) -> bytes:
    return json.dumps(row).encode() + b"\n"


class Files:
    """The files of the valid command lines below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.world, self.run, self.recording = folder / "world", folder / "run", folder / "recording"
        self.model, self.checkpoints = self.world / "model", self.run / "checkpoints"
        self.tasks, self.conversations, self.pairs = (folder / f"{name}.jsonl" for name in ("tasks", "sft", "dpo"))
        self.log = folder / "log.jsonl"

    def write(self) -> None:
        """Those that no command writes."""
        self.tasks.write_bytes(b"".join(line(ROW | {"id": str(number)}) for number in range(len(LOGGED))))
        self.log.write_bytes(b"".join(line({"messages": [*SPOKEN, _answer(text)]}) for text in LOGGED))
        self.conversations.write_bytes(line(CONVERSATION))
        self.pairs.write_bytes(line(PAIR))
        _record(self.recording)

    def write_run(self, base: Input) -> None:
        """A run that has started from checkpoints and played a task in step 0."""
        from megatron_collab.config import recorded
        from megatron_collab.launch.validate import load
        from megatron_collab.observability import transcripts

        config = load([argument.replace(OUT, str(self.run)) for argument in base.arguments])
        (self.run / "config.json").write_text(json.dumps(recorded(config)))
        (self.run / "metrics.jsonl").write_bytes(line({"step": 0, "reward": 0.5, "loss": 1.0}))
        played = [
            PLAYED | {"task": str(number), "messages": [*SPOKEN, _answer(text)]} for number, text in enumerate(LOGGED)
        ]
        transcripts.write_step(self.run, 0, transcripts.by_group(played))


# What users say, different enough not to be the same conversation.
LOGGED = ("a table for two", "cancel my order", "why is the sky blue", "fix this loop", "write to my aunt", "no thanks")


def _answer(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


PLAYED: dict[str, Any] = {
    "step": 0,
    "task": "0",
    "rollout": 0,
    "future": 0,
    "messages": SPOKEN,
    "scores": {"token_amount": 3.0},
    "reward": -3.0,
    "ending": "user_done",
    "error": "",
}


def _record(folder: Path) -> None:
    from megatron_collab.llm.recording import Call, CallKey, Shard, Usage

    question = {"model": "openai/user", "messages": [{"role": "user", "content": "hi"}], "sample": None}
    shard = Shard(folder, "runs/a")
    shard.record(CallKey("a", 0, question), Call("a", 0, 1.0, question, {"answer": "yes"}, None, Usage(1, 1)))


def valid(files: Files) -> dict[str, Input]:
    """A valid input of each command and form of it, by name; one may read what an earlier one has written."""
    model, rows, run = f"model.path={files.model}", f"data.train={files.tasks}", f"run.dir={OUT}/run"
    judge = (
        "reward.judge.model=openai/gpt-4o",
        f"reward.judge.api_base={CALLED}",
        "llm.prices={openai/gpt-4o: [1, 1]}",
    )
    plays = (run, f"data.eval={files.tasks}", *_PLAYS)
    builds = ("rollout.max_messages=6", "rollout.futures=1", *plays)
    trains = (run, model, "launch.device=cpu", "train.steps=1", "rollout.context_length=256", "model.dtype=float32")
    calls = ("user.model=openai/gpt-4o", f"user.api_base={CALLED}", "user.name=llm")
    planned = "experiment=train_8b"
    in_world = (f"data.dir={files.world}", f"model.path={files.model}", "launch.device=cpu")
    inputs = [
        ("train", "train", ("experiment=booking", run, *in_world)),
        ("train rl", "train", (run, model, rows, "train.steps=1", *_PLAYS)),
        ("train sft", "train", (*trains, "train.stage=sft", f"data.train={files.conversations}")),
        ("train dpo", "train", (*trains, "train.stage=dpo", f"data.train={files.pairs}")),
        ("start of a run", "convert", (str(files.model), str(files.checkpoints), "--to-megatron")),
        ("to checkpoint", "convert", (str(files.model), f"{OUT}/checkpoints", "--to-megatron")),
        ("evaluate", "evaluate", (model, *plays)),
        ("build-dataset", "build-dataset", (model, *builds)),
        ("users-from-logs", "users-from-logs", (str(files.conversations), "--out", f"{OUT}/users", *judge)),
        ("convert", "convert", (str(files.run), f"{OUT}/hf", "--model", str(files.model))),
        ("doctor data", "doctor", ("--data", str(files.tasks))),
        ("doctor plan", "doctor", ("--gpu-gib", "1000", "--plan", planned)),
        ("doctor llm", "doctor", ("--llm", run, model, rows, *_PLAYS, *calls)),
        ("prepare-data", "prepare-data", (str(files.conversations), "--to", "sft", "--out", f"{OUT}/rows")),
        ("plan-sync", "plan-sync", (planned,)),
        ("rehearse", "rehearse", ("experiment=booking", run, *in_world, "--gpu-gib", "1000")),
        ("quickstart", "quickstart", ("--root", f"{OUT}/quickstart")),
        ("recording", "recording", ("show", str(files.recording))),
        ("scrub", "recording", ("scrub", str(files.recording), "--out", f"{OUT}/scrubbed", "--pattern", "h.")),
        ("reproduce", "reproduce", ("booking", "--out", f"{OUT}/study")),
        ("report", "report", (str(files.run),)),
        ("export", "export", (str(files.run), "--out", f"{OUT}.jsonl")),
        ("score", "score", (str(files.run), "--reward", "run", "--out", f"{OUT}.jsonl")),
        ("realism", "users-from-logs", (str(files.log), "--realism", str(files.run))),
        ("evaluate run", "evaluate", (f"model.path={files.run}", *plays)),
    ]
    return {name: Input(name, command, arguments) for name, command, arguments in inputs}


def copied(source: Path, target: Path) -> Path:
    """A copy of a file or folder, in a folder that is made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target))
