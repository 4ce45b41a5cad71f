"""Command lines of other systems, in the style of their published examples, become commands that ours takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_collab.commands import translation
from megatron_collab.commands.__main__ import run
from megatron_collab.commands.shell_script import UNKNOWN, commands
from megatron_collab.commands.translation import translate
from megatron_collab.config import compose_program
from megatron_collab.config.peers import NO, NOT_NEEDED
from megatron_collab.settings import ConfigError

SCRIPTS = Path(__file__).parent / "foreign"

# By file: system, command, some of our settings, and all of theirs that have no counterpart.
CASES: dict[str, tuple[str, str, str, set[str]]] = {
    "verl_feedback.sh": (
        "verl",
        "train",
        "data.train=~/data/arithmetic_feedback/train.parquet rollout.turn.max_new_tokens=2048 "
        "rollout.context_length=3072 "
        "train.prompts_per_step=256 train.rollouts_per_prompt=8 algo.mini_batches=2 algo.kl_coef=0.001 "
        "rollout.futures=0 "
        "rollout.max_user_turns=1 rollout.max_assistant_turns=2 rollout.server.tp=2 rollout.server.replicas=4 "
        "train.checkpoint_every=0 train.eval_every=20 algo.average=token run.wandb_name=3b-n8 train.epochs=15 "
        "data.max_prompt_tokens=1024 rollout.server.memory_share=0.5",
        {"actor_rollout_ref.rollout.multi_turn.interaction_config_path"},
    ),
    "verl_gsm8k.sh": (
        "verl",
        "train",
        "rollout.futures=0 rollout.max_assistant_turns=1 reward.weights.accuracy=1 "
        "algo.mini_batches=4 train.epochs=15 "
        "data.max_prompt_tokens=512 rollout.context_length=1536 rollout.server.memory_share=0.6",
        set(),
    ),
    "verl_collabllm_rl.sh": (
        "verl",
        "train",
        "reward=verl reward.weights.token_amount=-0.0001 reward.judge.model=openai/gpt-4o-mini rollout.futures=3 "
        "rollout.max_user_turns=2 rollout.max_assistant_turns=3 train.prompts_per_step=16 rollout.server.replicas=8",
        {"custom_reward_function.path", "custom_reward_function.name"},
    ),
    "verl_collabllm_sft.sh": (
        "verl",
        "train",
        "train.stage=sft train.prompts_per_step=64 rollout.context_length=8196 launch.nproc_per_node=4 optim.lr=1e-6 "
        "train.epochs=3",
        set(),
    ),
    "verl_interaction.yaml": (
        "verl",
        "train",
        "user.model=openai/gpt-4o-mini user.max_tokens=512",
        {"interaction.class_name"},
    ),
    "slime_grpo.sh": (
        "slime",
        "train",
        "model.path=/models/small train.steps=3000 algo.mini_batches=2 algo.clip_low=0.2 algo.clip_high=0.28 "
        "parallel.tp=2 "
        "rollout.server.colocated=true rollout.server.replicas=4 rollout.server.args.schedule_policy=lpm "
        "launch.nproc_per_node=8 algo.average=sequence rollout.context_length=9216 rollout.server.memory_share=0.7",
        {"n-samples-per-eval-prompt", "eval-top-p", "expert-tensor-parallel-size"},
    ),
    "trl_grpo.sh": (
        "TRL",
        "train",
        "train.prompts_per_step=8 launch.nproc_per_node=4 algo.kl_coef=0.04 algo.average=constant "
        "algo.advantage=dr_grpo "
        "optim.warmup_steps=20 train.checkpoint_every=0 model.lora.rank=32 model.lora.alpha=64",
        {"lr_scheduler_type", "push_to_hub"},
    ),
    "trl_dpo.yaml": (
        "TRL",
        "train",
        "train.stage=dpo algo.dpo.beta=0.2 algo.dpo.loss=sigmoid train.prompts_per_step=16 optim.lr=5e-07 "
        "train.epochs=1",
        set(),
    ),
    "openrlhf_reinforce.sh": (
        "OpenRLHF",
        "train",
        "algo.advantage=reinforce++ algo.mini_batches=8 algo.clip_low=0.2 algo.clip_high=0.27 algo.kl_in=loss "
        "algo.epochs=1 launch.nodes=1 rollout.server.replicas=4 train.epochs=1 rollout.server.memory_share=0.6",
        {"reward.remote_url"},
    ),
    "openrlhf_sft.sh": (
        "OpenRLHF",
        "train",
        "train.stage=sft train.prompts_per_step=256 optim.lr=5e-6 optim.weight_decay=0.1 model.lora.rank=16 "
        "train.epochs=1",
        {"max_samples"},
    ),
    "collabllm_online_dpo.sh": (
        "CollabLLM",
        "train",
        "algo=online_dpo reward=collabllm reward.weights.accuracy=1 reward.weights.token_amount=-0.5 algo.dpo.gap=0.1 "
        "rollout.futures=3 rollout.max_user_turns=2 train.prompts_per_step=32 user.model=openai/gpt-4o-mini "
        "train.epochs=8 rollout.server.memory_share=0.6",
        {"dataset_name", "push_to_hub", "hf_org"},
    ),
    "collabllm_build.sh": (
        "CollabLLM",
        "build-dataset",
        "build.candidates=3 build.proactive=0.5 assistant.model=openai/gpt-4o rollout.max_messages=14 "
        "data.eval=bigcodebench",
        {"hf_entity"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_published_command_becomes_ours(name: str) -> None:
    system, command, settings, without = CASES[name]
    result = translate(SCRIPTS / name)
    assert (result.system.name, result.program.command) == (system, command)
    assert not set(settings.split()) - set(result.overrides)
    assert {option for names in result.missing[NO].values() for option in names} == without
    compose_program(translation._PROGRAMS[command], result.overrides)


@pytest.mark.parametrize(
    ("command", "name", "settings"),
    [
        ("python -m scripts.train.sft --dataset_repo a", "CollabLLM", "train.stage=sft"),
        ("torchrun scripts/train/offline_dpo.py --dataset_repo a", "CollabLLM", "train.stage=dpo"),
        ("accelerate launch trl/scripts/sft.py --dataset_name a", "TRL", "train.stage=sft"),
        ("trl dpo --dataset_name a", "TRL", "train.stage=dpo"),
        ("python sft.py --dataset_name a --dataset_text_field text", "TRL", "train.stage=sft"),
        ("trl rloo --dataset_name a --beta 0", "TRL", "algo.advantage=rloo algo.kl_coef=0 algo.kl_in=loss"),
        (
            "trl rloo --dataset_name a --use_peft",
            "TRL",
            "algo.advantage=rloo algo.kl_in=reward algo.kl_coef=0.05 train.rollouts_per_prompt=2 model.lora.rank=16 "
            "model.lora.alpha=32 model.lora.dropout=0.05",
        ),
        (
            "accelerate launch --num_processes 4 train.py --num_generations 8 --max_completion_length 99 --beta 0.1",
            "TRL",
            "algo.kl_coef=0.1 algo.clip_dual=0 launch.nproc_per_node=4",
        ),
        (
            "accelerate launch --num_processes 16 --num_machines 2 -m openrlhf.cli.train_ppo --prompt_data a",
            "OpenRLHF",
            "launch.nodes=2 launch.nproc_per_node=8 algo.clip_dual=0 algo.critic_clip=0.5",
        ),
        (
            "accelerate launch --num_processes 16 --num_machines 2 trl/scripts/grpo.py --num_generations 8",
            "TRL",
            "launch.nodes=2 launch.nproc_per_node=8 train.prompts_per_step=16",
        ),
        (
            "python train.py --rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 4 --lr-warmup-iters 6 "
            "--offload --use-kl-loss 2>&1 | tee log",
            "slime",
            "optim.warmup_steps=3 parallel.offload=true algo.kl_coef=0 algo.clip_dual=0",
        ),
        ("python train.py --rollout-batch-size 4", "slime", "algo.kl_coef=0 algo.kl_in=loss"),
        ("python train.py --rollout-batch-size 4 --num-epoch 2", "slime", "train.epochs=2"),
        (
            "trl grpo --dataset_name a --gradient_accumulation_steps 2 --steps_per_generation 6 --num_generations 4",
            "TRL",
            "train.prompts_per_step=12 algo.mini_batches=3 train.epochs=3",
        ),
        (
            "trl grpo --dataset_name a --generation_batch_size 64 --num_generations 4 --max_steps 9",
            "TRL",
            "train.prompts_per_step=16 algo.mini_batches=8 train.steps=9",
        ),
        (
            "torchrun -m verl.trainer.fsdp_sft_trainer optim.warmup_steps_ratio=0.1 trainer.total_training_steps=50",
            "verl",
            "optim.warmup_steps=5",
        ),
        ("deepspeed --module openrlhf.cli.train_dpo --dataset a", "OpenRLHF", "train.stage=dpo"),
        ("python train.py --rollout-batch-size 4 --loss-type sft_loss", "slime", "train.stage=sft"),
        (
            "python my_main.py data.train_files=a trainer.nnodes=1 algorithm.adv_estimator=rloo",
            "verl",
            "algo.advantage=rloo",
        ),
    ],
)
def test_the_program_is_known_by_its_command_or_its_options(
    command: str, name: str, settings: str, tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(command)
    result = translate(script)
    assert result.system.name == name and not set(settings.split()) - set(result.overrides)


def test_every_script_is_tried() -> None:
    assert {file.name for file in SCRIPTS.iterdir()} == set(CASES)


@pytest.mark.processes
def test_what_is_printed_runs_and_shows_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", ["--from", str(SCRIPTS / "verl_feedback.sh")]) == 0
    printed = capsys.readouterr().out
    command, _, tables = printed.partition("\n\n")
    (words,) = [words for words in commands(command) if words]
    assert words[:2] == ["megatron-collab", "train"] and words[2:] == translate(SCRIPTS / "verl_feedback.sh").overrides
    assert "  data.train_batch_size=256 -> train.prompts_per_step=256\n" in tables
    assert "Defaults of verl, which the file leaves out:\n" in tables and "algo.average=token" in tables
    assert "  trainer.total_epochs=15 -> train.epochs=15\n" in tables and "  an interaction runs as it is: " in tables
    assert run("doctor", ["--from", str(SCRIPTS / "slime_grpo.sh")]) == 0
    assert "wandb-key" in capsys.readouterr().out
    assert run("doctor", ["--from", str(SCRIPTS / "collabllm_online_dpo.sh")]) == 0
    assert "abcdefgh12345678" not in capsys.readouterr().out


@pytest.mark.processes
def test_what_is_missing_for_a_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text("trl grpo --model_name_or_path m --reward_funcs my.reward --num_generations $N")
    assert run("doctor", ["--from", str(script)]) == 0
    printed = capsys.readouterr().out
    assert "    data.train=DATA" in printed
    assert "Before it runs: reward.weights: no metric has a weight" in printed
    assert "set train.rollouts_per_prompt; the value is computed when the script runs" in printed


@pytest.mark.parametrize(
    ("arguments", "settings", "kind", "reason"),
    [
        (
            "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02",
            "algo.kl_in=reward algo.kl_coef=0.02",
            "",
            "",
        ),
        ("algorithm.kl_ctrl.kl_coef=0.02", "algo.kl_coef=0", NOT_NEEDED, "algorithm.use_kl_in_reward=true"),
        ("data.train_batch_size=1 actor_rollout_ref.actor.ppo_mini_batch_size=0", "", NO, "a part is 0"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "", NO, "choose one of token, sequence, constant"),
        ("+my.own=1", "", NO, "not in the table of verl's options"),
        ("data.train_files=\"['a b.parquet','c.parquet']\"", "", "", ""),
        ("trainer.default_local_dir='a folder=x'", 'run.dir="a folder=x"', "", ""),
        ("trainer.total_training_steps=null", "train.epochs=30", "", ""),
        ("trainer.total_training_steps=5 trainer.total_epochs=9", "train.steps=5", NOT_NEEDED, "total_training_steps"),
        ("actor_rollout_ref.actor.optim.betas='[0.9, 0.98]'", "optim.beta1=0.9 optim.beta2=0.98", "", ""),
        ("reward_model.reward_manager=dapo", "reward.weights.accuracy=1", "", ""),
        ("custom_reward_function.path=mine.py", "", NO, "a function runs as it is"),
        ("trainer.n_gpus_per_node=many", "", NO, "must be a whole number"),
        ("algorithm.filter_groups.enable=true", "algo.dynamic_sampling=1000", "", ""),
        (
            "algorithm.adv_estimator=rloo algorithm.norm_adv_by_std_in_grpo=false",
            "algo.advantage=rloo",
            NOT_NEEDED,
            "it counts only with algorithm.adv_estimator=grpo",
        ),
        (
            "actor_rollout_ref.actor.megatron.optimizer_offload=true "
            "actor_rollout_ref.actor.megatron.grad_offload=false",
            "parallel.offload=true",
            "",
            "",
        ),
        ("algorithm.use_kl_in_reward=true", "algo.kl=k1 optim.beta2=0.999 algo.critic_clip=0.5", "", ""),
        ("trainer.nnodes=1", "rollout.max_assistant_turns=1", "", ""),
    ],
)
def test_single_options(arguments: str, settings: str, kind: str, reason: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo {arguments}\n")
    result = translate(script)
    expected = [settings] if '"' in settings else settings.split()
    assert not set(expected) - set(result.overrides)
    assert not kind or any(reason in why for why in result.missing[kind])
    compose_program(translation._PROGRAMS["train"], result.overrides)


def test_verl_limits_turns_only_without_multi_turn(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.multi_turn.enable=true")
    assert "rollout.max_assistant_turns" not in translate(script).settings


def test_options_of_a_train_py_that_is_not_of_slime_are_not_read_as_its(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python train.py --lr 1 --some-thing 2 --other-thing 3")
    with pytest.raises(ConfigError, match="its options are of none of"):
        translate(script)


@pytest.mark.parametrize(
    ("option", "file", "setting"),
    [
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "mine.py:Loss", "algo.loss"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "tools.yaml", "rollout.tools"),
    ],
)
def test_code_that_a_script_names_is_not_run(
    option: str, file: str, setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark, script = tmp_path / "mark", tmp_path / "run.sh"
    (tmp_path / "mine.py").write_text(f"open({str(mark)!r}, 'w')\n")
    (tmp_path / "tools.yaml").write_text(f"tools: [{{class_name: {tmp_path / 'mine.py'}:Tool, config: {{}}}}]\n")
    script.write_text(f"python3 -m verl.trainer.main_ppo {option}={tmp_path / file} algorithm.adv_estimator=rloo\n")
    assert run("doctor", ["--from", str(script)]) == 0
    assert f"\nNot checked: {setting} may name code" in capsys.readouterr().out
    assert not mark.exists()


def _bomb(entry: str) -> list[str]:
    """Lines of YAML of which each has the one before twice."""
    return [f"a{number}: &a{number} {entry.format(f'a{number - 1}')}\n" for number in range(1, 40)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.sh", None, "must be a file of at most 262144 bytes"),
        ("folder.sh", "", "is a folder"),
        ("long.sh", "#" * (1 << 18) + "#", "must be a file of at most 262144 bytes"),
        ("other.sh", "python3 -m other.trainer --some 1 --thing 2", "its options are of none of verl, slime, TRL"),
        ("empty.sh", "", "its options are of none of verl, slime, TRL"),
        ("other.yaml", "a: [1", "cannot be read as YAML (while parsing"),
        ("list.yaml", "- 1", "has no options"),
        ("many.yaml", "\n".join(f"k{number}: 1" for number in range(10_001)), "has more than 10000 options"),
        ("nested.yaml", "[" * 10_000, "cannot be read as YAML (nests lists and objects more than 100 deep)"),
        (
            "bomb.yaml",
            "a0: &a0 [{x: 1}]\n" + "".join(_bomb("[{{x: *{0}}}, {{y: *{0}}}]")),
            "more than 100 deep, or holds 1048576 of them",
        ),
        (
            "maps.yaml",
            "a0: &a0 {}\n" + "".join(_bomb("{{x: *{0}, y: *{0}}}")),
            "more than 100 deep, or holds 1048576 of them",
        ),
        ("cycle.yaml", "a: &a [{}, *a]", "nests lists and objects more than 100 deep"),
        ("read.sh", "read <<", "its options are of none of"),
        ("lists.yaml", "a0: &a0 [x]\n" + "".join(_bomb("[*{0}, *{0}]")), "or holds 1048576 of them"),
        ("commands.sh", "a;" * 20_000, "has more than 10000 commands"),
        ("words.sh", "A=(xxxxxxxx)\n" + 'A+=("${A[@]}" "${A[@]}")\n' * 40, "its variables become more than"),
        ("bomb.sh", "A=" + "x" * 1000 + "\n" + "A=$A$A\n" * 40 + "echo $A", "its options are of none of"),
    ],
)
def test_a_file_that_cannot_be_translated_ends_in_one_line(
    name: str, text: str | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if name == "folder.sh":
        file.mkdir()
        message = "must be a file of"
    elif text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        translate(file)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    script = tmp_path / "run.sh"
    lines = [f"A=$(touch {mark})", f"B=`touch {mark}`", f"touch {mark}", f"C=$(($(touch {mark}) + 1))"]
    script.write_text("\n".join([*lines, "python3 -m verl.trainer.main_ppo data.train_files=$A data.val_files=$B$C"]))
    result = translate(script)
    assert not mark.exists()
    assert {"data.train_files", "data.val_files"} <= {name for names in result.missing[NO].values() for name in names}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("a b  'c d' \"e $X\"", ["a", "b", "c d", f"e {UNKNOWN}"]),
        ("X=1; a $X ${X} \"$X\" '$X' \\$X ${Y:-2} ${Y:=$X} ${X:+3}", ["a", "1", "1", "1", "$X", "$X", "2", "1", "3"]),
        ("export X=1\nlocal Y=${X}0 && a $X$Y", ["a", "110"]),
        ("X=1\nX+=2\na $X", ["a", "12"]),
        ("a \\\n  b # c\\\n", ["a", "b"]),
        ("# a\n\n  b c#d", ["b", "c#d"]),
        ("X=(--a 1 # no\n '--b c'\n)\nX+=(-2)\na ${X[@]} \"${X[@]}\"", ["a", *(["--a", "1", "--b c", "-2"] * 2)]),
        ("a ${NONE[@]} ${NONE} $NONE", ["a", UNKNOWN, UNKNOWN]),
        ("X='b c'\na $X \"$X\"", ["a", "b", "c", "b c"]),
        (
            "X=3\na $((X * 2)) $((1024*(X+1))) $(( ${X} - 5 )) $((9**9)) $((1/0))",
            ["a", "6", "4096", "-2", *[UNKNOWN] * 2],
        ),
        ("X=$((1 + 2)); Y=$((X * X)); a $Y", ["a", "9"]),
        ('a $(b "$(c)" | d) `e`', ["a", UNKNOWN, UNKNOWN]),
        ("read -r -d '' X <<EOF\nb \\\n --c $Y\nEOF\na $X", ["a", "b", "--c", UNKNOWN]),
        ("cat <<'EOF' > file\n text $X\nEOF\na b", ["a", "b"]),
        ('a --b 1 2>&1 --c 2> d >>e &>> "f g" <h >| i', ["a", "--b", "1", "--c"]),
        ("a b>c '>' d\\>e 12>f >&- > >(tee g) 'h'>i", ["a", "b", ">", "d>e", "h"]),
        ("a <(b c) '<(b)' &> d", ["a", UNKNOWN, "<(b)"]),
        ("X='b > c'\na $X", ["a", "b", ">", "c"]),
        ("read A B <<< 'x y'\na b", ["a", "b"]),
        ("a ${X:-$(b) c $(d)}", ["a", UNKNOWN]),
        ('if [ -z "$X" ]; then\n X=1\nelse X=2; fi\na $X', ["a", "2"]),
        ('a "b\'c" \'d"e\' "f \\"g\\" \\\\"', ["a", "b'c", 'd"e', 'f "g" \\']),
        ("a $HOME/b $@", ["a", "~/b"]),
        ("A='$((A))'; B=$((B + 1)); a $A $B", ["a", UNKNOWN, UNKNOWN]),
        ("X='$(touch y)' ; a $X \"unclosed", ["a", UNKNOWN, "unclosed"]),
    ],
)
def test_words_of_a_script(script: str, words: list[str]) -> None:
    assert commands(script)[-1] == words


@pytest.mark.parametrize(
    "text", ["(" * 5000, "${" * 5000, "$((" * 5000, "'", '"', "\\", "<<", "a <<EOF", "$", "((1+" * 2000]
)
def test_broken_scripts_are_read_to_their_end(text: str) -> None:
    assert isinstance(commands(text), list)
    assert isinstance(commands(os.linesep.join([text, text])), list)


def test_long_runs_of_blanks_and_openings_are_read_at_once() -> None:
    """Minutes each, if the time grows with the square of the length."""
    assert commands("cat <<EOF\n" + "\n" * 250_000)[0][:2] == ["cat", "<<"]
    assert commands("a ${" + "$(" * 120_000 + "}") == [["a", UNKNOWN]]
