"""A hint says what another system's option is here, or names what is near in spelling, and nothing else."""

from __future__ import annotations

import re

import pytest

from megatron_collab.commands.__main__ import main
from megatron_collab.config import compose
from megatron_collab.settings import ConfigError, nearest

# By name, as another system's user types it: what the tables in config/peers say of it, else the nearest options; empty
# if nothing of ours is meant by it.
FOREIGN = {
    "verl": {
        "actor_rollout_ref.rollout.n": "is train.rollouts_per_prompt here",
        "rollout.n": "",
        "actor_rollout_ref.rollout.name": "is not needed",
        "actor_rollout_ref.rollout.temperature": "is rollout.turn.temperature and rollout.future.temperature here",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "is rollout.server.memory_share here",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "is rollout.server.tp and rollout.server.replicas here",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "is rollout.max_assistant_turns here",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "is algo.mini_batches here",
        "actor_rollout_ref.actor.ppo_epochs": "is algo.epochs here",
        "actor_rollout_ref.actor.kl_loss_coef": "is algo.kl_coef here",
        "actor_rollout_ref.actor.use_kl_loss": "is algo.kl_coef here",
        "actor_rollout_ref.actor.entropy_coeff": "is algo.entropy_coef here",
        "actor_rollout_ref.actor.clip_ratio_high": "is algo.clip_high here",
        "actor_rollout_ref.actor.clip_ratio_low": "is algo.clip_low here",
        "actor_rollout_ref.actor.loss_agg_mode": "is algo.average here",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": "is optim.warmup_steps here",
        "critic.optim.lr": "is algo.critic_lr here",
        "critic.model.path": "is not needed",
        "reward_model.path": "",
        "use_reward_loop": "",
        "reward.use_reward_loop": "is not needed",
        "algorithm.adv_estimator": "is algo.advantage and algo.loss here",
        "algorithm.lam": "is algo.gae_lambda here",
        "algorithm.kl_ctrl.kl_coef": "is algo.kl_coef here",
        "data.train_batch_size": "is train.prompts_per_step here",
        "data.max_prompt_length": "is data.max_prompt_tokens and rollout.context_length here",
        "trainer.nnodes": "is launch.nodes here",
        "trainer.n_gpus_per_node": "is launch.nproc_per_node here",
        "trainer.total_epochs": "is train.epochs here",
        "trainer.experiment_name": "is run.wandb_name here",
        "trainer.critic_warmup": "is algo.critic_warmup here",
    },
    "slime": {
        "--rollout-batch-size": "is train.prompts_per_step here",
        "rollout_batch_size": "is train.prompts_per_step here",
        "n_samples_per_prompt": "is train.rollouts_per_prompt here",
        "num_rollout": "is train.steps here",
        "rollout_max_response_len": "is rollout.turn.max_new_tokens and rollout.future.max_new_tokens here",
        "max_tokens_per_gpu": "is train.tokens_per_micro_batch here",
        "eps_clip": "is algo.clip_low and algo.clip_high here",
        "eps_clip_high": "is algo.clip_high here",
        "clip_grad": "is optim.clip_grad here",
        "colocate": "is rollout.server.colocated here",
        "hf_checkpoint": "is model.path here",
        "ref_load": "is not needed",
        "tensor_model_parallel_size": "is parallel.tp here",
        "dynamic_sampling_filter_path": "has no counterpart",
    },
    "NeMo-RL": {
        "grpo.num_prompts_per_step": "train.prompts_per_step",
        "grpo.num_generations_per_prompt": "",
        "grpo.max_rollout_turns": "",
        "policy.max_total_sequence_length": "",
        "loss_fn.reference_policy_kl_penalty": "",
        "checkpointing.keep_top_k": "",
        "logger.wandb.project": "is run.wandb_project here",
    },
    "TRL": {
        "per_device_train_batch_size": "is train.prompts_per_step or train.prompts_per_step here",
        "num_generations": "is train.rollouts_per_prompt here",
        "max_completion_length": "is rollout.turn.max_new_tokens and rollout.future.max_new_tokens here",
        "learning_rate": "is optim.lr here",
        "num_train_epochs": "is train.epochs here",
        "warmup_steps": "is optim.warmup_steps here",
        "max_grad_norm": "is optim.clip_grad here",
        "gradient_checkpointing": "is parallel.recompute here",
        "eval_steps": "is train.eval_every here",
        "loss_type": "is train.stage here",
        "model_name_or_path": "is model.path here",
        "lora_alpha": "is model.lora.alpha here",
        "label_smoothing": "is algo.dpo.label_smoothing here",
        "beta": "is algo.dpo.beta or algo.kl_coef or algo.kl_coef and algo.kl_in here",
        "temperature": "is rollout.turn.temperature and rollout.future.temperature here",
        "seed": "is run.seed here",
    },
    "OpenRLHF": {
        "pretrain": "is model.path here",
        "reward_pretrain": "has no counterpart",
        "micro_train_batch_size": "is not needed",
        "init_kl_coef": "is algo.kl_coef here",
        "critic_learning_rate": "is algo.critic_lr here",
        "max_epochs": "is train.epochs or algo.epochs here",
        "gamma": "is algo.gamma here",
        "zero_stage": "is not needed",
    },
    "torchrun": {
        "nnodes": "is launch.nodes here",
        "nproc_per_node": "is launch.nproc_per_node here",
    },
}
COMMANDS = {
    **dict.fromkeys(["rollout", "generate", "merge", "sft", "ppo", "run", "test", "?"], ""),
    "eval": "evaluate",
    "trian": "train",
    "plan_sync": "plan-sync",
    "prepare": "prepare-data",
}


@pytest.mark.parametrize(
    ("name", "hint"),
    [pytest.param(*pair, id=f"{system} {pair[0]}") for system in FOREIGN for pair in FOREIGN[system].items()],
)
def test_the_hint_for_an_option_of_another_system(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose([f"{name}=1"])
    message = str(refused.value)
    of_table = re.search(r"; \S.*?'s \S+ (is not needed|has no counterpart|is .*? here)", message)
    of_spelling = re.search(r"; the nearest (?:is|are) (.*?)(?: \(|; |$)", message)
    answer = of_table or of_spelling
    assert re.sub(r" \([^)]*\)", "", answer[1] if answer else "") == hint, message  # without formulas


def test_there_are_names_of_many_systems() -> None:
    assert sum(map(len, FOREIGN.values())) >= 60 and len(COMMANDS) >= 10


@pytest.mark.parametrize("word", COMMANDS)
def test_the_hint_for_a_command(word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["megatron-collab", word])
    assert main() == 2
    hint = f"; the nearest is {COMMANDS[word]}" if COMMANDS[word] else ""
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"megatron-collab: no command {word!r}{hint} (all commands: --help)\n"


@pytest.mark.parametrize(
    ("value", "names", "hint"),
    [
        ("bokking", ["gsm8k", "booking"], "; the nearest is booking"),
        ("zzz", ["gsm8k", "booking"], ""),
        ("clipgrad", ["clip_grad", "lr"], "; the nearest is clip_grad"),
        ("schedule-polici", ["schedule-policy"], "; the nearest is schedule-policy"),
        ("levle", ["prompt", "level"], "; the nearest is level"),
        ("dp", ["tp", "pp", "cp"], ""),  # two letters are no slip
        ("export", ["report"], ""),  # nor is a first letter
        ("dapo", ["ppo", "gspo", "cispo"], ""),
        ("clip", ["lr", "clip_low", "clip_high"], "; the nearest are clip_low, clip_high"),
        ("booking", ["booking", "bookings"], ""),  # a known name needs none
        ("eval/accuracy", ["eval/m/reward", "eval/m/accuracy"], "; the nearest is eval/m/accuracy"),
        ("lvel", ["level", "level"], "; the nearest is level"),
    ],
)
def test_what_is_near(value: str, names: list[str], hint: str) -> None:
    assert nearest(value, names) == hint
