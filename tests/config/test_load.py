from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_collab.config import CONF, Config, compose, groups, settings
from megatron_collab.launch.validate import load
from megatron_collab.settings import AlgoConfig, ConfigError
from megatron_collab.settings.schema import DpoConfig, TeacherConfig
from tests.helpers import refused


def test_settings_of_a_metric_and_of_the_two_budgets() -> None:
    config = load(["experiment=gsm8k", "reward.metrics.accuracy.judge=false", "rollout.future.max_new_tokens=7"])
    assert config.reward.metrics == {"accuracy": {"judge": False}}
    assert (config.rollout.turn.max_new_tokens, config.rollout.future.max_new_tokens) == (32, 7)


@pytest.mark.parametrize(
    ("mode", "tokens", "count", "rubric"),
    [
        ("paper", -5e-4, "seen", "holistic"),
        ("collabllm", -0.5, "cl100k", "holistic"),
        ("verl", -1e-4, "words", "parts"),
    ],
)
def test_a_published_reward_is_one_word(mode: str, tokens: float, count: str, rubric: str) -> None:
    reward = load(["experiment=gsm8k", f"reward={mode}", "reward.judge.model=openai/judge"]).reward
    assert reward.mode == mode
    assert reward.weights == {"accuracy": 1.0, "interactivity": 1.0, "token_amount": tokens, "asks": 0.0}
    assert (reward.metrics["token_amount"], reward.metrics["interactivity"]) == ({"count": count}, {"rubric": rubric})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward=verl"], "reward.weights.accuracy: needs a judge; set reward.judge.model"),
        (
            ["rollout.futures=some"],
            "rollout.futures=some: must be a whole number",
        ),
        (["reward.turn_credit=first"], "reward.turn_credit=first: choose one of last, equal, immediate, reward_to_go"),
        (["rollout.context_length=24"], "rollout.turn.max_new_tokens=32: leaves no room for a prompt in"),
        (["rollout.turn.top_k=0"], "rollout.turn.top_k=0: samples from no token; set -1 for all"),
        (["algo.mini_batches=17"], "algo.mini_batches=17: a step has at most 16 samples"),
        (
            ["rollout.server.port=65535", "rollout.server.replicas=2"],
            "servers would have port 65536; lower it",
        ),
        (["rollout.train_turns=all"], "rollout.train_turns=all: compares sibling futures; set rollout.futures to 2"),
        (
            ["rollout.train_turns=all", "rollout.futures=2", "rollout.future.temperature=0.5"],
            "rollout.future.temperature=0.5: rollout.train_turns=all trains these turns too",
        ),
        (["reward.weights.turn_rewards=1"], "with rollout.futures=0 these rewards are credited to their turns already"),
        (["rollout.tools=[oracle]"], "rollout.tools=oracle: no such name; known are calculator"),
        (["reward.metrics.bleu.level=token"], "reward.metrics.bleu: not in reward.weights"),
        (
            ["reward.metrics.accuracy.level=token"],
            "reward.metrics.accuracy.level: no such setting; there are judge, verify, unclear, model",
        ),
        (
            ["reward.weights.nice=1", "reward.metrics.nice.metric=kindness"],
            "reward.metrics.nice.metric=kindness: no such name",
        ),
        (["reward.mode=verl", "reward.clamp.accuracy=1"], "reward.clamp: reward.mode=verl does not clamp"),
        (["reward.clamp.bleu=1"], "reward.clamp.bleu: not in reward.weights"),
        (["rollout.system_prompt=none.j2"], "/none.j2: no such file"),
        (["reward.weights.bleu=1", "reward.metrics.bleu.prompt=none.j2"], "reward.metrics.bleu: prompt=/"),
        (["reward.judge.extra.n=2"], "reward.judge.extra.n: is not passed on; each call sets it itself"),
        (["user.personas=none.txt"], "user.personas=none.txt: no such file"),
        (
            ["llm.budget_usd=5", "user.model=openai/nobody-knows", "user.api_base=http://127.0.0.1:1/v1"],
            "llm.budget_usd=5: the price of user.model=openai/nobody-knows is unknown; set llm.prices=",
        ),
        (
            ["llm.prices={openai/m: [1]}"],
            "llm.prices.openai/m=[1]: give USD per million tokens of prompts and of answers",
        ),
        (["llm.prices={openai/m: [1, -1]}"], "llm.prices.openai/m=[1, -1]: give USD per million"),
        (["rollout.future.max_new_tokens=0"], "rollout.future.max_new_tokens=0: must be at least 1"),
    ],
)
def test_what_cannot_work_names_the_setting_and_the_way_out(overrides: list[str], message: str) -> None:
    assert message in refused(*overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "reward.judge.modl=x",
            "reward.judge.modl: no such option; the nearest is reward.judge.model; reward.judge has model, api_base, ",
        ),
        ("+reward.clampp.accuracy=1", "reward.clampp.accuracy: no such option; the nearest is reward.clamp ("),
        ("++lr=1e-6", "lr: no such option; slime's lr is optim.lr here ("),
        ("++warmup_step=1", "warmup_step: no such option; the nearest is optim.warmup_steps ("),
        ("optim={clipgrad: 1.0}", "optim.clipgrad: no such option; the nearest is optim.clip_grad; optim has lr, "),
        ("++optim.clipgrad=1.0", "optim.clipgrad: no such option; the nearest is optim.clip_grad; optim has lr, "),
        ("+experimnt=booking", "experimnt: no such option; the nearest is experiment ("),
        ("foo.bar=1", "foo.bar: no such option (all options: --help)"),
        ("+foo.bar=1", "foo.bar: no such option (all options: --help)"),
        ("+hydra.foo=1", "hydra.foo=1: Hydra's own settings are not used; remove it"),
        ("experiment@foo=gsm8k", "experiment@foo=gsm8k: Hydra's packages are not supported; give experiment=NAME"),
        ("~optim.lr", "~optim.lr: options cannot be removed; give another value"),
        ("train.steps=range(1,3)", "train.steps=range(1,3): sweeps are not supported; "),
        ("hydra/launcher=basic", "hydra/launcher=basic: Hydra's own settings are not used; remove it"),
        ("=3", "=3: give option=value"),
        ("optim=3", "optim=3: must be a group; give optim.NAME=VALUE ("),
        ("run.wandb_tags=abc", "run.wandb_tags=abc: must be a list in brackets, e.g. [a, b] ("),
        ("users={a: 3}", "users={a: 3}: must be settings in braces, e.g. {name: value} ("),
        ("parallel.offload=2", "parallel.offload=2: must be true or false"),
        ("train.steps=null", "train.steps=null: cannot be null ("),
        ("optim.lr=${nothing}", "optim.lr=${nothing}: ${nothing} refers to no option ("),
        ("optim.lr=1e-6,1e-5", "optim.lr=1e-6,1e-5: sweeps are not supported; "),
    ],
)
def test_an_unknown_option_is_refused_and_nothing_that_is_refused_is_recommended(override: str, message: str) -> None:
    refusal = refused(override)
    assert refusal.startswith(message)
    assert "+" not in refusal and "multirun" not in refusal


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_plus_says_nothing_where_the_option_is_there(plus: str) -> None:
    """Or may be added: the metrics of a reward."""
    overrides = ["reward=verl", "optim.lr=0.5", "rollout.futures=2", "reward.weights.bleu=0.5"]
    config = compose([plus + override for override in ("experiment=gsm8k", *overrides)])
    assert (config.reward.mode, config.optim.lr, config.rollout.futures) == ("verl", 0.5, 2)
    assert config.reward.weights["bleu"] == 0.5


def test_a_budget_is_held_where_prices_are_known() -> None:
    assert load(["experiment=gsm8k", "llm.budget_usd=5", "user.model=openai/gpt-4o-mini"]).llm.budget_usd == 5


def test_one_metric_stands_twice_under_other_names() -> None:
    config = load(
        ["experiment=gsm8k", "reward.weights.words=0", "+reward.metrics.words={metric: token_amount, count: words}"]
    )
    assert config.reward.metrics["words"] == {"metric": "token_amount", "count": "words"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", {"average": "sequence", "kl_coef": 0.04}),
        ("dr_grpo", {"advantage": "dr_grpo", "average": "constant", "kl_coef": 0.0}),
        ("gdpo", {"advantage": "gdpo", "average": "sequence", "kl_coef": 0.04}),
        ("rloo", {"advantage": "rloo", "kl_in": "reward", "kl": "k1"}),
        ("reinforce_pp", {"advantage": "reinforce++", "kl_in": "reward", "kl": "k1"}),
        ("dapo", {"clip_high": 0.28, "kl_coef": 0.0, "overlong": 0.2, "dynamic_sampling": 10, "mini_batches": 16}),
        ("gspo", {"loss": "gspo", "average": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "mini_batches": 4}),
        ("cispo", {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "kl_coef": 0.0, "mini_batches": 16}),
        ("ppo", {"advantage": "gae", "kl_in": "reward", "kl": "k1", "mini_batches": 4}),
        ("online_dpo", {"objective": "dpo", "kl_coef": 0.0}),
        ("best_of_n", {"objective": "sft", "kl_coef": 0.0}),
        (
            "refuel",
            {
                "objective": "dpo",
                "dpo": asdict(DpoConfig(loss="refuel", beta=1.0, refresh=1)),
                "kl_coef": 0.0,
                "mini_batches": 4,
            },
        ),
        ("distill", {"teacher": asdict(TeacherConfig(weight=0.5, context="answer")), "kl_coef": 0.0}),
    ],
)
def test_a_published_algorithm_is_one_word(name: str, expected: dict[str, object]) -> None:
    more = ["algo.teacher.context=answer"] if name == "distill" else []
    options = asdict(load(["experiment=gsm8k", f"algo={name}", *more]).algo)
    assert {option: value for option, value in options.items() if value != asdict(AlgoConfig())[option]} == expected


def test_every_algorithm_is_tested() -> None:
    (mark,) = test_a_published_algorithm_is_one_word.pytestmark
    assert sorted(name for name, _ in mark.args[1]) == groups()["algo"]


@pytest.mark.seconds
def test_every_value_says_where_it_is_from() -> None:
    overrides = ["experiment=booking", "algo=dapo", "reward=verl", "++algo.clip_high=0.5", "optim={lr: 1.0}"]
    options = {name: (value, source) for name, value, source in settings(overrides)}
    assert options["train.prompts_per_step"] == (16, "default")
    assert options["parallel.tp"] == (2, "conf/experiment/booking_world.yaml")
    assert options["data.train"] == ("runs/booking/world/train.jsonl", "conf/experiment/booking.yaml")
    assert options["algo.kl_coef"] == (0.0, "conf/algo/dapo.yaml"), "an algorithm wins over the experiment"
    assert options["reward.weights.token_amount"] == (-1e-4, "conf/reward/verl.yaml")
    assert options["reward.weights.booking_right"] == (1.0, "conf/experiment/booking.yaml")
    assert options["algo.clip_high"] == (0.5, "command line") and options["optim.lr"] == (1.0, "command line")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "experiment=bokking",
            "experiment=bokking: not in conf/experiment; the nearest is booking; there are booking,",
        ),
        ("reward=pper", "reward=pper: not in conf/reward; the nearest is paper; there are collabllm, paper, verl ("),
        ("algo=xyz", "algo=xyz: not in conf/algo; there are best_of_n, cispo,"),
        ("--hepl", "--hepl: no such argument; give --help, --cfg or option=value"),
        ("steps", "steps: give option=value"),
        ("user.stop=[[END", "user.stop=[[END: cannot be read; quote special characters: 'user.stop=\"[[END\"' ("),
        (
            "algo.loss=gpso",
            "algo.loss=gpso: choose one of ppo, gspo, cispo, package.module:Class; the nearest is gspo",
        ),
        (
            "rollout.tools=[calculater]",
            "rollout.tools=calculater: no such name; known are calculator, or package.module:Class; the nearest is",
        ),
        ("rollout.tool_parser=nonsense", "rollout.tool_parser=nonsense: choose one of "),
        ("reward.weights.acuracy=1", "reward.weights=acuracy: no such name; known are accuracy,"),
    ],
)
def test_what_is_mistyped_is_refused_with_what_is_near(override: str, message: str) -> None:
    assert refused(override).startswith(message)


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert compose(["experiment=gsm8k", "data.train=~/x.jsonl"]).data.train == "/home/somebody/x.jsonl"


@pytest.mark.parametrize("name", ["collabllm_math", "qwen3_0_6b", "train_70b", "train_8b"])
def test_experiments_for_gpus_never_fall_back_to_a_cpu(name: str) -> None:
    assert compose([f"experiment={name}"]).launch.device == "cuda"


def test_a_file_of_conf_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = shutil.copytree(CONF, tmp_path / "conf")
    monkeypatch.setattr("megatron_collab.config.load.CONF", conf)
    mine = conf / "experiment" / "mine.yaml"
    mine.write_text("# @package _global_\nrun: {seed: 3}\n")
    assert compose(["experiment=gsm8k"]).run.seed == 0
    mine.write_text("#" * (1 << 20) + "\n")
    message = r"^conf/experiment/mine\.yaml: must be a file of at most 1048576 bytes; shorten it, or remove it$"
    with pytest.raises(ConfigError, match=message):
        compose(["experiment=gsm8k"])
    mine.unlink()
    os.mkfifo(mine)
    with pytest.raises(ConfigError, match=message):
        settings(["experiment=gsm8k"])


@pytest.mark.processes
def test_what_is_composed_once_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with other settings, nor with other defaults, nor with another content of a file under conf/."""
    conf = shutil.copytree(CONF, tmp_path / "conf")
    monkeypatch.setattr("megatron_collab.config.load.CONF", conf)
    file, chosen = conf / "experiment" / "mine.yaml", ["experiment=mine", "run.dir=unused", "model.path=unused"]
    file.write_text("# @package _global_\ndata: {train: a}\nreward: {weights: {asks: 1}}\n")
    changed = compose([*chosen, "reward.weights.asks=2", "reward.weights.accuracy=3"])
    changed.reward.weights["asks"] = 4.0
    assert changed.reward.weights == {"asks": 4.0, "accuracy": 3.0}
    assert compose(chosen, {"optim.lr": 0.5}).optim.lr == 0.5
    whole = compose(chosen)
    assert whole.reward.weights == {"asks": 1.0} and whole.optim.lr == Config().optim.lr
    file.write_text("# @package _global_\ndata: {train: a}\nreward: {weights: {asks: 1}}\nrun: {seed: 3}\n")
    assert compose(chosen).run.seed == 3
    assert ("run.seed", 3, "conf/experiment/mine.yaml") in settings(chosen)


@pytest.mark.seconds
def test_of_two_options_that_say_the_same_the_last_one_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = ["run.dir=r", "model.path=m", "data.train=d"]
    train, server = compose([*base, "train.epochs=1.5", "rollout.server.memory_share=0.4"]), "rollout.server"
    assert (train.train.epochs, train.rollout.server.memory_share) == (1.5, 0.4)
    longer = compose(["experiment=gsm8k", "train={epochs: 2}", f"{server}.memory_share=0.4"])  # its file sets both
    assert longer.train.epochs == 2 and longer.train.steps == compose(base).train.steps
    assert longer.rollout.server.max_total_tokens is None
    by_file = tmp_path / "conf" / "experiment" / "mine.yaml"
    shutil.copytree(CONF, tmp_path / "conf")
    monkeypatch.setattr("megatron_collab.config.load.CONF", tmp_path / "conf")
    by_file.write_text("# @package _global_\ntrain: {epochs: 3}\n")
    assert compose([*base, "experiment=mine"]).train.epochs == 3
    shorter = compose([*base, "experiment=mine", "train.steps=7"]).train
    assert (shorter.steps, shorter.epochs) == (7, None)
    for both in (["train.steps=5", "train.epochs=2"], ["train={steps: 5, epochs: 2}"]):
        with pytest.raises(ConfigError, match=r"^train\.epochs=2\.0: train\.steps=5 sets the same; give one of them$"):
            compose([*base, *both])
    assert compose([*base, "train.epochs=2", "train.epochs=null", "train.steps=5"]).train.steps == 5
    recorded = compose(
        [], {"train.steps": 9, "train.epochs": 2.0, "run.dir": "r", "model.path": "m", "data.train": "d"}
    )
    assert (recorded.train.steps, recorded.train.epochs) == (9, 2)


def test_checkpoints_are_due_by_steps_or_never() -> None:
    train = Config().train
    train.checkpoint_every = 20
    assert [step for step in range(1, 61) if train.checkpoint_due(step)] == [20, 40, 60]
    train.checkpoint_every = 0  # the last step saves one anyway
    assert not any(map(train.checkpoint_due, range(1, 61)))
