"""Distillation in the update: loss and gradient from first principles, equal in every layout and after a resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_collab.algo.advantages import with_advantages
from megatron_collab.checkpoint import hf
from megatron_collab.checkpoint.checkpointer import Checkpoints
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.runtime.process import Preempted
from megatron_collab.trainer import network, teacher
from megatron_collab.trainer.microbatches import MicroBatch
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch, Credit, Sample, ScoredBatch
from tests.helpers import selected
from tests.ranks import HF, hidden_states, init_parallel, learn, make_config, make_model, make_samples, run_ranks

TEMPERATURE = 0.8  # of make_config
SAMPLES = make_samples(11, seed=1)
# `model.path` and `algo.teacher.model` are names of folders; the vocabulary of `wider` is padded further.
TEACHERS: dict[str, dict[str, object]] = {
    "model": {"algo.teacher.weight": 0.5, "algo.teacher.model": "wider"},
    "model sampled": {"algo.teacher.weight": 1.0, "algo.teacher.model": "wider", "algo.teacher.kl": "sampled"},
    "reference": {"algo.teacher.weight": 0.5, "algo.kl_coef": 0, "algo.mini_batches": 2},
    "reference lora": {"algo.teacher.weight": 0.5, "algo.kl_coef": 0, "model.lora.rank": 4},
    "policy": {"algo.teacher.weight": 0.7, "algo.teacher.model": "policy", "algo.teacher.context": "goal"},
    "policy sampled": {
        "algo.teacher.weight": 0.7,
        "algo.teacher.model": "policy",
        "algo.teacher.context": "goal",
        "algo.teacher.kl": "sampled",
    },
}
LAYOUTS: dict[str, dict[str, object]] = {
    "tp2-sp": {"parallel.tp": 2, "parallel.sequence_parallel": True, "train.tokens_per_micro_batch": 80},
    "pp2-vpp2": {"parallel.pp": 2, "parallel.vpp": 2, "train.tokens_per_micro_batch": 40},
    "dp2": {"train.tokens_per_micro_batch": 50},
}


def with_views(samples: Sequence[Sample], seed: int) -> tuple[Sample, ...]:
    """`samples` with random prompts for the teacher, in one or two token sequences, and some without."""
    rng = np.random.default_rng(seed)
    viewed = []
    for number, sample in enumerate(samples):
        trained = np.flatnonzero(sample.loss_mask)
        middle = trained[len(trained) // 2]  # a token within the trained ones begins the second sequence
        bounds = [trained[0], middle, len(sample.token_ids)] if len(trained) > 1 and number % 3 else [trained[0], None]
        tokens, mask, cuts = list[np.ndarray](), list[np.ndarray](), list[int]()
        for start, stop in pairwise(bounds):
            prompt = rng.integers(0, HF["vocab_size"], size=int(rng.integers(1, 20)))
            tokens += [prompt, sample.token_ids[start:stop]]
            mask += [np.zeros(len(prompt), np.float32), sample.loss_mask[start:stop]]
            cuts.append(sum(map(len, tokens)))
        ids = np.concatenate(tokens)
        view = Sample(ids, np.concatenate(mask), np.zeros(len(ids), np.float32), cuts=tuple(cuts[:-1]))
        viewed.append(replace(sample, teacher_view=view if number % 4 else None))
    return tuple(viewed)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    make_model(folder / "policy")
    make_model(folder / "wider", seed=1, tied=False, hidden_size=48, vocab_size=HF["vocab_size"] + 9)
    return folder


def settled(folders: Path, settings: Mapping[str, object]) -> Config:
    config = make_config(folders / "policy", settings)
    if config.algo.teacher.place == "model":
        config.algo.teacher.model = str(folders / config.algo.teacher.model)
    return config


def train(folders: Path, settings: Mapping[str, object]) -> dict[str, object]:
    """Inside a process group: metrics of three updates on two batches, and log-probs after them."""
    config = settled(folders, settings)
    trainer = PolicyTrainer(trainer_spec(config))
    batches = [Batch(make_samples(11, seed)) for seed in (1, 2, 1)]
    if config.algo.teacher.context:
        batches = [Batch(with_views(batch.samples, seed)) for seed, batch in enumerate(batches)]
    metrics = [learn(trainer, batch) for batch in batches]
    return {"metrics": metrics, "log_probs": [row.tolist() for row in trainer.log_probs(trainer.chunks, batches[0])]}


@pytest.fixture(scope="module")
def alone(folders: Path, one_rank: Config) -> dict[str, dict]:
    return {name: train(folders, settings) for name, settings in TEACHERS.items()}


def train_in_layouts(folders: Path, cases: Sequence[tuple[str, str]]) -> dict[str, dict]:
    """As one of two ranks: results of `train` for these layouts and teachers."""
    results = {}
    for layout, settings in LAYOUTS.items():
        with init_parallel(settled(folders, settings)):
            for teacher in [teacher for case, teacher in cases if case == layout]:
                results[f"{layout} {teacher}"] = train(folders, settings | TEACHERS[teacher])
    return results


@pytest.fixture(scope="module")
def layouts(folders: Path, request: pytest.FixtureRequest) -> dict[str, dict]:
    first, second = run_ranks(train_in_layouts, 2, folders, selected(request, "layout", "teacher"))
    assert first == second
    return first


@pytest.mark.processes
@pytest.mark.parametrize(
    ("layout", "teacher"),
    [
        *(("tp2-sp", teacher) for teacher in ("model", "reference lora")),
        *(("pp2-vpp2", teacher) for teacher in ("policy", "model sampled")),
        ("dp2", "policy sampled"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("tp2-sp", "policy"), ("pp2-vpp2", "reference"))),
        pytest.param("dp2", "policy", marks=pytest.mark.slow),
    ],
)
def test_every_layout_distills_the_same(layouts: dict, alone: dict, layout: str, teacher: str) -> None:
    actual, expected = layouts[f"{layout} {teacher}"], alone[teacher]
    for number, (updated, reference) in enumerate(zip(actual["metrics"], expected["metrics"], strict=True)):
        assert updated.keys() == reference.keys() and "teacher/kl" in updated
        for name in reference:
            tolerance = 2e-6 if number == 0 and name != "ratio_max_deviation" else 5e-5
            assert updated[name] == pytest.approx(reference[name], rel=tolerance, abs=tolerance), (number, name)
    for row, reference in zip(actual["log_probs"], expected["log_probs"], strict=True):
        np.testing.assert_allclose(row, reference, atol=5e-4)


def log_softmax(chunk: torch.nn.Module, token_ids: np.ndarray, vocabulary: int) -> torch.Tensor:
    """log p [S - 1, vocabulary] of the next token in float64, without schedule, packing or tiles."""
    states, head = hidden_states(chunk, token_ids[:-1]), hf.unwrap(chunk).head[:vocabulary]
    return (states.double() @ head.double().t() / TEMPERATURE).log_softmax(-1)


def teacher_rows(chunk: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """As `log_softmax` of the teacher, at the trained tokens of the sample."""
    view = sample.teacher_view or sample
    rows = []
    for ids, mask in zip(*(np.split(values, view.cuts) for values in (view.token_ids, view.loss_mask)), strict=True):
        with torch.no_grad():
            rows.append(log_softmax(chunk, ids, HF["vocab_size"])[np.flatnonzero(mask) - 1])
    return torch.cat(rows)


@pytest.mark.seconds
@pytest.mark.parametrize("weight", [0.3, 1.0])
@pytest.mark.parametrize("kl", ["full", "sampled"])
@pytest.mark.parametrize("teacher", ["wider", "reference", "policy"])
def test_the_update_is_that_of_the_formula(
    folders: Path, one_rank: Config, teacher: str, kl: str, weight: float
) -> None:
    """The mean over tokens of (1 - w) (-A log p) + w KL, also behind other prompts.

    full: KL(p || q) over the vocabulary. sampled: the policy gradient with the advantage log q - log p.
    """
    settings = {"algo.teacher.weight": weight, "algo.teacher.model": teacher, "algo.teacher.kl": kl}
    config = settled(folders, settings | {"algo.kl_coef": 0, "algo.teacher.context": "goal"})
    trainer = PolicyTrainer(trainer_spec(config))
    samples = with_views(SAMPLES, seed=5)
    (chunk,) = trainer.policy.chunks
    (teaching,) = {"policy": trainer.policy.chunks, "reference": trainer.reference}.get(teacher) or trainer.teacher
    scored = with_advantages(ScoredBatch(samples), trainer.spec.algo)
    total, divergence, count = torch.zeros((), dtype=torch.float64), 0.0, 0
    for sample, advantages in zip(samples, scored.advantages, strict=True):
        trained = np.flatnonzero(sample.loss_mask)
        log_p, log_q = (
            log_softmax(chunk, sample.token_ids, HF["vocab_size"])[trained - 1],
            teacher_rows(teaching, sample),
        )
        tokens = torch.from_numpy(sample.token_ids[trained])[:, None]
        policy, target = log_p.gather(-1, tokens)[:, 0], log_q.gather(-1, tokens)[:, 0]
        reward = -torch.from_numpy(advantages[trained]) * policy
        whole = (log_p.exp() * (log_p - log_q)).sum(-1)
        term = whole if kl == "full" else -(target - policy).detach() * policy
        total = total + ((1 - weight) * reward + weight * term).sum()
        divergence += float((whole if kl == "full" else policy - target).detach().sum())
        count += len(trained)
    chunk.zero_grad_buffer()
    (total / count).backward()
    gradient = torch.stack([parameter.main_grad.norm() for parameter in chunk.parameters()]).norm().item()

    metrics = learn(trainer, Batch(samples))
    assert metrics["teacher/kl"] == pytest.approx(divergence / count, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(gradient, rel=1e-5)


@pytest.mark.seconds
def test_a_teacher_that_is_the_policy_teaches_nothing(folders: Path, one_rank: Config) -> None:
    settings = {"algo.teacher.weight": 1.0, "algo.kl_coef": 0}
    for kl in ("full", "sampled"):
        trainer = PolicyTrainer(trainer_spec(settled(folders, settings | {"algo.teacher.kl": kl})))
        metrics = learn(trainer, Batch(SAMPLES))
        assert metrics["teacher/kl"] == 0 and metrics["grad_norm"] == 0


@pytest.mark.seconds
def test_an_update_that_has_made_a_step_is_not_given_up(
    folders: Path, one_rank: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not by the teacher's pass before the second optimizer step; the resume would learn from the batch again."""
    trainer = PolicyTrainer(trainer_spec(settled(folders, TEACHERS["reference"])))
    batch, step = with_advantages(trainer.score(Batch(SAMPLES)), trainer.spec.algo), trainer.policy.step

    def raise_preempted() -> None:
        raise Preempted("a notice")

    def step_and_notice(*arguments: Any, **options: Any) -> Any:
        result = step(*arguments, **options)
        monkeypatch.setattr(network, "check_preemption", raise_preempted)
        return result

    monkeypatch.setattr(trainer.policy, "step", step_and_notice)
    assert trainer.update(batch)["optimizer_steps"] == 2
    with pytest.raises(Preempted):
        trainer.update(batch)
    assert trainer.step == 1


@pytest.mark.seconds
def test_a_resumed_run_distills_the_same(folders: Path, one_rank: Config, tmp_path: Path) -> None:
    """The first policy is loaded again to teach; the present one is in the checkpoint."""
    batches = [Batch(with_views(make_samples(11, seed), seed)) for seed in (1, 2)]
    for name in ("reference", "policy"):
        spec = trainer_spec(settled(folders, TEACHERS[name]))
        trainer, resumed = PolicyTrainer(spec), PolicyTrainer(spec)
        learn(trainer, batches[0])
        with Checkpoints(tmp_path / name, 1, 60.0) as checkpoints:
            checkpoints.save(1, trainer.checkpointed, {})
            checkpoints.finish()
            checkpoints.load_latest(resumed.checkpointed)
        resumed.step = 1
        metrics = learn(resumed, batches[1])
        assert metrics == learn(trainer, batches[1]) and metrics["teacher/kl"] > 0


@pytest.mark.seconds
def test_the_teachers_micro_batches_keep_to_the_budget(
    folders: Path, one_rank: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that the policy's sequences share are not shared behind the notes of the teacher."""
    budget, rng, credits = 60, np.random.default_rng(0), (Credit(((30, 35),), 1.0, "a", "a"),)
    prompt, samples = rng.integers(0, HF["vocab_size"], 30), list[Sample]()
    for _ in range(6):
        reply, note = rng.integers(0, HF["vocab_size"], 5), rng.integers(0, HF["vocab_size"], 8)
        sample, view = (
            Sample(ids, mask := (np.arange(len(ids)) >= len(ids) - 5).astype(np.float32), mask)
            for ids in (np.concatenate([prompt, reply]), np.concatenate([note, prompt, reply]))
        )
        samples.append(replace(sample, credits=credits, teacher_view=view))
    config = settled(folders, TEACHERS["policy"] | {"train.tokens_per_micro_batch": budget})
    trainer, lengths = PolicyTrainer(trainer_spec(config)), list[list[int]]()
    outputs = network.outputs

    def measured(chunks: Any, micro_batches: Sequence[MicroBatch], *arguments: Any) -> Any:
        lengths.append([micro_batch.token_ids.shape[1] for micro_batch in micro_batches])
        return outputs(chunks, micro_batches, *arguments)

    monkeypatch.setattr(teacher, "outputs", measured)
    learn(trainer, Batch(tuple(samples)))
    (of_teacher,) = lengths
    assert max(of_teacher) <= budget and sum(of_teacher) == 6 * (8 + 30 + 5 - 1)


@pytest.mark.seconds
def test_distillation_reaches_the_teacher(folders: Path, one_rank: Config) -> None:
    """On fixed contexts the KL falls; the reference that only teaches is not a KL penalty."""
    settings = {"algo.teacher.weight": 1.0, "algo.teacher.model": "wider", "algo.kl_coef": 0, "optim.clip_grad": 10}
    trainer = PolicyTrainer(trainer_spec(settled(folders, settings | {"optim.lr": 1e-2})))
    divergences = [learn(trainer, Batch(SAMPLES))["teacher/kl"] for _ in range(15)]
    assert divergences[-1] < 0.5 * divergences[0]
    assert "kl" not in learn(trainer, Batch(SAMPLES))
