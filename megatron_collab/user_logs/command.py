"""From a product's conversations to tasks with their users: goals, openings, personas, patience and style.

    megatron-collab users-from-logs LOG --out OUT reward.judge.model=openai/MODEL [OPTION=VALUE …]
    megatron-collab users-from-logs LOG --realism RUN [--step N | --evaluation NAME]

LOG is a file, a folder, a glob or a name of the Hub, with a conversation a row: messages {role, content}, or
conversations {from, value}. Personal data is replaced before any text goes to a model. Duplicate conversations are left
out. The model, called with the settings of reward.judge and llm, describes each user. OUT gets train.jsonl and
eval.jsonl, which have no person in common, and README.md. If it is interrupted, the same command continues. Exit code 3
if llm.budget_usd is spent or the model does not answer.

--realism measures whether simulated users of a run can be told from users of the log; it calls no model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_collab.commands import ArgumentParser
from megatron_collab.config import PlayConfig, UsersFromLogsConfig, compose_program, recorded_values
from megatron_collab.launch.prompts import try_prompt
from megatron_collab.runtime.process import EXIT_STOPPED, RunStopped
from megatron_collab.settings import (
    WRITTEN_FILE,
    WRITTEN_FOLDER,
    ConfigError,
    PromptError,
    check_path,
    check_written,
    nearest,
    read_prompt,
    require,
)

if TYPE_CHECKING:
    from megatron_collab.user_logs.logs import LoggedConversation
    from megatron_collab.user_logs.personal import PersonalData


logger = logging.getLogger(__name__)
_PROMPT = "user_of_log"
_MODEL = "reward.judge.model"


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("users-from-logs", __doc__)
    parser.add_argument("log", help="file, folder, glob, name of the Hub, or settings in braces")
    parser.add_argument("--out", type=Path, help="folder to write; with --realism a JSON file")
    parser.add_argument("--person", metavar="COLUMN", help="column that identifies the person [user_id, …]")
    parser.add_argument("--spacy", metavar="NAME", help="installed spaCy model that finds names of people")
    parser.add_argument("--prompt", metavar="FILE.j2", help=f"prompt for the model [{_PROMPT}.j2]")
    parser.add_argument("--user-opens", action="store_true", help="tasks without a message, which their user opens")
    parser.add_argument("--eval-share", type=float, default=0.1, help="share of the people for evaluation [0.1]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, and of the folds of --realism [0]")
    parser.add_argument("--realism", type=Path, metavar="RUN", help="compare the users of this run with those of LOG")
    parser.add_argument("--step", type=int, help="--realism: step of training [the last one]")
    parser.add_argument("--evaluation", metavar="NAME", help="--realism: instead of a step: before, SET/step_20, …")
    parser.add_argument("option", nargs="*", help="option of a run, e.g. reward.judge.model=… or llm.budget_usd=…")
    if {"-h", "--help"} & {*arguments}:
        from megatron_collab.launch.help import help_text  # imports metrics and users

        parser.epilog = help_text(None, UsersFromLogsConfig)
    options = parser.parse_intermixed_args(arguments)
    require(0 <= options.eval_share < 1, f"--eval-share={options.eval_share:g}: must be at least 0 and below 1")
    require(0 <= options.seed < 2**32, f"--seed={options.seed}: must be at least 0 and below {2**32}")
    require(options.step is None or options.evaluation is None, "--step and --evaluation: give one of them")
    require(options.realism is not None or options.out is not None, "--out: not set; give the folder to write")
    if options.out:
        check_path("--out", options.out, WRITTEN_FILE if options.realism else WRITTEN_FOLDER)
    try:
        return _compare(options) if options.realism else _make(options)
    except RunStopped as stopped:
        logger.error(str(stopped))
        return EXIT_STOPPED


def _make(options: argparse.Namespace) -> int:
    """Write tasks."""
    out = options.out
    require(not (out / "README.md").exists(), f"--out={out}: holds tasks; remove it, or give another")
    config = compose_program(UsersFromLogsConfig, options.option)
    check_written(config)
    require(bool(config.reward.judge.model), f"{_MODEL}: not set; give the model that describes the users")
    try_prompt("--prompt", options.prompt or "")
    prompt = read_prompt("--prompt", options.prompt, _PROMPT, ("conversation",))
    require("conversation" in prompt.used, f"{prompt.label}: does not contain {{{{ conversation }}}}; add it")
    config = _checked_model(config, out)

    # LiteLLM, Presidio and the libraries of data take seconds to import, so arguments are checked first.
    from megatron_collab.data.datasets import task_row
    from megatron_collab.data.preparation import groups_of_eval
    from megatron_collab.user_logs import logs
    from megatron_collab.user_logs.descriptions import cost, describe_all, question_about
    from megatron_collab.user_logs.personal import PersonalData

    logged, dropped, person_column = _read(options, PersonalData(options.spacy))
    by_name = {conversation.name: conversation for conversation in logged}
    placeholder_counts = {conversation.name: conversation.placeholders.counts for conversation in logged}
    try:
        questions = {name: question_about(prompt, conversation) for name, conversation in by_name.items()}
    except PromptError as error:
        raise ConfigError(str(error)) from error
    print(cost(config, list(questions.values())), flush=True)
    cache = Path(config.llm.cache or out / "llm_cache")
    tasks = asyncio.run(describe_all(config, out, cache, by_name, questions, options.user_opens, dropped))
    require(bool(tasks), f"LOG={options.log}: no conversation is left: {_joined_counts(dropped)}")

    held_out = groups_of_eval({by_name[task.id].person for task in tasks}, options.eval_share, options.seed)
    sides: dict[str, list[dict[str, Any]]] = {side: [] for side in ("train", *(["eval"] if held_out else []))}
    for task in tasks:
        sides["eval" if by_name[task.id].person in held_out else "train"].append(task_row(task))
    logs.write(out, sides, by_name, person_column, placeholder_counts, dropped, str(config.reward.judge.model))
    if not config.llm.cache:  # it holds the answers of the model, which may name people
        shutil.rmtree(cache, ignore_errors=True)
    counts = ", ".join(f"{len(rows)} for {side}" for side, rows in sides.items())
    print(f"{out}: {counts}; left out: {_joined_counts(dropped) or 'none'}")
    return 0


def _read(options: argparse.Namespace, data: PersonalData) -> tuple[list[LoggedConversation], Counter[str], str | None]:
    """The distinct conversations of the log without personal data, counts of those left out, and the column that
    names the person. Raises ConfigError."""
    from megatron_collab.data.rows import ALL, open_rows
    from megatron_collab.data.sources import parse_sources
    from megatron_collab.runtime.screen import progress
    from megatron_collab.user_logs import logs

    source, *more_sources = parse_sources(options.log, "LOG")
    require(not more_sources, f"LOG={options.log}: give one log at a time")
    dropped = Counter[str]()
    try:
        rows = open_rows(replace(source, split=source.split or ALL), "LOG")
        person = _person(options, rows.column_names)
        with closing(progress("replacing personal data", len(rows), "conversation")) as bar:
            conversations = logs.read_log(rows, data, person, dropped, bar.update)
    except (ValueError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    logged = logs.distinct(conversations, dropped)
    people = len({conversation.person for conversation in logged})
    whose = f" by {person}" if person else "; no column identifies the person (--person): each counts as another's"
    print(f"{source.source}: {len(rows)} rows, {len(logged)} conversations of {people} people{whose}")
    require(bool(logged), f"LOG={options.log}: no conversation is left: {_joined_counts(dropped)}")
    return logged, dropped, person


def _person(options: argparse.Namespace, columns: Sequence[str]) -> str | None:
    """The column that names the person of a conversation; None if there is none."""
    from megatron_collab.user_logs.logs import PERSON_COLUMNS

    requested = options.person
    hint = nearest(requested or "", columns)
    fault = f"--person={requested}: the log has no such column{hint}; it has {', '.join(columns)}"
    require(requested is None or requested in columns, fault)
    person_column: str | None = requested or next((column for column in PERSON_COLUMNS if column in columns), None)
    return person_column


def _checked_model(config: UsersFromLogsConfig, out: Path) -> UsersFromLogsConfig:
    """The settings with pinned names of served models. Raises ConfigError if the model cannot be called."""
    from megatron_collab import patches
    from megatron_collab.launch import endpoints, models, prepare, server_specs
    from megatron_collab.llm.endpoint import POLICY

    patches.apply("litellm")
    endpoints.check_settings(config)
    judges = [endpoints.NamedEndpoint(_MODEL, "reward.judge", config.reward.judge)]
    require(config.reward.judge.model != POLICY, f"{_MODEL}={POLICY}: no policy is served here; choose another model")
    endpoints.check_served(config, judges)
    endpoints.check_recordings(config.llm, out)
    for line in endpoints.check_prices(config, judges):
        print(line)
    endpoints.check_support(config, judges)
    served = server_specs.served_entries(config)
    servers = prepare.with_paths(config.servers, served, prepare.fetch_models(served, out))
    models.check_served((group, model.model) for group, model in served.values())
    return replace(config, servers=servers)


def _compare(options: argparse.Namespace) -> int:
    """Print how well simulated users can be told from those of the log."""
    stage = recorded_values(options.realism)["train.stage"]
    require(stage == "rl", f"{options.realism}: its train.stage is {stage}, without users")
    config = compose_program(PlayConfig, options.option, recorded_values(options.realism, PlayConfig))
    from megatron_collab.launch.data_specs import recorded_data
    from megatron_collab.rollout import recorded
    from megatron_collab.user_logs import realism
    from megatron_collab.user_logs.personal import PersonalData

    data = recorded_data(options.realism, options.option, options.evaluation)
    title, groups = recorded.played_groups(options.realism, data, options.step, options.evaluation)
    personal = PersonalData(options.spacy)
    logged, *_ = _read(options, personal)
    simulated = realism.run_messages(groups, config.user.stop, personal)
    real = realism.log_messages(logged)
    print(f"simulated: {options.realism}, {title}\n")
    try:
        comparison = realism.compare(real, simulated, options.seed)
    except ValueError as error:
        raise ConfigError(f"--realism={options.realism}: {error}") from error
    print(realism.comparison_text(comparison))
    if options.out:
        options.out.write_text(json.dumps(comparison, indent=1) + "\n")
    return 0


def _joined_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()) if count)
