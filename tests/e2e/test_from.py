"""What `megatron-collab doctor --from` prints for scripts of other systems trains a tiny model for two steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.commands.translation import translate
from tests.e2e.test_experiments import SMALL, SMALL_RL, endpoint, published  # noqa: F401 (a fixture)
from tests.helpers import make_model
from tests.rollout.foreign import FEEDBACK

SCRIPTS = Path(__file__).parents[1] / "commands" / "foreign"
# What this machine lacks: GPUs, and the sizes of a model with 2048 positions.
LAYOUT = (
    *("launch.nproc_per_node=1", "parallel.tp=1", "parallel.sequence_parallel=false", "rollout.server.tp=1"),
    *("train.epochs=null", "train.eval_every=0", "train.tokens_per_micro_batch=2048", "rollout.context_length=2048"),
)
RL = tuple(setting for setting in SMALL_RL if "max_total_tokens" not in setting)  # memory_share is the script's


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def verl_row(number: int, **extra: Any) -> dict[str, Any]:
    """A row in the columns that verl's scripts prepare."""
    reward = {"style": "rule", "ground_truth": str(number)}
    return {
        **{"data_source": "openai/gsm8k", "prompt": chat(f"What is {number} + 0?"), "ability": "math"},
        **{"reward_model": reward, "extra_info": {"split": "train", "index": number, **extra}},
    }


def feedback_row(number: int) -> dict[str, Any]:
    kwargs = {"name": "feedback", "query": f"What is {number} + 0?", "ground_truth": str(number)}
    return verl_row(number, interaction_kwargs=kwargs)


def recipe_row(number: int) -> dict[str, Any]:
    """A row of the recipe: the data source selects its reward, the interaction its user."""
    kwargs = {"name": "collabllm", "single_turn_prompt": f"What is {number} + 0?", "task_desc": "solving math problems"}
    row = verl_row(number, interaction_kwargs=kwargs)
    return {**row, "data_source": "collabllm", "agent_name": "collabllm_agent"}


def dialogue_row(number: int) -> dict[str, Any]:
    reply = {"role": "assistant", "content": str(number)}
    return {"prompt": [*chat(f"What is {number} + 0?"), reply]}


# By script: the rows, as the option's default file, and settings that the table says the reader must add.
CASES: dict[str, tuple[Callable[[int], dict[str, Any]], str, tuple[str, ...]]] = {
    "verl_gsm8k.sh": (verl_row, "parquet", ()),
    "verl_feedback.sh": (
        feedback_row,
        "parquet",
        ("user.name=verl", "user.options.interaction=feedback.py:MathInteraction", "user.options.config={wrong: -0.2}"),
    ),
    "verl_collabllm_sft.sh": (dialogue_row, "parquet", ()),
    "verl_collabllm_rl.sh": (recipe_row, "parquet", ("user.model=openai/gpt-4o-mini",)),
    "slime_grpo.sh": (lambda number: {"prompt": chat(f"{number} + 0 = ?"), "label": str(number)}, "jsonl", ()),
    "trl_grpo.sh": (
        lambda number: {"prompt": chat(f"{number} + 0 = ?"), "solution": str(number)},
        "jsonl",
        ("reward.weights.accuracy=1",),
    ),
    "openrlhf_reinforce.sh": (
        lambda number: {"text": f"{number} + 0 = ?"},
        "jsonl",
        ("reward.weights.token_amount=-0.1", "algo.mini_batches=2"),
    ),
    "collabllm_online_dpo.sh": (published, "jsonl", ()),
}


def arguments(script: str, folder: Path, endpoint: str) -> list[str]:  # noqa: F811
    """The printed arguments, and what this machine cannot have replaced: model, data, GPUs, sizes and endpoints."""
    import pandas

    make_row, kind, more = CASES[script]
    make_model(folder / "model", family="qwen2")
    (folder / "feedback.py").write_text(FEEDBACK)
    rows = pandas.DataFrame([make_row(number) for number in range(8)])
    file = folder / f"rows.{kind}"
    rows.to_parquet(file) if kind == "parquet" else rows.to_json(file, orient="records", lines=True)
    printed = translate(SCRIPTS / script)
    settings = [*SMALL, *LAYOUT, f"model.path={folder}/model", f"data.train={file}", f"run.dir={folder}/run", *more]
    settings += [f"data.eval={file}"] if "data.eval" in printed.settings else []
    if "train.stage=sft" not in printed.overrides:
        settings += [*RL, f"user.api_base={endpoint}", f"reward.judge.api_base={endpoint}"]
    return [*printed.overrides, *settings]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("script", CASES)
def test_what_is_printed_for_a_script_trains(script: str, endpoint: str, tmp_path: Path) -> None:  # noqa: F811
    command = [sys.executable, "-m", "megatron_collab.train", *arguments(script, tmp_path, endpoint)]
    environment = {**os.environ, "OPENAI_API_KEY": "a-key-of-the-test"}
    with (tmp_path / "console.log").open("w") as log:
        code = subprocess.run(command, cwd=tmp_path, env=environment, stdout=log, stderr=log, timeout=1500).returncode
    assert code == 0, (tmp_path / "console.log").read_text()[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1] and all(line["loss"] == line["loss"] for line in lines)
    assert all(line.get("missing", 0) == 0 for line in lines)
