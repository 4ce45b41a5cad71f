"""From a product's conversations to tasks with their users: goals, openings, personas, patience and style.

    megatron-collab users-from-logs LOG --out OUT reward.judge.model=openai/MODEL [OPTION=VALUE …]
    megatron-collab users-from-logs LOG --realism RUN [--step N | --evaluation NAME]

LOG is a file, a folder, a glob or a name of the Hub, with a conversation a row: messages {role, content}, or
conversations {from, value}. Personal data is replaced before any text goes to a model; conversations that are there
twice are left out; the model, asked with the settings of reward.judge and llm, describes each user; OUT gets
train.jsonl and eval.jsonl, which have no person in common, and README.md. Interrupted, the same command goes on; exit
code 3 where llm.budget_usd is spent or the model does not answer.

--realism measures whether the simulated users of a run can be told from the users of the log; it asks no model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_collab.commands import ArgumentParser
from megatron_collab.config import (
    Config,
    ConfigError,
    PromptError,
    compose,
    nearest,
    read_prompt,
    recorded_values,
    require,
)
from megatron_collab.runtime.process import EXIT_STOPPED, RunStopped

if TYPE_CHECKING:
    from megatron_collab.data.logs import Logged
    from megatron_collab.data.personal import PersonalData

_PROMPT = "user_of_log"
_MODEL = "reward.judge.model"


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("users-from-logs", __doc__)
    parser.add_argument("log", help="file, folder, glob, name of the Hub, or settings in braces")
    parser.add_argument("--out", type=Path, help="folder to write; with --realism a JSON file")
    parser.add_argument("--person", metavar="COLUMN", help="column that says whose a conversation is [user_id, …]")
    parser.add_argument("--spacy", metavar="NAME", help="installed spaCy model that finds names of people")
    parser.add_argument("--prompt", metavar="FILE.j2", help=f"what the model is told; none: {_PROMPT}.j2")
    parser.add_argument("--user-opens", action="store_true", help="tasks without a message: their user opens them")
    parser.add_argument("--eval-share", type=float, default=0.1, help="share of the people for evaluation [0.1]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, and of the folds of --realism [0]")
    parser.add_argument("--realism", type=Path, metavar="RUN", help="compare the users of this run with those of LOG")
    parser.add_argument("--step", type=int, help="--realism: step of training [the last one]")
    parser.add_argument("--evaluation", metavar="NAME", help="--realism: in place of a step: before, SET/step_20, …")
    parser.add_argument("option", nargs="*", help="an option of a run, as reward.judge.model=… or llm.budget_usd=…")
    given = parser.parse_intermixed_args(arguments)
    require(0 <= given.eval_share < 1, f"--eval-share={given.eval_share:g}: must be at least 0 and below 1")
    require(given.step is None or given.evaluation is None, "--step and --evaluation: give one of them")
    require(given.realism is not None or given.out is not None, "--out: not set; give the folder to write")
    try:
        return _compare(given) if given.realism else _make(given)
    except RunStopped as stopped:
        print(f"megatron-collab: {stopped}", file=sys.stderr)
        return EXIT_STOPPED


def _make(given: argparse.Namespace) -> int:
    """Write tasks."""
    out = given.out
    require(not (out / "README.md").exists(), f"--out={out}: holds tasks; remove it, or give another")
    config = compose(given.option, {"run.dir": str(out), "model.path": "none", "data.train": "none"})
    config.run.dir = str(out)
    require(bool(config.reward.judge.model), f"{_MODEL}: not set; give the model that describes the users")
    prompt = read_prompt("--prompt", given.prompt, _PROMPT, ("conversation",))
    require("conversation" in prompt.used, f"{prompt.said}: shows no {{{{ conversation }}}} to the model; put it in")
    _check_model(config)

    # LiteLLM, Presidio and the libraries of data take seconds to import, which wrong arguments need not wait for.
    from megatron_collab.data import logs
    from megatron_collab.data.datasets import task_row
    from megatron_collab.data.personal import PersonalData
    from megatron_collab.data.preparation import groups_of_eval
    from megatron_collab.rollout.users.from_logs import cost, describe_all, question_about

    logged, dropped, by = _read(given, PersonalData(given.spacy))
    named = {one.name: one for one in logged}
    before = {one.name: one.placeholders.counts for one in logged}
    try:
        questions = {name: question_about(prompt, one) for name, one in named.items()}
    except PromptError as error:
        raise ConfigError(str(error)) from error
    print(cost(config, list(questions.values())), flush=True)
    cache = Path(config.llm.cache or out / "llm_cache")
    tasks = asyncio.run(describe_all(config, cache, named, questions, given.user_opens, dropped))
    require(bool(tasks), f"LOG={given.log}: no conversation is left: {_said(dropped)}")

    held_out = groups_of_eval({named[task.id].person for task in tasks}, given.eval_share, given.seed)
    sides: dict[str, list[dict[str, Any]]] = {side: [] for side in ("train", *(["eval"] if held_out else []))}
    for task in tasks:
        sides["eval" if named[task.id].person in held_out else "train"].append(task_row(task))
    logs.write(out, sides, named, by, before, dropped, str(config.reward.judge.model))
    if not config.llm.cache:  # it holds the names that the model has told
        shutil.rmtree(cache, ignore_errors=True)
    counts = ", ".join(f"{len(rows)} for {side}" for side, rows in sides.items())
    print(f"{out}: {counts}; left out: {_said(dropped) or 'none'}")
    return 0


def _read(given: argparse.Namespace, data: PersonalData) -> tuple[list[Logged], Counter[str], str | None]:
    """The conversations of the log, each once and without what is personal, what was left out, and the column that
    says whose they are. ConfigError."""
    from megatron_collab.data import logs
    from megatron_collab.data.rows import ALL, open_rows
    from megatron_collab.data.sources import given_sources
    from megatron_collab.observability.run import progress

    source, *others = given_sources(given.log, "LOG")
    require(not others, f"LOG={given.log}: give one log at a time")
    dropped = Counter[str]()
    try:
        rows = open_rows(replace(source, split=source.split or ALL), "LOG")
        person = _person(given, rows.column_names)
        with closing(progress("replacing personal data", len(rows), "conversation")) as bar:
            found = logs.read_log(rows, data, person, dropped, bar.update)
    except (ValueError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    logged = logs.distinct(found, dropped)
    people = len({one.person for one in logged})
    whose = f" by {person}" if person else ""
    print(f"{source.source}: {len(rows)} rows, {len(logged)} conversations of {people} people{whose}")
    require(bool(logged), f"LOG={given.log}: no conversation is left: {_said(dropped)}")
    return logged, dropped, person


def _person(given: argparse.Namespace, columns: Sequence[str]) -> str | None:
    """The column that says whose a conversation is."""
    from megatron_collab.data.logs import PERSON_COLUMNS

    wanted = given.person
    fault = (
        f"--person={wanted}: the log has no such column{nearest(wanted or '', columns)}; it has {', '.join(columns)}"
    )
    require(wanted is None or wanted in columns, fault)
    found: str | None = wanted or next((column for column in PERSON_COLUMNS if column in columns), None)
    if found is None:
        print("no column says whose a conversation is (--person): each counts as one of another person")
    return found


def _check_model(config: Config) -> None:
    """ConfigError for a model that cannot be asked."""
    from megatron_collab import patches
    from megatron_collab.launch import endpoints, models, prepare
    from megatron_collab.llm.endpoint import POLICY

    patches.apply("litellm")
    endpoints.check_settings(config)
    asked = [endpoints.AskedModel(_MODEL, "reward.judge", config.reward.judge)]
    require(config.reward.judge.model != POLICY, f"{_MODEL}={POLICY}: no policy is served here; choose another model")
    endpoints.check_served(config, asked)
    endpoints.check_recordings(config)
    for line in endpoints.check_prices(config, asked):
        print(line)
    endpoints.check_support(config, asked)
    prepare.fetch_served_models(config)
    models.check_served(config)


def _compare(given: argparse.Namespace) -> int:
    """Print how far simulated users can be told from those of the log."""
    config = compose(given.option, recorded_values(given.realism))
    require(config.train.stage == "rl", f"{given.realism}: its train.stage is {config.train.stage}, without users")
    from megatron_collab.data.personal import PersonalData
    from megatron_collab.rollout import recorded
    from megatron_collab.rollout.users import realism

    what, groups = recorded.played(config, given.realism, given.step, given.evaluation)
    data = PersonalData(given.spacy)
    logged, *_ = _read(given, data)
    simulated = realism.simulated(groups, config.user.stop, data)
    real = realism.real(logged)
    print(f"simulated: {given.realism}, {what}\n")
    try:
        found = realism.compare(real, simulated, given.seed)
    except ValueError as error:
        raise ConfigError(f"--realism={given.realism}: {error}") from error
    print(realism.shown(found))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _said(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()) if count)
