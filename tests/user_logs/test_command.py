"""From a log whose truth is known to tasks: nothing personal is left, nothing is twice there, no one on both sides."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_collab.commands.__main__ import run
from megatron_collab.data.examples import load_tasks
from megatron_collab.rollout.users.llm import LlmUser
from tests.llm.endpoint import Endpoint, fails, in_thread, says
from tests.rollout.users.helpers import make_users

ROOT = Path(__file__).resolve().parents[2]
MODEL = ["reward.judge.model=openai/m", "reward.judge.attempts=2"]
PEOPLE = ["Ann Meyer", "Bob Klee", "Cem Aydin", "Dora Lund", "Eva Roth", "Finn Vogel"]
FRIENDS = ["Zoe Quist", "Yann Pratt"]  # named by nobody but the model
ADDRESS = "12 Elm Street, Springfield"
CARD, IBAN, PHONE = "4111 1111 1111 1111", "DE89 3704 0044 0532 0130 00", "+49 30 901820"


@dataclass(frozen=True)
class Truth:
    """A conversation by what it is about, which no other one mentions."""

    about: str
    person: str
    says: tuple[str, ...]
    gave_up: bool

    @property
    def row(self) -> dict[str, Any]:
        roles = ("user", "assistant")
        texts = [text for message in self.says for text in (message, "Tell me more.")]
        return {
            "user_id": mail(self.person),
            "messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)],
        }


def mail(person: str) -> str:
    return f"{person.replace(' ', '.').lower()}@corp.internal"


def truths() -> list[Truth]:
    """Of each person three conversations, all of other things."""
    conversations = []
    for number, person in enumerate(PEOPLE):
        friend, first = FRIENDS[number % 2], person.split()[0]
        personal = [f"My name is {person}, mail {mail(person)}, call {PHONE}.", f"{first} pays {CARD} or {IBAN}."]
        for thing, extra in (("sofa", personal), ("lamp", ["soon"]), ("desk", ["no", "never mind"])):
            about = f"{thing}{number}"
            first_says = f"I want a {about} that fits room {number} of the {thing} wing, {number} by {number + 3} feet"
            first_says += f", for {friend} at {ADDRESS}" if thing == "lamp" else ""
            conversations.append(Truth(about, person, (first_says, *extra), gave_up=thing == "desk"))
    return conversations


def made_log() -> list[dict[str, Any]]:
    rows = [truth.row for truth in truths()]
    repeated = {**rows[0], "user_id": "x", "messages": [dict(message) for message in rows[0]["messages"]]}
    repeated["messages"][0]["content"] = repeated["messages"][0]["content"].upper() + "!"
    begun = {**rows[3], "messages": rows[3]["messages"][:-1]}
    near = json.loads(json.dumps(rows[6]))
    near["user_id"], near["messages"][-2]["content"] = "y", near["messages"][-2]["content"].replace("or", "and", 1)
    silent = {"user_id": "z", "messages": [{"role": "assistant", "content": "Hello?"}]}
    return [*rows, repeated, begun, near, silent]


def answer(truth: Truth) -> dict[str, Any]:
    """What a model would say, which copies a name that it was shown."""
    named = "; ask Zoe Quist" if truth.about.startswith("lamp") and "lamp0" in truth.about else ""
    return {
        "goal": f"You want a {truth.about}{named}.",
        "reached": "no" if truth.gave_up else "yes",
        "gave_up": truth.gave_up,
        "persona": "You furnish a house.",
        "style": "You write briefly.",
        "names": "|".join(name for name in FRIENDS if any(name in text for text in truth.says)),
        "details": ADDRESS if any(ADDRESS in text for text in truth.says) else "",
    }


async def tell(request: web.Request) -> web.StreamResponse:
    prompt = (await request.json())["messages"][0]["content"]
    (truth,) = (truth for truth in truths() if re.search(rf"\b{truth.about}\b", prompt, re.IGNORECASE))
    if truth.about == "sofa5":
        return await says("It is about a desk.")(request)
    return await says(answer(truth))(request)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Endpoint]:
    """The log in the folder of the test, where it runs, and who describes it, behind HTTP."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-nothing-at-all")
    monkeypatch.chdir(tmp_path)
    Path("log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made_log()))
    with in_thread(Endpoint(tell)) as endpoint:
        yield endpoint


def convert_log(out: str, *options: str, port: int = 9) -> int:
    base = f"reward.judge.api_base=http://127.0.0.1:{port}/v1"
    return run("users-from-logs", ["log.jsonl", "--out", out, *MODEL, base, *options])


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def written(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.processes
def test_a_log_becomes_tasks_and_does_so_again_from_its_recording(
    model: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        convert_log("out", "--eval-share", "0.3", "llm.record=calls", "llm.prices={openai/m: [1, 2]}", port=model.port)
        == 0
    )
    shown = capsys.readouterr()
    files = written(Path("out"))
    assert sorted(files) == ["README.md", "eval.jsonl", "train.jsonl"], "neither answers nor drafts"

    everything = "\n".join(text.decode() for text in files.values()) + shown.out + shown.err
    sent = json.dumps(model.requests)
    forms, introduced = [CARD, IBAN, PHONE, *map(mail, PEOPLE)], [part for name in PEOPLE for part in name.split()]
    personal = [ADDRESS, *(part for name in FRIENDS for part in name.split())]
    for secret in (*forms, *introduced, *personal):
        assert not re.search(rf"\b{re.escape(secret)}\b", everything, re.IGNORECASE), secret
    for secret in forms:
        assert secret.casefold() not in sent.casefold(), secret
    owners = {truth.about: truth.person for truth in truths() if truth.about.startswith("sofa")}
    for request in (request["messages"][0]["content"] for request in model.requests):
        for person in (person for about, person in owners.items() if about in request):
            assert not any(re.search(rf"\b{part}\b", request) for part in person.split())

    sides = {side: rows_of(Path("out") / f"{side}.jsonl") for side in ("train", "eval")}
    by_goal = {re.findall(r"[a-z]+\d", row["goal"])[0]: row for side in sides.values() for row in side}
    kept = {truth.about: truth for truth in truths() if truth.about != "sofa5"}
    assert by_goal.keys() == kept.keys(), "each once, and none that was not described"
    people = {
        side: {kept[re.findall(r"[a-z]+\d", row["goal"])[0]].person for row in rows} for side, rows in sides.items()
    }
    assert people["train"] and people["eval"] and not people["train"] & people["eval"]
    assert by_goal["lamp0"]["goal"] == "You want a lamp0; ask <PERSON_1>."
    for about, truth in kept.items():
        row = by_goal[about]
        opening = truth.says[0].partition(", for ")[0] + (", for <PERSON_1> at <DETAIL_1>" if "lamp" in about else "")
        assert row["prompt"] == [{"role": "user", "content": opening}]
        counted = {name: row["metadata"][name] for name in ("messages", "gave_up", "reached")}
        assert counted == {
            "messages": 3 if truth.gave_up else len(truth.says),
            **{k: answer(truth)[k] for k in ("gave_up", "reached")},
        }
    persona = by_goal["desk1"]["metadata"]["persona"]
    assert persona.startswith("You furnish a house. You write briefly. A message of yours has about ")
    assert persona.endswith("If you do not get what you want, you give up after 3 messages.")
    tasks = load_tasks("out/train.jsonl")
    assert len(tasks) == len(sides["train"]) and {task.user for task in tasks} == {""}
    user = make_users(model="openai/m").make(tasks[0], "s/0")
    assert isinstance(user, LlmUser) and user.persona == tasks[0].metadata["persona"], (
        "who is played is who was described"
    )

    card = files["README.md"].decode()
    for line in (
        "- 1 that were logged again as they went on",
        "- 1 whose user says the same as another one's",
        "- 1 whose user says nearly the same as another one's (from 0.8 of the words on)",
        "- 1 without a message of the user",
        "- 1 that the model does not describe (MalformedAnswer)",
        "17 conversations of 6 people",
        "is in both files.",
        "| gave up | 6 of 17 |",
        "| CARD | 5 | 0 |",
        "| DETAIL | 0 | 6 |",
        "| EMAIL | 5 | 0 |",
        "| PERSON | 5 | 6 |",
    ):
        assert line in card, line
    assert "not described: openai/m: MalformedAnswer: there is no JSON object\n" in shown.out
    assert "18 calls of openai/m: at most " in shown.out and " USD\n" in shown.out
    assert len(model.requests) == 18 + 1, "the malformed answer was asked for twice"

    assert convert_log("again", "--eval-share", "0.3", "llm.replay=calls") == 0, "by an endpoint that is not there"
    assert written(Path("again")) == files
    assert "18 descriptions by openai/m, replayed from calls; no calls are made" in capsys.readouterr().out


@pytest.mark.seconds
def test_an_outage_loses_nothing_and_the_same_command_asks_for_the_rest(
    model: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    model.replies = [tell] * 6 + [fails(401)]
    assert convert_log("out", "llm.max_concurrent=1", "--user-opens", port=model.port) == 3
    assert "12 conversations were not described; the first: openai/m: AuthenticationError" in capsys.readouterr().err
    assert not Path("out/README.md").exists() and Path("out/llm_cache").stat().st_mode & 0o077 == 0
    model.requests.clear()
    model.replies = [tell]
    assert convert_log("out", "--user-opens", port=model.port) == 0
    assert len(model.requests) == 12 + 1 and not Path("out/llm_cache").exists()
    assert {str(row["prompt"]) for row in rows_of(Path("out/train.jsonl"))} == {"[]"}
    assert all(task.unopened for task in load_tasks("out/train.jsonl"))


@pytest.mark.seconds
def test_no_line_about_an_answer_holds_what_was_removed(
    model: Endpoint, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    text = f"write to {mail(PEOPLE[0])} or {PHONE}"
    for reply, code in ((says(answer(truths()[0]) | {"reached": text}), 2), (fails(401, text), 3)):
        model.replies = [reply]
        assert convert_log(f"out{code}", port=model.port) == code
        lines = caplog.text + "".join(capsys.readouterr())
        assert "write to <" in lines and mail(PEOPLE[0]) not in lines and PHONE not in lines


@pytest.mark.seconds
def test_a_spent_budget_is_said_and_a_larger_one_goes_on(model: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    price = ["llm.prices={openai/m: [1000, 1000]}", "llm.max_concurrent=1"]  # 0.12 USD a call
    assert convert_log("out", *price, "llm.budget_usd=0.5", port=model.port) == 3
    assert "llm.budget_usd=0.5 is used up: 5 calls cost 0.6 USD" in capsys.readouterr().err
    assert convert_log("out", *price, "llm.budget_usd=5", port=model.port) == 0
    assert len(model.requests) == 18 + 1


@pytest.mark.processes
def test_with_a_model_of_names_none_is_sent(model: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a log that does not say whose its conversations are, which the card admits."""
    Path("log.jsonl").write_text("".join(json.dumps({"messages": row["messages"]}) + "\n" for row in made_log()))
    import spacy  # which takes seconds

    pipeline = spacy.blank("en")
    names = [{"label": "PERSON", "pattern": name} for name in FRIENDS]
    pipeline.add_pipe("entity_ruler").add_patterns(names)
    pipeline.to_disk("names")
    assert convert_log("out", "--spacy", "names", port=model.port) == 0
    assert not any(part in json.dumps(model.requests) for name in FRIENDS for part in name.split())
    assert "no column identifies the person (--person)" in capsys.readouterr().out
    card = " ".join(Path("out/README.md").read_text().split())
    assert "17 conversations, each" in card and "a person may be in both." in card and "No person" not in card


@pytest.mark.processes
def test_the_commands_of_the_page_run(model: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/howto/users-from-logs.md").read_text().replace("\\\n", " ")
    monkeypatch.setenv("OPENAI_API_BASE", f"http://127.0.0.1:{model.port}/v1")
    commands = [shlex.split(line) for line in re.findall(r"^    megatron-collab (.*)", page, re.MULTILINE)]
    runnable = [command for command in commands if command[0] != "train" and "--realism" not in command]
    assert len(runnable) >= 4
    for name, *arguments in runnable:
        assert run(name, arguments) == 0, arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "reward.judge.model: not set; give the model that describes the users"),
        ([*MODEL, "--eval-share", "1"], "--eval-share=1: must be at least 0 and below 1"),
        ([*MODEL, "--seed", "-1"], "--seed=-1: must be at least 0 and below 4294967296"),
        ([*MODEL, "--prompt", "none.j2"], "--prompt=none.j2: no such file"),
        ([*MODEL, "--prompt", "long.j2"], "--prompt=long.j2: the template line 1: computes a value of more than"),
        (
            [*MODEL, "--person", "user_ids"],
            "--person=user_ids: the log has no such column; the nearest is user_id; it has",
        ),
        ([*MODEL, "--spacy", "no_such"], "--spacy=no_such: spaCy cannot load it"),
        ([*MODEL, "llm.replay=none"], "llm.replay=none: none: holds no recorded calls"),
        (["reward.judge.model=policy"], "reward.judge.model=policy: no policy is served here; choose another model"),
        (["reward.judge.model=served/j"], "reward.judge.model=served/j: servers has no j; set servers.j.model"),
        ([*MODEL, "llm.budget_usd=1"], "llm.budget_usd=1: the price of reward.judge.model=openai/m is unknown"),
        ([*MODEL, "reward.jugde.model=x"], "reward.jugde.model: no such option"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_anything_is_asked(
    arguments: list[str], message: str, model: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("long.j2").write_text("{{ conversation * 10**9 }}")
    assert run("users-from-logs", ["log.jsonl", "--out", "out", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"megatron-collab: {message}") and printed.count("\n") == 1, printed
    assert not model.requests and not Path("out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"messages": [\n{"messages"\n', "log.jsonl row 1: is not JSON"),
        ('{"text": "hi"}\n', "log.jsonl row 1: no messages; give a list of messages"),
        ('{"messages": []}\n', "no conversation is left: 1 without a message of the user"),
    ],
)
def test_a_bad_log_is_refused_with_its_row(
    content: str, message: str, model: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("log.jsonl").write_text(content)
    assert convert_log("out", port=model.port) == 2
    assert message in capsys.readouterr().err and not model.requests
    Path("log.jsonl").write_text(json.dumps(made_log()[0]) + "\n")
    Path("out").mkdir()
    Path("out/README.md").write_text("something of mine")
    assert convert_log("out", port=model.port) == 2
    assert "--out=out: holds tasks; remove it, or give another" in capsys.readouterr().err
