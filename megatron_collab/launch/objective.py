"""Checks of what a run learns from and how: steps, loss, advantages, chosen rollouts, pairs."""

from __future__ import annotations

from megatron_collab.algo.advantages import make_advantage
from megatron_collab.algo.policy_loss import PolicyLoss
from megatron_collab.algo.turn_credit import make_turn_credit
from megatron_collab.config import Config
from megatron_collab.reward.spec import RewardSpec
from megatron_collab.settings import Shown, require
from megatron_collab.settings.extension import make


def check_steps(config: Config) -> None:
    """Checks phases of a run against its steps, as soon as they are known. Raises ConfigError."""
    shown, steps = Shown(config), config.train.steps
    message = f"{shown.optim.warmup_steps}: ends beyond the run, {shown.train.steps}; lower it"
    require(config.optim.warmup_steps <= steps, message)
    message = f"{shown.algo.critic_warmup}: leaves the policy none of {shown.train.steps}; lower it"
    require(config.objective != "policy" or config.algo.critic_warmup < steps, message)


def check_dpo(config: Config) -> None:
    """Checks the loss on pairs and its reference. Raises ConfigError."""
    if config.objective != "dpo":
        return
    shown, train, dpo = Shown(config), config.train, config.algo.dpo
    message = f"{shown.algo.dpo.loss}: regresses rewards, which the pairs of {shown.train.stage} lack; choose sigmoid"
    require(train.stage != "dpo" or dpo.loss != "refuel", message)
    message = f"{shown.algo.dpo.label_smoothing}: {shown.algo.dpo.loss} has no labels; set it to 0, or choose sigmoid"
    require(dpo.loss not in ("ipo", "refuel") or dpo.label_smoothing == 0, message)
    message = f"{shown.algo.dpo.refresh}: algo.dpo.loss=refuel compares with the policy that sampled the replies"
    require(dpo.loss != "refuel" or dpo.refresh == 1, f"{message}; set it to 1")
    message = f"{shown.algo.dpo.refresh}: {shown.train.stage} keeps the first policy as reference; set it to 0"
    require(train.stage != "dpo" or dpo.refresh == 0, message)
    message = f"{shown.algo.dpo.refresh}: with {shown.model.lora.rank} the reference is the model without adapters"
    fix = "remove the adapters" if dpo.loss == "refuel" else "set it to 0"
    require(dpo.refresh == 0 or config.model.lora.rank is None, f"{message}; {fix}")


def check_played(config: Config, reward: RewardSpec) -> None:
    """Checks what is learned from conversations that the run plays. Raises ConfigError."""
    _check_trained_turns(config)
    if config.objective == "policy":
        _check_policy(config, reward)
    else:
        _check_choice(config)


def _check_trained_turns(config: Config) -> None:
    shown, rollout = Shown(config), config.rollout
    if rollout.train_turns == "all":
        message = f"{shown.rollout.train_turns}: compares sibling futures; set rollout.futures to 2 or more"
        require(rollout.futures > 1, message)
        message = f"{shown.rollout.train_turns} trains these turns too; set it to {shown.rollout.turn.temperature}"
        same = rollout.turn.temperature == rollout.future.temperature
        require(same, f"{shown.rollout.future.temperature}: {message}")


def _check_policy(config: Config, spec: RewardSpec) -> None:
    shown = Shown(config)
    algo, advantage, credit = config.algo, make_advantage(config.algo), make_turn_credit(config.reward)
    whole_sequences = algo.loss == "gspo"
    if ":" in algo.loss:
        loss = make(algo.loss, "algo.loss", PolicyLoss, algo.loss_options, "algo.loss_options.")
        whole_sequences = getattr(loss, "whole_sequences", False)
    message = f"{shown.algo.correction_low}: must be less than {shown.algo.correction_high}"
    require(algo.correction_low < algo.correction_high, message)
    message = f"{shown.algo.kl_in}: algo.kl_coef=0 leaves no KL; set algo.kl_coef above 0, or algo.kl_in=loss"
    require(algo.kl_in == "loss" or algo.kl_coef > 0, message)
    message = f"{shown.algo.advantage}: compares the rollouts of a task; set train.rollouts_per_prompt to 2 or more"
    compares = advantage.compares and algo.teacher.weight < 1
    require(not compares or config.train.rollouts_per_prompt > 1, message)
    message = f"{shown.algo.advantage}: normalizes rewards of the trained turn only; set rollout.train_turns=first"
    require(not advantage.decouples or config.rollout.train_turns == "first", message)
    message = f"{shown.algo.dynamic_sampling}: with {shown.algo.advantage} groups of equal rewards teach as well"
    require(advantage.compares or algo.dynamic_sampling == 0, f"{message}; set it to 0")
    message = f"{shown.algo.loss}: needs whole sequences on a rank, and {shown.parallel.cp} cuts them"
    require(not whole_sequences or config.parallel.cp == 1, f"{message}; set parallel.cp=1")
    message = f"{shown.algo.correction_level}: needs whole sequences on a rank, and {shown.parallel.cp} cuts them"
    require(algo.correction_level == "token" or config.parallel.cp == 1, f"{message}; set it to token")
    message = f"{shown.algo.critic_warmup}: {shown.algo.advantage} has no critic; set it to 0, or algo.advantage=gae"
    require(advantage.critic or algo.critic_warmup == 0, message)
    message = f"{shown.reward.turn_credit}: {shown.algo.advantage} computes returns itself, from algo.gamma; set it to"
    require(not advantage.critic or credit.rewards, f"{message} immediate, equal or last")
    message = f"{shown.reward.turn_credit}: its credits have to be compared with their peers, which"
    message = f"{message} {shown.algo.advantage} does not do; set it to grpo, dr_grpo or rloo"
    require(not credit.compared or (advantage.compares and not advantage.decouples), message)
    message = f"{shown.algo.kl_in}: {shown.reward.turn_credit} would subtract all of it from the reward of each turn"
    require(algo.kl_in == "loss" or not credit.own_rewards, f"{message}; set it to loss")
    for name in credit.turn_metrics:
        metric = spec.metrics.get(name)
        message = (
            f"{shown.reward.turn_credit}: reads the turns' scores of {name}, which is not in reward.weights; add it"
        )
        require(metric is not None, message)
        message = f"{shown.reward.turn_credit}: {name} gives no score for each turn; choose a metric that does"
        require(metric is None or metric.scores_turns, message)


def _check_choice(config: Config) -> None:
    """Checks objectives that learn from the best rollout of a group (sft), or from best and worst (dpo)."""
    shown = Shown(config)
    algo, rollout = config.algo, config.rollout
    prefix = f"{shown.algo.objective}: chooses among the rollouts of a task"
    require(config.train.rollouts_per_prompt > 1, f"{prefix}; set train.rollouts_per_prompt to 2 or more")
    require(
        rollout.train_turns == "first", f"{prefix}, whose futures are not learned from; set rollout.train_turns=first"
    )
    conversations = config.reward.mode != "single_turn" and rollout.futures == 0
    equal = config.reward.turn_credit == "equal"
    message = f"{shown.reward.turn_credit}: {shown.algo.objective} learns from all turns of a conversation"
    require(equal or not conversations, f"{message}; set it to equal")
    message = f"{shown.rollout.strip_thoughts}: {shown.algo.objective} compares conversations of one sequence each"
    require(algo.objective == "sft" or not (conversations and rollout.strip_thoughts), f"{message}; set it to false")
    message = f"{shown.algo.dynamic_sampling}: with {shown.algo.objective} every group teaches; set it to 0"
    require(algo.objective == "dpo" or algo.dynamic_sampling == 0, message)
