"""The update: its loss and gradient from first principles, equal in every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import t

from megatron_collab.algo.advantages import with_advantages
from megatron_collab.checkpoint import hf
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch, Sample, ScoredBatch
from tests.helpers import in_turn, selected
from tests.ranks import (
    hidden_states,
    init_parallel,
    learn,
    make_config,
    make_model,
    make_pairs,
    make_samples,
    run_ranks,
)

SAMPLES = make_samples(11, seed=1)
Maker = Callable[..., PolicyTrainer]
LAYOUTS: dict[str, dict[str, object]] = {
    "tp2": {"parallel.tp": 2},
    "tp2-sp": {"parallel.tp": 2, "parallel.sequence_parallel": True, "train.tokens_per_micro_batch": 80},
    "pp2": {"parallel.pp": 2, "train.tokens_per_micro_batch": 80},
    "pp2-vpp2": {"parallel.pp": 2, "parallel.vpp": 2, "train.tokens_per_micro_batch": 40},
    "dp2": {"train.tokens_per_micro_batch": 50},
}
# For a model with experts, in the folder `experts` beside the other.
EXPERT_LAYOUTS: dict[str, dict[str, object]] = {
    "ep2": {"parallel.ep": 2, "train.tokens_per_micro_batch": 50},
    "tp2-sp-ep2": {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.ep": 2},
}
NORMALISED = {"train.stage": "dpo", "algo.dpo.precompute": False, "algo.dpo.loss": "sigmoid_norm"}
EXPERT_STAGES: dict[str, dict[str, object]] = {
    "experts": {},
    "experts dpo": NORMALISED | {"algo.dpo.label_smoothing": 0.1},
}
STAGES: dict[str, dict[str, object]] = {
    "rl": {},
    "rl-mini": {"algo.mini_batches": 3, "algo.clip_low": 0.01, "algo.clip_high": 0.02},
    "gspo": {"algo.loss": "gspo", "algo.average": "sequence", "algo.advantage": "rloo", "algo.mini_batches": 2},
    "cispo": {
        "algo.loss": "cispo",
        "algo.average": "constant",
        "algo.correction": "truncated",
        "algo.kl": "k2",
        "algo.entropy_coef": 0.01,
    },
    "gae": {"algo.advantage": "gae", "algo.kl_in": "reward", "algo.kl": "k1", "algo.critic_lr": 1e-3},
    "sft": {"train.stage": "sft"},
    "dpo": {"train.stage": "dpo", "algo.dpo.precompute": False, "algo.mini_batches": 2},
    "ipo": {"train.stage": "dpo", "algo.dpo.precompute": False, "algo.dpo.loss": "ipo", "model.lora.rank": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("update")
    make_model(folder / "experts", experts=True)
    return make_model(folder / "model")


@pytest.fixture(scope="module")
def layouts(folder: Path, request: pytest.FixtureRequest) -> dict[str, dict]:
    """Results of `train` on two ranks, which agree, by layout and stage."""
    first, second = run_ranks(train_in_layouts, 2, folder, selected(request, "layout", "stage"))
    assert first == second
    return first


EVERYWHERE = [
    *((layout, stage) for layout in LAYOUTS for stage in STAGES),
    *((layout, stage) for layout in EXPERT_LAYOUTS for stage in EXPERT_STAGES),
]


def train_in_layouts(folder: Path, cases: Sequence[tuple[str, str]], device_type: str = "cpu") -> dict[str, dict]:
    """As one of two ranks: results of `train` for these layouts and stages."""
    results, on = {}, {"launch.device": device_type}
    for layout, layout_settings in (LAYOUTS | EXPERT_LAYOUTS).items():
        settings = layout_settings | on
        experts = layout in EXPERT_LAYOUTS
        with init_parallel(make_config(folder, settings)):
            for stage, more in (EXPERT_STAGES if experts else STAGES).items():
                if (layout, stage) in cases:
                    model = folder.with_name("experts") if experts else folder
                    results[f"{layout} {stage}"] = train(model, settings | more)
    return results


def train_alone(folder: Path, device_type: str) -> dict[str, dict]:
    """As the only rank."""
    with init_parallel(make_config(folder, {"launch.device": device_type})):
        return train_every_stage(folder, device_type)


def train_every_stage(folder: Path, device_type: str = "cpu") -> dict[str, dict]:
    """Inside a process group: results of `train` in each stage, and with experts."""
    on = {"launch.device": device_type}
    results = {stage: train(folder, STAGES[stage] | on) for stage in STAGES}
    return results | {stage: train(folder.with_name("experts"), EXPERT_STAGES[stage] | on) for stage in EXPERT_STAGES}


def train(folder: Path, settings: Mapping[str, object]) -> dict[str, object]:
    """Inside a process group: metrics of three updates on two batches, and log-probs and validation after them."""
    config = make_config(folder, settings)
    actor = PolicyTrainer(trainer_spec(config))
    make = make_pairs if config.objective == "dpo" else make_samples
    batches = [Batch(make(11, seed)) for seed in (1, 2, 1)]
    metrics = [learn(actor, batch) for batch in batches]
    log_probs = [row.tolist() for row in actor.log_probs(actor.chunks, batches[0])]
    return {"metrics": metrics, "log_probs": log_probs, "validation": actor.validate(batches[:2])}


@pytest.fixture(scope="module")
def alone(folder: Path, one_rank: Config) -> dict[str, dict]:
    return train_every_stage(folder)


@pytest.fixture
def make_actor(folder: Path, one_rank: Config) -> Maker:
    def make(**settings: object) -> PolicyTrainer:
        changed = {name.replace("__", "."): value for name, value in settings.items()}
        return PolicyTrainer(trainer_spec(make_config(folder, changed)))

    return make


def assert_same_training(actual: dict, expected: dict, times: float = 1) -> None:
    """The first update agrees up to the last bits; later Adam, which divides by the gradient's size, amplifies them.

    Bounds are `times` as wide for kernels that add in another order and have another exponential.
    """
    for number, (updated, reference) in enumerate(zip(actual["metrics"], expected["metrics"], strict=True)):
        assert updated.keys() == reference.keys()
        for name in reference:
            if (number, name) == (0, "dpo/accuracy"):
                continue  # margins are rounding errors before the policy moves
            # The largest ratio moves most, and mini-batches take optimizer steps before it.
            tolerance = times * (1e-6 if number == 0 and name != "ratio_max_deviation" else 2e-5)
            assert updated[name] == pytest.approx(reference[name], rel=tolerance, abs=tolerance), (number, name)
    for row, reference in zip(actual["log_probs"], expected["log_probs"], strict=True):
        np.testing.assert_allclose(row, reference, atol=5e-4 * times)
    assert actual["validation"] == pytest.approx(expected["validation"], rel=1e-4 * times)


@pytest.mark.processes
@pytest.mark.parametrize(("stage", "layout"), in_turn(STAGES, [*LAYOUTS]))
def test_every_layout_trains_the_same(layouts: dict, alone: dict, layout: str, stage: str) -> None:
    assert_same_training(layouts[f"{layout} {stage}"], alone[stage])


@pytest.mark.processes
@pytest.mark.parametrize(("stage", "layout"), in_turn(EXPERT_STAGES, [*EXPERT_LAYOUTS]))
def test_experts_train_the_same_wherever_they_are(layouts: dict, alone: dict, layout: str, stage: str) -> None:
    assert_same_training(layouts[f"{layout} {stage}"], alone[stage])


OTHER_KERNELS = 10


@pytest.fixture(scope="module")
def on_one_gpu(folder: Path) -> dict[str, dict]:
    (results,) = run_ranks(train_alone, 1, folder, "cuda", device_type="cuda")
    return results


@pytest.mark.processes
@pytest.mark.gpu
def test_a_gpu_trains_what_a_cpu_trains(folder: Path, on_one_gpu: dict) -> None:
    """In float32: three updates of every algorithm, of experts too, and log-probs and validation after them."""
    (on_a_cpu,) = run_ranks(train_alone, 1, folder, "cpu")
    for stage, expected in on_a_cpu.items():
        assert_same_training(on_one_gpu[stage], expected, OTHER_KERNELS)


@pytest.fixture(scope="module")
def on_two_gpus(folder: Path) -> dict[str, dict]:
    first, second = run_ranks(train_in_layouts, 2, folder, EVERYWHERE, "cuda", device_type="cuda")
    assert first == second
    return first


@pytest.mark.processes
@pytest.mark.gpu(2)
@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPERT_LAYOUTS])
def test_two_gpus_train_what_one_trains(on_two_gpus: dict, on_one_gpu: dict, layout: str) -> None:
    """Over NCCL, in float32: tensor, sequence, pipeline, virtual pipeline, expert and data parallel."""
    for stage in EXPERT_STAGES if layout in EXPERT_LAYOUTS else STAGES:
        assert_same_training(on_two_gpus[f"{layout} {stage}"], on_one_gpu[stage], OTHER_KERNELS)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=[pytest.mark.slow] * (stage == "ipo")) for stage in STAGES]
)
@pytest.mark.parametrize("budget", [pytest.param(1, marks=pytest.mark.slow), 60])
def test_packing_does_not_matter(folder: Path, alone: dict, budget: int, stage: str) -> None:
    assert_same_training(train(folder, STAGES[stage] | {"train.tokens_per_micro_batch": budget}), alone[stage])


@pytest.mark.seconds
def test_training_moves_the_policy_and_ratios_are_clipped(alone: dict) -> None:
    first, _, last = alone["rl"]["metrics"]
    assert first["kl"] == 0.0 and last["kl"] > 1e-3
    assert first["ratio_max_deviation"] == 0.0 and first["ratio_mean"] == 1.0
    mini = alone["rl-mini"]["metrics"][-1]
    assert 0.0 < mini["clip_fraction"] < 1.0 and mini["ratio_max_deviation"] > 0.02
    assert alone["sft"]["metrics"][-1]["loss"] < alone["sft"]["metrics"][0]["loss"]


def torch_log_probs(actor: PolicyTrainer, sample: Sample, temperature: float) -> torch.Tensor:
    """Log-probs of tokens 1… of one sequence, without Megatron's schedule, cross-entropy or padding."""
    (chunk,) = actor.policy.chunks
    logits = hidden_states(chunk, sample.token_ids[:-1]) @ hf.unwrap(chunk).head.T
    return (logits / temperature).log_softmax(-1).gather(-1, torch.from_numpy(sample.token_ids)[1:, None])[:, 0]


def gradient_norm(actor: PolicyTrainer, loss: torch.Tensor) -> float:
    (chunk,) = actor.policy.chunks
    chunk.zero_grad_buffer()
    loss.backward()
    return torch.stack([parameter.main_grad.norm() for parameter in chunk.parameters()]).norm().item()


@pytest.mark.seconds
def test_policy_update_is_that_of_the_token_mean(make_actor: Maker) -> None:
    actor = make_actor()
    rows = [torch_log_probs(actor, sample, temperature=0.8) for sample in SAMPLES]
    mask, engine = (
        torch.cat([torch.from_numpy(getattr(sample, name)[1:]) for sample in SAMPLES])
        for name in ("loss_mask", "log_probs")
    )
    batch = with_advantages(ScoredBatch(tuple(SAMPLES)), actor.spec.algo)
    advantages = torch.cat([torch.from_numpy(values[1:]) for values in batch.advantages])
    log_probs = torch.cat(rows)
    loss = (-(log_probs - log_probs.detach()).exp() * advantages * mask).sum() / mask.sum()
    expected = gradient_norm(actor, loss)

    metrics = learn(actor, Batch(SAMPLES))
    assert metrics["tokens"] == mask.sum()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected, rel=1e-6)
    difference = (engine - log_probs.detach())[mask > 0]
    assert metrics["mismatch/max_abs"] == pytest.approx(difference.abs().max().item(), rel=1e-5)
    k3 = ((-difference).exp() - 1 + difference).mean().item()
    assert metrics["mismatch/k3"] == pytest.approx(k3, rel=1e-5)


TERMS: dict[str, dict[str, object]] = {
    "kl-in-loss": {"algo.kl": "k3", "algo.kl_coef": 0.7},
    "kl-in-reward": {"algo.kl": "k1", "algo.kl_coef": 0.7, "algo.kl_in": "reward", "algo.advantage": "dr_grpo"},
    "entropy": {"algo.kl_coef": 0.0, "algo.entropy_coef": 0.5},
    "truncated": {"algo.kl_coef": 0.0, "algo.correction": "truncated", "algo.correction_high": 1.5},
    "masked": {"algo.kl_coef": 0.0, "algo.correction": "masked"},
    "of-sequences": {"algo.kl_coef": 0.0, "algo.correction": "truncated", "algo.correction_level": "geometric"},
    "sequence-mean": {"algo.kl_coef": 0.0, "algo.average": "sequence"},
    "constant": {"algo.kl_coef": 0.0, "algo.average": "constant", "rollout.turn.max_new_tokens": 40},
}


@pytest.mark.seconds
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("term", TERMS)
def test_every_term_of_the_objective_is_in_the_update(
    one_rank: Config, tmp_path_factory: pytest.TempPathFactory, term: str, tied: bool
) -> None:
    """Loss and gradient of an update against whole logits, the reference being another model than the policy."""
    of_run = [make_model(tmp_path_factory.mktemp(term) / "model", seed=seed, tied=tied) for seed in (0, 1)]
    policy, reference = (make_config(path, TERMS[term]) for path in of_run)
    algo = policy.algo
    actor, other = PolicyTrainer(trainer_spec(policy)), PolicyTrainer(trainer_spec(reference))
    actor.reference = other.reference
    terms = []
    log_ratios = []
    for sample in SAMPLES:
        mask = torch.from_numpy(sample.loss_mask)[1:] > 0
        full = distributions(actor, sample)[mask]
        labels = torch.from_numpy(sample.token_ids)[1:][mask][:, None]
        log_probs = full.gather(-1, labels)[:, 0]
        entropy = -(full.exp() * full).sum(-1)
        engine = torch.from_numpy(sample.log_probs)[1:][mask]
        ratio = log_probs.detach() - distributions(other, sample)[mask].gather(-1, labels)[:, 0].detach()
        log_ratios.append(ratio)
        terms.append((log_probs, entropy, engine, ratio))
    kl_of = [float(ratio.sum()) for ratio in log_ratios]
    values = np.array([sample.credits[0].value for sample in SAMPLES])
    groups = np.array([sample.credits[0].peers for sample in SAMPLES])
    if algo.kl_in == "reward":
        values = values - algo.kl_coef * np.array(kl_of)
    expected = torch.zeros(())
    trained = sum(len(term[0]) for term in terms)
    for value, group, (log_probs, entropy, engine, ratio) in zip(values, groups, terms, strict=True):
        peers = values[groups == group]
        advantage = value - peers.mean()
        if algo.advantage == "grpo":
            advantage = advantage / (peers.std() + 1e-6)
        loss = -(log_probs - log_probs.detach()).exp() * float(advantage)
        gap = log_probs.detach() - engine
        weight = (gap.mean().expand_as(gap) if algo.correction_level == "geometric" else gap).exp()
        if algo.correction == "truncated":
            loss = loss * weight.clamp(max=algo.correction_high)
        if algo.correction == "masked":
            loss = loss * weight * ((weight >= 0.5) & (weight <= 2.0))
        if algo.kl_coef and algo.kl_in == "loss":
            log_q = log_probs.detach() - ratio - log_probs
            near = log_q.clamp(max=3)  # of models so far apart some tokens are on the tangent
            loss = loss + 0.7 * (near.exp() - 1 - near + (np.exp(3) - 1) * (log_q - near))
        loss = loss - algo.entropy_coef * entropy
        divisors = {"token": trained, "sequence": len(SAMPLES) * len(log_probs), "constant": len(SAMPLES) * 40}
        expected = expected + loss.sum() / divisors[algo.average]
    norm = gradient_norm(actor, expected)
    metrics = learn(actor, Batch(SAMPLES))
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def distributions(actor: PolicyTrainer, sample: Sample) -> torch.Tensor:
    """Log-probs [S - 1, V] of all tokens after each token of a sequence, at the temperature of make_config."""
    (chunk,) = actor.policy.chunks
    head = hf.unwrap(chunk).head
    return ((hidden_states(chunk, sample.token_ids[:-1]) @ head.T) / 0.8).log_softmax(-1)


@pytest.mark.seconds
def test_epochs_go_over_the_same_batch_again(make_actor: Maker) -> None:
    """Old log-probs are from before the first epoch: epochs equal successive updates by the same scored batch."""
    same = {"algo__clip_low": 0.01, "optim__warmup_steps": 0}
    twice, once = make_actor(algo__epochs=2, **same), make_actor(**same)
    scored = with_advantages(twice.score(Batch(SAMPLES)), twice.spec.algo)
    assert scored.old_log_probs is not None
    metrics, expected = twice.update(scored), [once.update(scored), once.update(scored)]
    for name in ("loss", "grad_norm", "ratio_mean", "clip_fraction", "entropy", "kl"):
        assert metrics[name] == pytest.approx(np.mean([step[name] for step in expected]), rel=1e-6)
    assert expected[1]["clip_fraction"] > 0 and metrics["tokens"] == expected[0]["tokens"]
    assert (metrics["optimizer_steps"], expected[0]["optimizer_steps"]) == (2, 1)
    for row, other in zip(*(actor.log_probs(actor.chunks, Batch(SAMPLES)) for actor in (twice, once)), strict=True):
        np.testing.assert_array_equal(row, other)


@pytest.mark.seconds
def test_later_turns_weigh_as_the_setting_says(make_actor: Maker) -> None:
    """The update by all turns is the weighted sum of those by the trained turns and by the later ones."""
    samples = tuple(replace(sample, later=number >= 4) for number, sample in enumerate(SAMPLES))
    scored = with_advantages(make_actor().score(Batch(samples)), make_actor().spec.algo)
    parts = [range(4), range(4, len(samples))]

    def loss(rows: range) -> float:
        columns = {name: [getattr(scored, name)[row] for row in rows] for name in ("advantages", "reference_log_probs")}
        return make_actor().update(ScoredBatch(tuple(samples[row] for row in rows), **columns))["loss"]

    trained, later = map(loss, parts)
    mixed = make_actor(algo__later_weight=0.5).update(scored)["loss"]
    assert mixed == pytest.approx((trained + 0.5 * later) / 1.5, rel=1e-4) and trained != pytest.approx(later, rel=0.01)


@pytest.mark.seconds
def test_sequences_of_a_sample_are_separate_in_the_model_and_one_in_the_mean(make_actor: Maker) -> None:
    """Two sequences in one sample, as of a conversation whose earlier thoughts were stripped."""

    def laid(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate(rows[:2]), *rows[2:]]

    apart = make_actor().score(Batch(SAMPLES))
    columns = {name: laid([getattr(s, name) for s in SAMPLES]) for name in ("token_ids", "loss_mask", "log_probs")}
    cuts = [(len(SAMPLES[0].token_ids),), *[()] * (len(SAMPLES) - 2)]
    pieces = zip(*columns.values(), cuts, strict=True)
    samples = tuple(Sample(*three, cuts=cut) for *three, cut in pieces)
    assert apart.reference_log_probs is not None
    scored = make_actor().score(Batch(samples))
    for row, expected in zip(scored.reference_log_probs or (), laid(apart.reference_log_probs), strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-6)
    values = [sample.loss_mask * (number - 5.0) for number, sample in enumerate(SAMPLES)]
    whole = replace(scored, advantages=laid(values))
    for average, reached in (("token", True), ("sequence", False)):
        joined, separate = make_actor(algo__average=average), make_actor(algo__average=average)
        same = separate.update(replace(apart, advantages=values))["grad_norm"]
        assert (joined.update(whole)["grad_norm"] == pytest.approx(same, rel=1e-5)) == reached


@pytest.mark.seconds
def test_supervised_update_is_that_of_the_token_mean(make_actor: Maker) -> None:
    actor = make_actor(train__stage="sft")
    mask = torch.cat([torch.from_numpy(sample.loss_mask[1:]) for sample in SAMPLES])
    log_probs = torch.cat([torch_log_probs(actor, sample, temperature=1.0) for sample in SAMPLES])
    loss = -(log_probs * mask).sum() / mask.sum()
    expected = gradient_norm(actor, loss)
    metrics = learn(actor, Batch(SAMPLES))
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.seconds
def test_a_validation_is_the_loss_per_token_and_changes_nothing(make_actor: Maker) -> None:
    actor = make_actor(train__stage="sft")
    nats, tokens = [], []
    for sample in SAMPLES:
        log_probs = torch_log_probs(actor, sample, temperature=1.0).detach().double()
        nats.append(-float((log_probs * torch.from_numpy(sample.loss_mask)[1:]).sum()))
        tokens.append(float(sample.loss_mask.sum()))
    metrics = actor.validate(Batch(SAMPLES[at : at + 3]) for at in range(0, len(SAMPLES), 3))
    loss = sum(nats) / sum(tokens)
    assert metrics["score/loss"] == pytest.approx(loss, rel=1e-6)
    residuals = np.array(nats) - loss * np.array(tokens)  # linearized ratio of means
    error = np.std(residuals, ddof=1) / np.sqrt(11) / np.mean(tokens)
    width = metrics["score_high/loss"] - metrics["score_low/loss"]
    assert width == pytest.approx(2 * t.ppf(0.975, 10) * error, rel=0.15)
    assert (metrics["tasks"], metrics["tokens"]) == (11, sum(tokens))
    assert learn(actor, Batch(SAMPLES)) == learn(make_actor(train__stage="sft"), Batch(SAMPLES))


@pytest.mark.seconds
def test_log_probs_of_every_token(make_actor: Maker) -> None:
    actor = make_actor()
    masks = [(np.arange(len(sample.token_ids)) > 0).astype(np.float32) for sample in SAMPLES]
    samples = tuple(replace(sample, loss_mask=mask) for sample, mask in zip(SAMPLES, masks, strict=True))
    for row, sample in zip(actor.log_probs(actor.chunks, Batch(samples)), samples, strict=True):
        expected = torch_log_probs(actor, sample, temperature=0.8).detach().numpy()
        assert row.shape == sample.token_ids.shape and row.dtype == np.float32
        assert row[0] == 0.0
        np.testing.assert_allclose(row[1:], expected, atol=5e-6)


def as_sampled(actor: PolicyTrainer) -> list[Sample]:
    """The samples with the trainer's own log-probs instead of the engine's."""
    return [
        replace(sample, log_probs=row)
        for sample, row in zip(SAMPLES, actor.log_probs(actor.chunks, Batch(SAMPLES)), strict=True)
    ]


def test_equal_engine_and_trainer_have_no_mismatch(make_actor: Maker) -> None:
    actor = make_actor()
    metrics = learn(actor, Batch(tuple(as_sampled(actor))))
    assert metrics["mismatch/max_abs"] < 1e-5
    assert abs(metrics["mismatch/k3"]) < 1e-6


def test_norms_and_biases_do_not_decay(make_actor: Maker) -> None:
    """An update whose advantages are all 0 moves by decay alone: matrices shrink, norms stay."""
    equal = [replace(sample, credits=tuple(replace(c, value=1.0) for c in sample.credits)) for sample in SAMPLES]
    actor = make_actor(optim__lr=0.5, optim__warmup_steps=0, optim__weight_decay=0.1, algo__kl_coef=0.0)
    before = {name: shard.detach().clone() for name, shard in hf.named_shards(actor.policy.chunks)}
    assert learn(actor, Batch(tuple(equal)))["grad_norm"] == 0.0
    for name, shard in hf.named_shards(actor.policy.chunks):
        factor = 1.0 if "norm" in name else 1.0 - 0.5 * 0.1
        torch.testing.assert_close(shard.detach(), before[name] * factor, msg=name)


def test_one_changed_token_is_a_mismatch(make_actor: Maker) -> None:
    """Trained tokens must be the sampled ones: one changed token exceeds the bound."""
    actor = make_actor()
    first, *remaining = as_sampled(actor)
    token_ids = first.token_ids.copy()
    trained = int(np.flatnonzero(first.loss_mask)[0])
    token_ids[trained] = (token_ids[trained] + 1) % actor.shape.vocab
    metrics = learn(actor, Batch((replace(first, token_ids=token_ids), *remaining)))
    assert metrics["mismatch/max_abs"] > 1e-2


def test_without_a_reference_there_is_no_kl(make_actor: Maker) -> None:
    assert "kl" not in learn(make_actor(algo__kl_coef=0.0), Batch(SAMPLES))


def test_nothing_to_train_is_refused(make_actor: Maker) -> None:
    idle = Sample(*(np.zeros(5, dtype) for dtype in (np.int64, np.float32, np.float32)))
    with pytest.raises(ValueError, match="no trained token"):
        learn(make_actor(), Batch((idle, idle)))


def test_a_gradient_that_is_not_finite_ends_the_run(make_actor: Maker) -> None:
    actor = make_actor()
    with torch.no_grad():
        next(actor.policy.chunks[0].parameters()).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"optim\.lr"):
        learn(actor, Batch(SAMPLES))
