"""The tables of other systems' options: every row leads to an option of ours, or says why there is none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_collab.config import AllOptions, compose, compose_program, groups, peers
from megatron_collab.config.peers import NOT_NEEDED, OptionRow, System
from megatron_collab.config.programs import BuildDatasetConfig, EvaluateConfig
from megatron_collab.settings import ConfigError, declared

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {name: default for name, default, _ in declared(AllOptions)}
OPEN = tuple(f"{name}." for name, default in OPTIONS.items() if isinstance(default, dict))
LEAST = {"verl": 350, "slime": 250, "TRL": 180, "OpenRLHF": 180, "CollabLLM": 70, "torchrun": 20}
PROGRAMS = {"evaluate": EvaluateConfig, "build-dataset": BuildDatasetConfig}

every_system = pytest.mark.parametrize("system", peers.systems(), ids=lambda system: system.name)


def rows(system: System) -> Iterator[tuple[str, OptionRow]]:
    yield from system.rows.items()
    for program in system.programs:
        yield from program.rows.items()


@every_system
def test_every_row_leads_to_an_option(system: System) -> None:
    assert len(system.rows) >= LEAST[system.name]
    for name, row in rows(system):
        assert bool(row.targets) != bool(row.why), name
        for target in row.targets:
            assert target.names() or None in target.values.values(), name
            for option in target.names():
                assert option in OPTIONS or option.startswith(OPEN) or option in groups(), f"{name}: {option}"


@every_system
def test_every_value_of_a_row_is_allowed(system: System) -> None:
    required = ["run.dir=runs/x", "model.path=m", "data.train=d"]
    settings = {setting for program in system.programs if program.command == "train" for setting in program.settings}
    for _, row in rows(system):
        for target in row.targets:
            for value in filter(None, target.values.values()):
                settings |= {f"{option}={value}" for option in target.options if "=" not in value}
                settings |= set(value.split()) if "=" in value else set()
    by_option: dict[str, list[str]] = {}
    for setting in sorted(settings):
        by_option.setdefault(setting.partition("=")[0], []).append(setting)
    for together in zip_longest(*by_option.values()):  # composing takes its time: of each option one value at once
        compose([*required, *filter(None, together)])
    for program in system.programs:
        if program.command != "train":
            compose_program(PROGRAMS[program.command], ["run.dir=runs/x", *program.settings])


@every_system
def test_rows_name_options_of_their_system(system: System) -> None:
    names = [name for program in system.programs for name in (*program.defaults, *program.keys)]
    for _, row in rows(system):
        for target in row.targets:
            names += [*target.condition, *([target.keys] if target.keys else [])]
            parts = (target.compute or "value").split()
            names += [part for part in parts[::2] if part not in ("value", *OPTIONS) and not part.isdigit()]
            assert set(parts[1::2]) <= set("+-*/")
    launchers = next(other for other in peers.systems() if other.name == "torchrun")
    unknown = {name for name in names if not (system.row(name) or launchers.row(name))}
    assert not unknown
    assert not {name for name in system.renamed.values() if not system.row(name)}


@every_system
def test_sentences_name_what_exists(system: System) -> None:
    ours = {name.partition(".")[0] for name in OPTIONS}
    for row in system.rows.values():
        for path in re.findall(r"\bdocs/[\w/.-]+\.md|\bmegatron_collab/\w+|\bconf/\w+", row.why):
            assert (ROOT / path).exists(), path
        for option in re.findall(r"(?<![\w/.])([a-z]+(?:\.[a-z_]+)+)", row.why):
            if option.partition(".")[0] in ours:
                assert option in OPTIONS or option.startswith(OPEN), option


@every_system
def test_where_metrics_go_is_said_with_all_writers(system: System) -> None:
    assert all("run.writers" in row.why for row in system.rows.values() if row.why.startswith("metrics go"))


@pytest.mark.parametrize(
    "file", sorted((ROOT / "megatron_collab/config/peers").glob("*.yaml")), ids=lambda file: file.stem
)
def test_no_option_has_two_rows(file: Path) -> None:
    """YAML lets the last one win without a word."""
    table: Any = yaml.compose(file.read_text())
    sections = {key.value: value for key, value in table.value}
    names = [
        key.value for section in ("options", "renamed") if section in sections for key, _ in sections[section].value
    ]
    for section in ("not_needed", "no_counterpart"):
        for _, entries in sections[section].value:
            for entry in entries.value:
                names += [entry.value] if isinstance(entry.value, str) else [name.value for name in entry.value]
    assert not [name for name, count in Counter(names).items() if count > 1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.rollout.n: no such option; verl's actor_rollout_ref.rollout.n is "
            "train.rollouts_per_prompt here (",
        ),
        (
            "++data.return_raw_chat=true",
            "data.return_raw_chat: no such option; verl's data.return_raw_chat is not needed: the format of the rows",
        ),
        (
            "trainer.total_epochs=3",
            "trainer.total_epochs: no such option; verl's trainer.total_epochs is train.epochs here (",
        ),
        (
            "--rollout-batch-size=8",
            "--rollout-batch-size=8: no such argument; slime's, OpenRLHF's --rollout-batch-size is train.",
        ),
        (
            "beta=0.1",
            "beta: no such option; TRL's beta is algo.dpo.beta or algo.kl_coef or algo.kl_coef and algo.kl_in here; "
            "OpenRLHF's beta is algo.dpo",
        ),
        (
            "sglang_page_size=1",
            "sglang_page_size: no such option; slime's sglang_page_size is rollout.server.args.page_size",
        ),
        ("--verbos", "--verbos: no such argument; give --help, --cfg or option=value"),
    ],
)
def test_the_refusal_of_an_option_says_what_it_is_here(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose([override])
    assert str(refused.value).startswith(message)


def test_a_name_with_a_star_keeps_the_text_for_it() -> None:
    verl = peers.systems()[0]
    row = verl.row("+reward_model.reward_kwargs.metric_weights.accuracy")
    assert row and row.targets[0].options == ("reward.weights.accuracy",)
    row = verl.row("actor_rollout_ref.ref.fsdp_config.param_offload")
    assert row and row.kind == NOT_NEEDED
    assert verl.row("actor_rollout_ref.nothing") is None


@pytest.mark.parametrize("name", ["verl", "slime", "TRL", "CollabLLM"])
def test_the_page_of_a_system_says_what_its_table_says(name: str) -> None:
    system = next(system for system in peers.systems() if system.name == name)
    page = (ROOT / f"docs/howto/from-{name.lower()}.md").read_text()
    section = page.partition("## The options that matter")[2].partition("\n## ")[0]
    lines = [re.split(r" \| ", line.strip("| ")) for line in section.splitlines() if line.startswith("| `")]
    assert len(lines) >= 15
    for theirs, ours in lines:
        options = re.findall(r"`([\w.-]+)`", theirs)
        answers = " ".join(system.answer(option) for option in options).replace("*", "NAME")
        first = re.findall(r"`([\w.]+)`", ours)[: len(options)]
        assert options and all(re.search(rf"\b{re.escape(option)}\b", answers) for option in first), theirs
    for block in re.findall(r"^    megatron-collab train ((?:.*\\\n)*.*)$", page, re.MULTILINE):
        assert compose(block.replace("\\\n", " ").split())
