"""Stage dpo as the program runs it, on rows of a file: it learns, resumes to the bit, and keeps the reference."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_collab import train
from megatron_collab.checkpoint.checkpointer import Checkpoints
from megatron_collab.config import Config
from megatron_collab.data.datasets import write_jsonl
from megatron_collab.launch.data_specs import data_spec
from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.runtime import hang_detector
from megatron_collab.trainer.megatron import parallel
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests.helpers import configured, make_model
from tests.ranks import init_parallel, make_pairs, run_ranks

pytestmark = pytest.mark.processes

WORDS = ("one", "two", "three", "four", "five", "six")


def rows(count: int) -> list[dict[str, Any]]:
    """The user asks for a word; a reply that begins with another one is worse. Every third pair has two turns."""
    pairs: list[dict[str, Any]] = []
    for number in range(count):
        word, other = WORDS[number % 6], WORDS[(number + 1) % 6]
        prompt = {"role": "user", "content": f"please say {word} to user {number}"}
        if number % 3:
            pairs.append({"prompt": prompt["content"], "chosen": word, "rejected": f"{other} or {word}"})
        else:
            more = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
            sides = [[prompt, *more, {"role": "assistant", "content": text}] for text in (word, other)]
            pairs.append({"chosen": sides[0], "rejected": sides[1]})
    return pairs


def configure(folder: Path, run: str, settings: dict[str, object]) -> Config:
    config = Config()
    config.run.dir, config.model.path, config.model.dtype = str(folder / run), str(folder / "model"), "float32"
    config.launch.device, config.launch.timeout, config.run.wandb_project = "cpu", 120.0, None
    config.data.train, config.data.eval = str(folder / "train.jsonl"), str(folder / "eval.jsonl")
    config.train.stage, config.train.steps, config.train.prompts_per_step = "dpo", 6, 6
    config.train.checkpoint_every, config.train.tokens_per_micro_batch = 3, 300
    config.optim.lr, config.rollout.context_length = 1e-3, 256
    return configured(config, settings)


RUNS: dict[str, dict[str, object]] = {
    "whole": {},
    "resumed": {},
    "computed": {"algo.dpo.precompute": False, "train.steps": 2},
    "adapters": {"model.lora.rank": 4, "train.steps": 2},
}


def run_all(folder: Path) -> None:
    """As the only rank, without torchrun's store."""
    with (
        mock.patch.object(hang_detector, "watch", lambda timeout, run_dir: nullcontext()),
        mock.patch.object(parallel, "leader_ends_first", lambda timeout, explain: nullcontext()),
    ):
        config = configure(folder, "resumed", {"train.steps": 3})
        train.train_supervised(config, data_spec(config))
        known = sorted((folder / "resumed" / "reference").rglob("*.npy"))
        times = [file.stat().st_mtime_ns for file in known]
        for run, settings in RUNS.items():
            config = configure(folder, run, settings)
            train.train_supervised(config, data_spec(config))
    with init_parallel(configure(folder, "refreshed", {})):
        (folder / "refreshed.json").write_text(json.dumps([refreshed(folder, None), refreshed(folder, 3)]))
    assert known and times == [file.stat().st_mtime_ns for file in known]


def refreshed(folder: Path, stopped: int | None) -> list[dict[str, float]]:
    """Metrics of online DPO with a reference refreshed every second step; stopped before step `stopped`, if given."""
    settings = {"train.stage": "rl", "algo.objective": "dpo", "algo.dpo.refresh": 2, "algo.kl_coef": 0.0}
    config = configure(folder, f"refreshed-{stopped}", settings)
    trainer, reports = PolicyTrainer(trainer_spec(config)), list[dict[str, float]]()
    for step in range(5):
        if step == stopped:
            with Checkpoints(Path(config.run.dir), 1, 120.0) as checkpoints:
                checkpoints.save(step, trainer.checkpointed, {})
                checkpoints.finish()
                trainer = PolicyTrainer(trainer_spec(config))
                checkpoints.load_latest(trainer.checkpointed)
            trainer.step = step
        reports.append(trainer.update(trainer.score(Batch(make_pairs(4, seed=1)))))
    return reports


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dpo")
    make_model(folder / "model", layers=2, hidden=32, ffn=64, head_dim=8)
    write_jsonl(folder / "train.jsonl", rows(24))
    write_jsonl(folder / "eval.jsonl", rows(30)[24:])
    run_ranks(run_all, 1, folder)
    return folder


def metrics(folder: Path, run: str) -> list[dict[str, float]]:
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "seconds" not in k} for line in lines]


def test_the_policy_learns_to_prefer_chosen_replies(folder: Path) -> None:
    first, *_, last = metrics(folder, "whole")
    assert first["loss"] == pytest.approx(0.6931472, abs=1e-5) and first["dpo/pairs"] == 6
    assert last["loss"] < 0.6 and last["dpo/accuracy"] == 1.0 and last["dpo/margin"] > 0
    assert last["dpo/reward_chosen"] - last["dpo/reward_rejected"] == pytest.approx(last["dpo/margin"], rel=1e-5)
    evaluations = json.loads((folder / "whole" / "evaluations.json").read_text())
    before, after = evaluations["before"], evaluations["after"]
    assert before["score/loss"] == pytest.approx(0.6931472, abs=1e-5) and before["tasks"] == 6
    assert after["score/loss"] < before["score/loss"] and after["score/accuracy"] > 0.5
    assert (folder / "whole" / "hf" / "model.safetensors").is_file()


def test_a_resumed_run_ends_with_the_same_bits(folder: Path) -> None:
    assert metrics(folder, "resumed") == metrics(folder, "whole")
    weights = [(folder / run / "hf" / "model.safetensors").read_bytes() for run in ("whole", "resumed")]
    assert weights[0] == weights[1]


def test_a_reference_that_is_refreshed_is_in_the_checkpoint(folder: Path) -> None:
    whole, stopped = json.loads((folder / "refreshed.json").read_text())
    assert stopped == whole
    margins = [abs(step["dpo/margin"]) for step in whole]
    assert max(margins[0], margins[2], margins[4]) < 1e-5 < 1e-3 < min(margins[1], margins[3])


def test_the_reference_is_the_same_however_it_is_computed(folder: Path) -> None:
    """Kept in the run's folder, by a copy of the model at every step, or by the model without its adapters."""
    whole, computed, adapters = (metrics(folder, run)[:2] for run in ("whole", "computed", "adapters"))
    for kept, now in zip(whole, computed, strict=True):
        assert now == pytest.approx(kept, rel=1e-4, abs=1e-5)
    assert not (folder / "computed" / "reference").exists()
    assert adapters[0]["loss"] == pytest.approx(whole[0]["loss"], abs=1e-5)
    assert adapters[1]["dpo/margin"] > 0
