"""Settings of the algorithm that cannot work are refused in one line, with the way out."""

from __future__ import annotations

import pytest

from megatron_collab.config import compose
from megatron_collab.launch import validate
from megatron_collab.launch.remarks import without_effect
from megatron_collab.launch.validate import load
from megatron_collab.settings import ConfigError
from tests.helpers import refused


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo.advantage=ppo"], "algo.advantage=ppo: choose one of grpo, dr_grpo, gdpo, rloo, reinforce++, gae"),
        (
            ["algo.advantage=gdpo", "rollout.futures=2", "rollout.train_turns=all"],
            "algo.advantage=gdpo: normalizes rewards of the trained turn only; set rollout.train_turns=first",
        ),
        (
            ["reward.malformed_worst=true"],
            "reward.malformed_worst=true: needs a reward for malformed turns; set reward.malformed",
        ),
        (["algo.loss=grpo"], "algo.loss=grpo: choose one of ppo, gspo, cispo"),
        (["algo.average=group"], "algo.average=group: choose one of token, sequence, constant"),
        (["algo.kl=k4"], "algo.kl=k4: choose one of k1, k2, k3, low_var_kl"),
        (["algo.kl_in=both"], "algo.kl_in=both: choose one of loss, reward"),
        (["algo.correction=tis"], "algo.correction=tis: choose one of none, truncated, masked"),
        (["algo.clip_low=1.5"], "algo.clip_low=1.5: must be at least 0 and at most 1"),
        (["algo.clip_high=-0.1"], "algo.clip_high=-0.1: must be at least 0"),
        (["algo.kl_coef=-1"], "algo.kl_coef=-1.0: must be at least 0"),
        (["algo.gamma=1.01"], "algo.gamma=1.01: must be at least 0 and at most 1"),
        (["algo.gae_lambda=-0.5"], "algo.gae_lambda=-0.5: must be at least 0 and at most 1"),
        (["algo.critic_lr=0"], "algo.critic_lr=0.0: must be above 0"),
        (["algo.dynamic_sampling=-1"], "algo.dynamic_sampling=-1: must be at least 0"),
        (
            ["algo.correction_low=0.7", "algo.correction_high=0.6"],
            "algo.correction_low=0.7: must be less than algo.correction_high=0.6",
        ),
        (["algo.kl_in=reward", "algo.kl_coef=0"], "algo.kl_in=reward: algo.kl_coef=0 leaves no KL"),
        (["train.rollouts_per_prompt=1"], "algo.advantage=grpo: compares the rollouts of a task; set train.rollouts"),
        (
            ["algo.advantage=reinforce++", "algo.dynamic_sampling=3"],
            "algo.dynamic_sampling=3: with algo.advantage=reinforce++ groups of equal rewards teach as well",
        ),
        (["algo.later_weight=0"], "algo.later_weight=0.0: must be above 0"),
        (["algo.overlong=1.5"], "algo.overlong=1.5: must be at least 0 and at most 1"),
        (["algo.critic_warmup=3"], "algo.critic_warmup=3: algo.advantage=grpo has no critic; set it to 0"),
        (
            ["algo.advantage=gae", "algo.critic_warmup=9", "train.steps=9", "optim.warmup_steps=9"],
            "algo.critic_warmup=9: leaves the policy none of train.steps=9; lower it",
        ),
        (
            ["algo.advantage=gae", "reward.turn_credit=reward_to_go"],
            "reward.turn_credit=reward_to_go: algo.advantage=gae computes returns itself",
        ),
        (
            ["algo.advantage=turn_gae", "reward.turn_credit=gigpo"],
            "reward.turn_credit=gigpo: algo.advantage=turn_gae computes returns itself",
        ),
        (
            ["algo.kl_in=reward", "algo.kl_coef=0.1", "reward.turn_credit=igpo"],
            "algo.kl_in=reward: reward.turn_credit=igpo would subtract all of it from the reward of each turn; set",
        ),
        (
            ["algo=gdpo", "reward.turn_credit=gigpo"],
            "reward.turn_credit=gigpo: its credits have to be compared with their peers, which algo.advantage=gdpo",
        ),
        (
            ["algo=reinforce_pp", "reward.turn_credit=userrl"],
            "reward.turn_credit=userrl: its credits have to be compared with their peers, which algo.advantage=",
        ),
        (
            ["algo=gdpo", "reward.turn_credit=next_user_turn", "+reward.turn_credit_options={verdict: accuracy}"],
            "reward.turn_credit=next_user_turn: its credits have to be compared with their peers, which",
        ),
        (
            ["algo.advantage_options.scale=2"],
            "algo.advantage_options.scale: no such setting; there are none",
        ),
        (
            ["reward.turn_credit=userrl", "+reward.turn_credit_options={turns: naive}"],
            "reward.turn_credit_options.turns=naive: choose one of equalized, r2g, em",
        ),
        (
            ["reward.turn_credit=next_user_turn"],
            "reward.turn_credit_options: verdict is not set; name a metric that scores turns",
        ),
        (
            ["reward.turn_credit=next_user_turn", "+reward.turn_credit_options={verdict: kind}"],
            "reward.turn_credit=next_user_turn: reads the turns' scores of kind, which is not in reward.weights; add",
        ),
        (
            ["reward.turn_credit=next_user_turn", "+reward.turn_credit_options={verdict: accuracy}"],
            "reward.turn_credit=next_user_turn: accuracy gives no score for each turn; choose a metric that does",
        ),
        (["train.stage=dpo", "algo.dpo.loss=refuel"], "algo.dpo.loss=refuel: regresses rewards, which the pairs of"),
        (
            ["algo=refuel", "algo.dpo.label_smoothing=0.1"],
            "algo.dpo.label_smoothing=0.1: algo.dpo.loss=refuel has no labels; set it to 0",
        ),
        (["algo=refuel", "algo.dpo.refresh=0"], "algo.dpo.refresh=0: algo.dpo.loss=refuel compares with the policy"),
        (["algo=refuel", "algo.dpo.refresh=5"], "algo.dpo.refresh=5: algo.dpo.loss=refuel compares with the policy"),
        (["algo=refuel", "model.lora.rank=4"], "the reference is the model without adapters; remove the adapters"),
        (["algo.objective=best"], "algo.objective=best: choose one of policy, dpo, sft"),
        (["algo.dpo.loss=hinge"], "algo.dpo.loss=hinge: choose one of sigmoid, sigmoid_norm, ipo"),
        (["algo.dpo.beta=0"], "algo.dpo.beta=0.0: must be above 0"),
        (["algo.dpo.label_smoothing=0.5"], "algo.dpo.label_smoothing=0.5: must be at least 0 and below 0.5"),
        (
            ["algo=online_dpo", "algo.dpo.loss=ipo", "algo.dpo.label_smoothing=0.1"],
            "algo.dpo.label_smoothing=0.1: algo.dpo.loss=ipo has no labels; set it to 0, or choose sigmoid",
        ),
        (
            ["algo=online_dpo", "train.rollouts_per_prompt=1"],
            "algo.objective=dpo: chooses among the rollouts of a task; set train.rollouts_per_prompt to 2 or more",
        ),
        (
            ["algo=best_of_n", "rollout.futures=2", "rollout.train_turns=all"],
            "algo.objective=sft: chooses among the rollouts of a task, whose futures are not learned from; set rollout",
        ),
        (["algo=best_of_n", "algo.dynamic_sampling=2"], "algo.dynamic_sampling=2: with algo.objective=sft every group"),
        (
            ["algo=online_dpo", "rollout.futures=0", "reward.turn_credit=last"],
            "reward.turn_credit=last: algo.objective=dpo learns from all turns of a conversation; set it to equal",
        ),
        (
            ["algo=online_dpo", "rollout.futures=0", "rollout.strip_thoughts=true"],
            "rollout.strip_thoughts=true: algo.objective=dpo compares conversations of one sequence each; set it to",
        ),
        (
            ["algo=online_dpo", "algo.dpo.refresh=5", "model.lora.rank=4"],
            "algo.dpo.refresh=5: with model.lora.rank=4 the reference is the model without adapters; set it to 0",
        ),
        (["train.stage=dpo", "algo.dpo.refresh=5"], "algo.dpo.refresh=5: train.stage=dpo keeps the first policy"),
        (["algo=online_dpo", "algo.mini_batches=5000"], "algo.mini_batches=5000: a step has at most"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_way_out(overrides: list[str], message: str) -> None:
    assert message in refused(*overrides)


def test_gspo_does_not_cut_sequences() -> None:
    config = compose(["experiment=gsm8k", "algo.loss=gspo", "model.dtype=bfloat16", "parallel.tp=1", "parallel.cp=2"])
    with pytest.raises(ConfigError, match=r"algo\.loss=gspo: needs whole sequences .* set parallel\.cp=1"):
        validate.check_settings(config)


def test_weights_of_sequences_do_not_cut_them() -> None:
    overrides = ["algo.correction=truncated", "algo.correction_level=sequence", "model.dtype=bfloat16"]
    config = compose(["experiment=gsm8k", *overrides, "parallel.tp=1", "parallel.cp=2"])
    with pytest.raises(ConfigError, match=r"algo\.correction_level=sequence: needs whole sequences .* set it to token"):
        validate.check_settings(config)


@pytest.mark.parametrize(
    ("overrides", "starts"),
    [
        (["algo=grpo"], []),
        (["algo=gspo"], []),
        (["algo=gspo", "algo.mini_batches=1"], ["algo.loss=gspo, algo.clip_low=0.0003, algo.clip_high=0.0004: "]),
        (["algo=dapo", "algo.mini_batches=1"], ["algo.clip_high=0.28: without effect"]),
        (["algo=dapo", "algo.mini_batches=1", "algo.epochs=2"], []),
        (["algo.kl=k1"], ["algo.kl=k1: without effect in the loss"]),
        (["algo=ppo"], []),
        (["algo=online_dpo"], []),
        (["algo=refuel"], []),
        (
            ["algo=best_of_n", "algo.entropy_coef=0.1"],
            ["algo.entropy_coef=0.1: without effect with algo.objective=sft"],
        ),
        (["reward.turn_credit=gigpo", "rollout.futures=0"], []),
        (
            ["reward.turn_credit=userrl", "+reward.turn_credit_options={turns: em}", "rollout.futures=3"],
            ["reward.turn_credit=userrl, reward.turn_credit_options={'turns': 'em'}: without effect with rollout"],
        ),
        (
            ["algo=online_dpo", "reward.turn_credit=last", "reward.mode=single_turn"],
            ["reward.turn_credit=last: without effect with reward.mode=single_turn; remove it"],
        ),
    ],
)
def test_settings_without_effect_are_reported_at_the_start(overrides: list[str], starts: list[str]) -> None:
    lines = without_effect(load(["experiment=gsm8k", *overrides]))
    assert len(lines) == len(starts) and all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


@pytest.mark.parametrize("advantage", ["reinforce++", "gae"])
def test_one_rollout_a_task_is_enough_if_rollouts_are_not_compared(advantage: str) -> None:
    config = load(["experiment=gsm8k", f"algo.advantage={advantage}", "train.rollouts_per_prompt=1"])
    assert (config.algo.advantage, config.train.rollouts_per_prompt) == (advantage, 1)


def test_a_critic_learns_from_later_turns_too() -> None:
    algo = load(["experiment=gsm8k", "algo.advantage=gae", "rollout.futures=2", "rollout.train_turns=all"]).algo
    assert algo.advantage == "gae"


@pytest.mark.seconds
def test_the_supervised_stage_has_no_advantages() -> None:
    assert load(["experiment=booking_sft", "algo.kl_in=reward", "algo.kl_coef=0"]).train.stage == "sft"
