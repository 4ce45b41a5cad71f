"""A hint names what is near in meaning or spelling, and nothing else: names of other systems' options and commands."""

from __future__ import annotations

import pytest

from megatron_collab.commands.__main__ import main
from megatron_collab.config import ConfigError, compose, nearest

# By name, as another system's user types it: the options that a hint may name; none where nothing of ours is meant by
# it, or means it under another name altogether.
FOREIGN = {
    "verl": {
        "actor_rollout_ref.rollout.n": "",
        "rollout.n": "",
        "actor_rollout_ref.rollout.name": "",
        "actor_rollout_ref.rollout.temperature": "",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "rollout.max_assistant_turns",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "",
        "actor_rollout_ref.actor.ppo_epochs": "",
        "actor_rollout_ref.actor.kl_loss_coef": "algo.kl_coef",
        "actor_rollout_ref.actor.use_kl_loss": "",
        "actor_rollout_ref.actor.entropy_coeff": "algo.entropy_coef",
        "actor_rollout_ref.actor.clip_ratio_high": "algo.clip_high",
        "actor_rollout_ref.actor.clip_ratio_low": "algo.clip_low",
        "actor_rollout_ref.actor.loss_agg_mode": "",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": "optim.warmup_steps",
        "critic.optim.lr": "algo.critic_lr",
        "critic.model.path": "",
        "reward_model.path": "",
        "use_reward_loop": "",
        "reward.use_reward_loop": "",
        "algorithm.adv_estimator": "",
        "algorithm.lam": "",
        "algorithm.kl_ctrl.kl_coef": "algo.kl_coef",
        "data.train_batch_size": "",
        "data.max_prompt_length": "",
        "trainer.nnodes": "",
        "trainer.n_gpus_per_node": "",
        "trainer.total_epochs": "",
        "trainer.experiment_name": "",
        "trainer.critic_warmup": "algo.critic_warmup",
    },
    "slime": {
        "--rollout-batch-size": "",
        "rollout_batch_size": "",
        "n_samples_per_prompt": "",
        "num_rollout": "",
        "rollout_max_response_len": "",
        "max_tokens_per_gpu": "",
        "eps_clip": "",
        "eps_clip_high": "algo.clip_high",
        "clip_grad": "optim.clip_grad",
        "colocate": "rollout.server.colocated",
        "hf_checkpoint": "",
        "ref_load": "",
        "tensor_model_parallel_size": "",
        "dynamic_sampling_filter_path": "",
    },
    "NeMo-RL": {
        "grpo.num_prompts_per_step": "train.prompts_per_step",
        "grpo.num_generations_per_prompt": "",
        "grpo.max_rollout_turns": "",
        "policy.max_total_sequence_length": "",
        "loss_fn.reference_policy_kl_penalty": "",
        "checkpointing.keep_top_k": "",
        "logger.wandb.project": "run.wandb_project",
    },
    "TRL": {
        "per_device_train_batch_size": "",
        "num_generations": "",
        "max_completion_length": "",
        "learning_rate": "",
        "num_train_epochs": "",
        "warmup_steps": "optim.warmup_steps",
        "max_grad_norm": "",
        "gradient_checkpointing": "",
        "eval_steps": "",
        "loss_type": "",
        "model_name_or_path": "",
        "lora_alpha": "model.lora.alpha",
        "label_smoothing": "algo.dpo.label_smoothing",
        "beta": "algo.dpo.beta, optim.beta1, optim.beta2",
        "temperature": "rollout.turn.temperature, rollout.future.temperature, reward.judge.temperature",
        "seed": "run.seed",
    },
    "OpenRLHF": {
        "pretrain": "",
        "reward_pretrain": "",
        "micro_train_batch_size": "",
        "init_kl_coef": "algo.kl_coef",
        "critic_learning_rate": "",
        "max_epochs": "",
        "gamma": "algo.gamma",
        "zero_stage": "",
    },
    "torchrun": {"nnodes": "rollout.server.nnodes, launch.nodes", "nproc_per_node": "launch.nproc_per_node"},
}
COMMANDS = {
    **dict.fromkeys(["serve", "rollout", "chat", "generate", "merge", "sft", "ppo", "run", "test", "?"], ""),
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
    _, separator, names = str(refused.value).partition("; the nearest ")
    assert names.removeprefix("is ").removeprefix("are ").split(" (")[0].split("; ")[0] == hint, refused.value
    assert bool(separator) == bool(hint)


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
