"""Values that an option cannot have, syntax that is none, and settings as users of other trainers write them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from bad_inputs.valid import OUT, Input

HUGE = "9" * 30


def inputs(bases: dict[str, Input]) -> Iterator[Input]:
    from megatron_collab.config import BuildDatasetConfig, Config, EvaluateConfig, UsersFromLogsConfig
    from megatron_collab.data.evaluation import EvaluationSet
    from megatron_collab.data.sources import TrainingSource
    from megatron_collab.settings import declared

    trained = {name for name, _, _ in declared(Config)}
    for program in (Config, EvaluateConfig, BuildDatasetConfig, UsersFromLogsConfig):
        for number, (name, default, rule) in enumerate(declared(program)):
            shared = program is not Config and name in trained  # each is dealt to another program beside train
            if shared and program is not UsersFromLogsConfig and number % 2 == (program is EvaluateConfig):
                continue
            for value in chosen([*values(default, rule)], number, 1 if shared else 2):
                yield changed(bases[program.program], f"{name}={value}")
    for base, setting, kind in (("train rl", "train", TrainingSource), ("evaluate", "eval", EvaluationSet)):
        place = next(word for word in bases[base].arguments if word.startswith(f"data.{setting}=")).partition("=")[2]
        for name, default, rule in declared(kind):
            for value in chosen([*values(default, rule)], 0, 3):
                if name != "source":
                    yield changed(bases[base], f"data.{setting}=[{{source: {place}, {name}: {value}}}]")
    for texts, names in WORDS.items():
        for text in texts:
            for name in names:
                yield changed(bases[name], *text.split(" "))


def chosen(bad: list[str], number: int, count: int) -> list[str]:
    """`count` of the values: the first ones, which are beyond the bounds, and another one of the others in turn."""
    first, remaining = bad[: count - 1], bad[count - 1 :]
    return [*first, *([remaining[number % len(remaining)]] if remaining else [])]


def changed(base: Input, *arguments: str) -> Input:
    return Input(f"{' '.join(arguments)}", base.command, (*_without(base, arguments), *arguments))


def _without(base: Input, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments of `base` but for settings that `arguments` replace, so that each occurs once."""
    names = {argument.partition("=")[0] for argument in arguments if "=" in argument}
    return tuple(word for word in base.arguments if word.partition("=")[0] not in names or "=" not in word)


def values(default: Any, rule: Any) -> Iterator[str]:
    """Values that an option with this default and declaration cannot have, in Hydra's syntax."""
    number = isinstance(default, int | float) and not isinstance(default, bool)
    bounds = [bound for bound in (rule.ge, rule.gt, rule.le, rule.lt) if bound is not None]
    entry = "{{a: {}}}" if isinstance(default, dict) else "{}"
    if number or bounds:
        low = next((f"{bound - (rule.gt is None)}" for bound in (rule.gt, rule.ge) if bound is not None), "-inf")
        high = next((f"{bound + (rule.lt is None)}" for bound in (rule.lt, rule.le) if bound is not None), "inf")
        yield from map(entry.format, (low, high, "nan", "1e400", "many", "[1]", HUGE))
    elif isinstance(default, bool):
        yield from ("maybe", "2", "[true]")
    elif isinstance(default, list):
        yield from ("3", "[[[", "{a: 1}")
    elif isinstance(default, dict):
        yield from ("3", "[[[", "nonsense")
    elif rule.choices:
        yield "nonsense"
        yield "no.such:Class" if rule.extensible else "[1]"
    if rule.choices and isinstance(default, list):
        yield "[nonsense]"
    assert all(map(math.isfinite, bounds))


TRAINING = ("train",)
PROGRAMS = ("train", "evaluate", "build-dataset")
SETTINGS = (*PROGRAMS, "users-from-logs", "doctor plan", "plan-sync", "rehearse", "score", "reproduce")
# Texts, each of one or more arguments, and the valid inputs that they are added to.
WORDS: dict[tuple[str, ...], tuple[str, ...]] = {
    # Hydra
    (
        *("~optim.lr", "~optim", "optim.lr=1e-3,1e-4", "train.steps=range(1,3)", "optim.lr=${nothing}", "optim=3"),
        *("run.dir=${run.dir}", "experiment@foo=booking", "hydra/launcher=basic", "+foo.bar=1", "optim.lr=null"),
        *("train.steps=null", "rollout.turn.max_new_tokens=null", "launch.device=null", "optim.lr=", "train.steps="),
        *("optim.lr=1e-6x", "optim.lr=0,5", "train.steps=1_000_000_000", "train.steps=10.5", "train.steps=1e3"),
        *(
            "optim.betas=[0.9,0.95]",
            "optim.lr:1e-6",
            "optim.lr==1e-6",
            "OPTIM.LR=1e-6",
            "optim/lr=1e-6",
            "Train.steps=1",
        ),
        *("++optim.lerning_rate=5", "--config-name=booking", "--config-path=conf", "--config-dir conf", "-cn booking"),
    ): TRAINING,
    ("--multirun", "foo.bar=1", "seed", "=3", "hydra.run.dir=/x", "--info", "--hepl"): SETTINGS,
    (f"run.dir={'[' * 30_000}", f"model.chat_template_args={'{a: ' * 200}1{'}' * 200}"): PROGRAMS,
    ("experiment=booking,gsm8k", "experiment=no_such", "experiment=", "reward=nonsense"): PROGRAMS,
    # Values that only together, or beside the machine and the model, cannot be
    (
        *(
            "run.dir=",
            "data.train=[[]]",
            "data.train=3",
            "data.train={}",
            "data.train=[]",
            "model.path=",
            "algo=nonsense",
        ),
        *("data.eval=[{source: a, name: b, nmae: c}]", "launch.nodes=2", "parallel.tp=3", "parallel.pp=7"),
        *("parallel.cp=2", "parallel.ep=2", "parallel.vpp=2", "train.stage=ppo"),
        *("rollout.context_length=1000000", "rollout.turn.max_new_tokens=100000", "rollout.workers=100000"),
        *(
            "launch.nproc_per_node=2000",
            "algo.mini_batches=1000",
            "train.keep_best=nonsense",
            "train.keep_best=eval/no",
        ),
        *("model.fp8=hybrid", "model.fp8_params=true", "model.lora.rank=3.5", "model.lora.targets=[nonsense]"),
        *("model.lora.serve=adapters", "rollout.routing_replay=true", "algo.objective=dpo train.rollouts_per_prompt=1"),
        *("algo.dpo.precompute=false train.stage=rl algo.dpo.refresh=-1", "optim.schedule=cosine", "algo.kl=kl"),
        *("build.candidates=2", "assistant.model=openai/gpt-4o", "run.fork=/none", "run.from=/none@best"),
    ): TRAINING,
    (
        *("reward.weights.nonsense=1", "reward.metrics.nonsense.a=1", "users={a: {class: nobody}}", "user.name=nobody"),
        *("user.name=no.such:Class", "user.name=./none.py:User", "servers={a: {model: /none}}", "servers={a: 3}"),
        *(
            "servers={a: {model: 1, tpp: 2}}",
            "rollout.server.args={port: 3}",
            "rollout.server.args={no-such-argument: 3}",
        ),
        *("rollout.tools=[no.such:tool]", "rollout.tools=[calculater]", "rollout.mcp_servers={a: {command: 3}}"),
        *("rollout.mcp_servers={a: {}}", "rollout.mcp_servers={a: {command: /none}}", "launch.interface=none0"),
        *("data.format=no.such:Reader", "data.format=jsonl", "data.world=atlantis", "user.options={a: 1}"),
        *("reward.weights={accuracy: 1}", "reward.weights={bleu: x}", "reward.metrics={token_amount: {a: 1}}"),
        *("reward.mode=no.such:Reward", "reward.mode_options={a: 1}", "rollout.player=no.such:Player"),
        *(
            "rollout.player_options={a: 1}",
            "rollout.tool_options={calculator: {a: 1}}",
            "rollout.turn.thinking_budget=5",
        ),
        *("rollout.turn.enable_thinking=true", "model.chat_template_args={a: 1} rollout.turn.enable_thinking=false"),
        *("user.name=llm", "user.name=llm user.model=nonsense", "llm.prices={a: 1}", "llm.prices={a: [1, x]}"),
        *("llm.replay=/none", "reward.clamp={nonsense: 1}", "train.eval_tasks=-1", "user.model=openai/"),
        *("data.eval=[{source: /none, name: a}, {source: /none, name: a}]", "rollout.max_messages=1"),
    ): PROGRAMS,
    (
        *(
            "build.prompt=/none.j2",
            "build.push_to_hub=nonsense",
            "build.push_to_hub=a/b/c",
            "build.assistants={a: {b: 1}}",
        ),
        *("build.assistants={a: 3}", "build.assistants={}x", "rollout.futures=0", "rollout.max_messages=null"),
        *("reward.mode=single_turn", "build.assistants={a: policy} assistant.model=openai/gpt-4o", "reward.weights={}"),
        *("train.stage=sft", "assistant.model=policy", "build.assistants={a: nonsense/x}"),
    ): ("build-dataset",),
    (
        *(
            "assistant.model=nonsense",
            "assistant.model=policy",
            "build.candidates=2",
            "train.stage=sft",
            "train.stage=dpo",
        ),
        *(
            "assistant.model=openai/gpt-4o rollout.tools=[calculator]",
            "train.eval_tasks=0",
            "data.eval=null",
            "model.path=",
        ),
        *("model.path=no/such@best", "rollout.futures=0 user.name=nobody", "assistant.model=served/none"),
        *("assistant.model=openai/gpt-4o user.model=policy user.name=llm", "data.eval=[{source: a, name: b, nmae: c}]"),
    ): ("evaluate",),
    (
        *("reward.judge.model=policy", "reward.judge.model=nonsense", "reward.judge.model=served/none"),
        *("servers={a: {model: /none}} reward.judge.model=served/a", "llm.prices={a: 1}", "reward.judge.model=null"),
        *("optim.lr=1", "train.steps=1", "user.model=x", "reward.weights={bleu: 1}", "llm.replay=/none"),
    ): ("users-from-logs",),
    (
        *("model.path=/none", "parallel.tp=3", "parallel.pp=7 launch.nodes=1", "train.stage=sft parallel.tp=1000"),
        *("rollout.server.tp=3", "launch.nodes=0", "model.path=no/such-model", "model.fp8=e5m2", "parallel.ep=2"),
    ): ("doctor plan", "plan-sync", "rehearse"),
    # What users of other trainers write: verl, NeMo-RL, prime-rl
    (
        *(
            "trainer.total_epochs=15",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=5",
            "trainer.nnodes=1",
        ),
        *("data.train_files=x.parquet", "actor_rollout_ref.model.path=x", "+trainer.logger=['console','wandb']"),
        *("data.max_prompt_length=512", "policy.model_name=x", "grpo.num_generations_per_prompt=8", "rollout.n=8"),
        *("cluster.gpus_per_node=8", "trainer.save_freq=20", "reward_model.enable=True", "checkpointing.enabled=false"),
        *(
            "data.train_batch_size=1024",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "critic.model.path=x",
            "trainer.resume_mode=auto",
        ),
        *("@ rl.toml", "algo.adv_estimator=grpo", "rollout.temperature=0.7", "rollout.tensor_model_parallel_size=2"),
    ): TRAINING,
    # TRL, slime, OpenRLHF, axolotl, Megatron-LM, torchtune
    (
        *("--model_name_or_path x", "--learning_rate 1e-6", "--per_device_train_batch_size 8", "--bf16", "--use_peft"),
        *("--hf-checkpoint x", "--rollout-batch-size 32", "--n-samples-per-prompt 8", "--rm-type deepscaler"),
        *("--pretrain x", "--micro_train_batch_size 4", "--zero_stage 3", "--advantage_estimator reinforce"),
        *("--colocate", "--tensor-model-parallel-size 2", "--deepspeed ds.json", "config.yaml", "--config rl.yaml"),
        *("--load x --save y", "--train-iters=100", "--output_dir=x", "--model Qwen/Qwen3-8B", "-h=1", "--resume"),
    ): ("train", "evaluate"),
    (
        *("--model_name_or_path x", "--pretrain x", "rollout.n=8", "trainer.total_epochs=15", "--config x.yaml"),
        *("--tasks gsm8k", "--model_args pretrained=x", "--num_fewshot 5", "--apply_chat_template"),
    ): ("build-dataset", "users-from-logs", "plan-sync", "score"),
    # Settings at their borders that are mended elsewhere
    (
        *("run.dir=/", "run.dir=' '", "rollout.turn_timeout=1e-9", "rollout.deadline=1e-9", "reward.timeout=1e-9"),
        *("rollout.server.max_total_tokens=10", f"llm.cache={OUT}/output", f"llm.record={OUT}/output"),
        *("user.stop=' '", "user.api_base=notaurl user.name=llm user.model=openai/gpt-4o"),
        *("user.api_base=http://h:99999 user.name=llm user.model=openai/gpt-4o",),
        *("user.api_base=file:///etc/passwd user.name=llm user.model=openai/gpt-4o",),
        *('user.headers={a:"x\r\nb:c"} user.name=llm user.model=openai/gpt-4o', "run.wandb_project=' '"),
    ): PROGRAMS,
    ("optim.warmup_steps=1000 train.steps=10", "launch.grace=1e-9", "launch.timeout=1e-9"): TRAINING,
    (
        *("reward.judge.api_base=notaurl", "reward.judge.api_base=http://h:99999", "llm.cache=/dev/null"),
        *("reward.judge.api_base=file:///etc/passwd", "reward.judge.timeout=1e-9", 'reward.judge.headers={a:"x\nb"}'),
    ): ("users-from-logs",),
}
