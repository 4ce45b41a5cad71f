"""What comes before an evaluation without training: which settings it has, and what is refused in one line."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_collab import evaluate
from megatron_collab.config import Config, EvaluateConfig, compose
from megatron_collab.inference import server
from megatron_collab.launch import evaluation, inherited, server_specs, servers
from megatron_collab.launch.spec import building_spec
from megatron_collab.runtime import device
from megatron_collab.settings import ConfigError
from megatron_collab.synthesis import settings
from tests.helpers import make_model

METRIC = "reward.weights={token_amount: 1}"

GOAL = json.dumps({"question": "q", "facts": ["f"]})  # as the user reveal reads it


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}], "goal": GOAL, "user": "reveal"}) + "\n")
    return file


def overrides(tmp_path: Path, tasks: Path, *more: str) -> list[str]:
    return [f"run.dir={tmp_path}/out", f"data.eval={tasks}", METRIC, *more]


def prepared(arguments: list[str]) -> object:
    """As one start of the program, which then ends."""
    with ExitStack() as stack:
        return evaluate.prepared_evaluation(arguments, stack)


def refused(arguments: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        prepared(arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_settings_of_training_are_left_out() -> None:
    """An experiment of eight ranks: the servers are what it says, and no rank takes a device from them."""
    config = evaluation.load(["experiment=train_8b", "data.eval=e.jsonl", "algo=dapo", "train.steps=3"])
    assert {"parallel", "algo", "optim", "publish", "build"}.isdisjoint(asdict(config)), "neither reset nor unused"
    placement = server_specs.evaluation(config).policy.placement
    assert placement.replicas == 8 and not placement.colocated
    assert config.reward.weights["accuracy"] == 1.0 and config.user.model == "openai/gpt-4o-mini"


@pytest.mark.processes
def test_servers_have_all_devices(tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model")
    options = ["rollout.server.replicas=2", "rollout.server.tp=2", "rollout.context_length=512"]
    budgets = [f"rollout.{part}.max_new_tokens=64" for part in ("turn", "future")]
    config = evaluation.load(overrides(tmp_path, tasks, f"model.path={model}", "launch.device=cpu", *options, *budgets))
    serving, _, step = evaluation.prepared(config)
    assert (step, serving.model.path) == (0, str(model))
    serving.launch.device = "cuda"
    monkeypatch.setattr(device, "probe", lambda name: SimpleNamespace(available=True, detail=""))
    monkeypatch.setattr(device, "count", lambda: 4)
    spec = server_specs.evaluation(serving)
    servers.check_gpus(serving, spec)
    server_arguments = [server.arguments(spec.policy, "http://127.0.0.1:1", index) for index in range(2)]
    assert [row[row.index("--base-gpu-id") + 1] for row in server_arguments] == ["0", "2"]
    assert "--enable-memory-saver" not in server_arguments[0]
    monkeypatch.setattr(device, "count", lambda: 3)
    with pytest.raises(ConfigError, match="needs more than the 3 GPUs of this node; lower one"):
        servers.check_gpus(serving, spec)


@pytest.mark.processes
def test_a_judge_of_the_runs_own_needs_gpus_whoever_is_evaluated(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = evaluation.load(overrides(tmp_path, tasks, "assistant.model=openai/m", "launch.device=cpu"))
    judge = make_model(tmp_path / "judge")
    config.launch.device, config.servers = "cuda", {"judge": {"model": str(judge), "tp": 4}}
    monkeypatch.setattr(device, "probe", lambda name: SimpleNamespace(available=True, detail=""))
    monkeypatch.setattr(device, "count", lambda: 4)
    evaluation.prepared(config)
    monkeypatch.setattr(device, "count", lambda: 3)
    with pytest.raises(ConfigError, match=r"servers.judge.replicas x tp: .* need 4 GPUs of a node, which has 3"):
        evaluation.prepared(config)


@pytest.mark.processes
def test_an_assistant_behind_litellm_needs_no_model_and_no_server(tmp_path: Path, tasks: Path) -> None:
    sets = f"data.eval=[{{source: {tasks}, max_new_tokens: 900, max_assistant_turns: 4}}]"
    arguments = overrides(tmp_path, tasks, sets, "assistant.model=openai/m", "assistant.max_tokens=300")
    config = evaluation.load([*arguments, "rollout.context_length=256"])
    serving, spec, _ = evaluation.prepared(config)
    assert spec.serving and spec.serving.policy.placement.replicas == 0
    assert (serving.rollout.turn.max_new_tokens, serving.rollout.future.temperature) == (300, 1.0)
    assert serving.rollout.context_length > 4 * 900, "the model has a limit of its own"
    no_temperature = evaluation.load([*arguments, "assistant.temperature=null", "assistant.model=openai/gpt-5"])
    evaluation.prepared(no_temperature)
    assert no_temperature.rollout.turn.temperature == 1.0 and no_temperature.assistant.temperature is None
    budget = ["assistant.max_tokens=null", "assistant.extra={max_completion_tokens: 70}"]
    assert evaluation.load([*arguments, *budget]).rollout.turn.max_new_tokens == 70
    greedy = evaluation.load([*arguments, "assistant.temperature=0"])
    assert greedy.rollout.turn.temperature == greedy.rollout.future.temperature == 0.0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["data.eval=null"], "data.eval: not set; give the tasks to evaluate"),
        (["assistant.model=null"], "model.path: not set; give model.path=VALUE, or assistant.model=MODEL"),
        (["train.stage=sft"], "train.stage=sft: conversations are played, as in train.stage=rl; remove it"),
        (["build.candidates=2"], "build.candidates: is only for `megatron-collab build-dataset`; remove it"),
        (["train.eval_tasks=0"], "train.eval_tasks=0: nothing is evaluated"),
        (["data.eval=nothing.jsonl"], "data.eval=nothing.jsonl: no such file"),
        (["rollout.tools=[calculator]"], "assistant.model=openai/m: cannot call tools yet; remove rollout.tools"),
        (
            ["rollout.mcp_servers={m: {command: cat}}"],
            "assistant.model=openai/m: cannot call tools yet; remove",
        ),
        (
            ["reward.weights.information_gain=1"],
            "assistant.model=openai/m: gives no log-probs of an answer, which reward.weights.information_gain reads;",
        ),
        (["user.name=llm", "user.model=policy"], "user.model=policy: is not served if assistant.model is set"),
        (["user.name=llm/policy"], "user=llm/policy: the model=policy: is not served if assistant.model is set"),
        (["users={a: {model: policy}}"], "users.a.model=policy: is not served if assistant.model is set"),
        (["assistant.model=policy"], "assistant.model=policy: to evaluate the policy, set model.path and remove this"),
        (["assistant.model=openai/gpt-5", "assistant.temperature=0"], "; set assistant.temperature=null to leave"),
        (
            ["assistant.temperature=null", "data.eval=[{source: tasks.jsonl, name: a, temperature: 0.5}]"],
            "data.eval[a]: temperature=0.5, but assistant.temperature=null sends none; remove one",
        ),
        (["assistant.max_tokens=null"], "assistant.max_tokens=null: answers need a budget; set assistant.extra.max_c"),
        (
            ["assistant.model=openai/gpt-5", "data.eval=[{source: tasks.jsonl, name: a, temperature: 0.5}]"],
            "data.eval[a].temperature=0.5: openai/gpt-5 does not accept it",
        ),
        (["users={a: {model: m, personas: none.txt}}"], "users.a.personas=none.txt: no such file"),
        (["user.prompt=none.j2"], "user.prompt={}/none.j2: no such file"),
        (["reward.weights.token_amount=0"], "no metric has a weight"),
    ],
)
def test_what_cannot_be_evaluated(
    tmp_path: Path, tasks: Path, more: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message.format(tmp_path) in refused(overrides(tmp_path, tasks, "assistant.model=openai/m", *more))


@pytest.mark.seconds
def test_models_that_are_not_there(tmp_path: Path, tasks: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step_10").mkdir(parents=True)
    assert f"model.path={run}@35: no checkpoint of that step" in refused(
        overrides(tmp_path, tasks, f"model.path={run}@35")
    )
    assert "no config.json, which names its initial model" in refused(overrides(tmp_path, tasks, f"model.path={run}"))
    trained = Config()
    trained.run.dir, trained.model.path, trained.data.train = str(run), str(tmp_path / "gone"), "t"
    (run / "config.json").write_text(json.dumps(asdict(trained)))
    assert "gone, which no longer exists" in refused(overrides(tmp_path, tasks, f"model.path={run}@10"))
    for name in (f"{tmp_path}/nothing", f"{tmp_path}/nothing@3"):  # @3 may also be a revision of a model
        assert f"model.path={name}: no config.json there" in refused(overrides(tmp_path, tasks, f"model.path={name}"))


@pytest.mark.seconds
def test_an_evaluation_goes_on_with_the_checkpoint_that_it_found(tmp_path: Path, tasks: Path) -> None:
    run = tmp_path / "run"
    for step in (10, 20):
        (run / "checkpoints" / f"step_{step}").mkdir(parents=True)

    def pinned(name: str, out: str = "out") -> str:
        config = evaluation.load([*overrides(tmp_path, tasks, f"model.path={name}"), f"run.dir={tmp_path}/{out}"])
        return evaluation.pinned(config, "a.module")[0].model.path

    assert pinned(f"{run}") == pinned(f"{run}/checkpoints") == f"{run}@20"
    assert pinned(f"{run}@10") == f"{run}@10" and pinned(f"{run}/checkpoints/step_10").endswith("/step_10")
    (run / "best.json").write_text(json.dumps({"step": 10}))
    assert pinned(f"{run}@best") == f"{run}@10"
    (run / "best.json").write_text(json.dumps({"step": 30}))
    (run / "checkpoints" / "step_30").mkdir()
    assert (pinned(f"{run}"), pinned(f"{run}@best")) == (f"{run}@20", f"{run}@10"), "the run has trained on"
    assert pinned(f"{run}@best", "other") == pinned(f"{run}", "other") == f"{run}@30"
    other = tmp_path / "me@host" / "run"
    (other / "checkpoints" / "step_7").mkdir(parents=True)
    assert (pinned(f"{other}", "mine"), pinned(f"{other}@7", "mine")) == (f"{other}@7", f"{other}@7")
    assert pinned(str(other.parent), "folder") == str(other.parent), "a model, whose folder has an @"


@pytest.mark.seconds
def test_a_world_is_made_before_its_tasks_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a folder in the world may have are no names of the Hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    config = evaluation.load(["experiment=booking", "run.dir=out", "data.dir=world", "assistant.model=openai/m"])
    config, _ = evaluation.pinned(config, "a.module")
    assert config.data.eval == "world/eval.jsonl" and not Path("out").exists()
    assert "data.eval=world/evil.jsonl: no such file" in refused(
        [
            "experiment=booking",
            "run.dir=out",
            "data.dir=world",
            "assistant.model=openai/m",
            "data.eval=world/evil.jsonl",
        ]
    )


def test_the_folder_of_a_run_that_trains_is_not_written_to(tmp_path: Path, tasks: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").touch()
    message = refused(overrides(tmp_path, tasks, "assistant.model=openai/m"))
    assert message.endswith("contains a training run; give the evaluation another run.dir")


def test_another_model_is_another_evaluation(tmp_path: Path, tasks: Path) -> None:
    config = evaluation.load(overrides(tmp_path, tasks, "assistant.model=openai/m"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(json.dumps(asdict(config)))
    message = refused(overrides(tmp_path, tasks, "assistant.model=openai/n"))
    assert "holds a run with assistant.model=openai/m, not openai/n; choose another run.dir" in message


@pytest.mark.processes
def test_a_set_that_is_recorded_keeps_its_settings(tmp_path: Path, tasks: Path) -> None:
    """Others may be added: the command goes on with them."""

    def sets(*entries: str) -> list[str]:
        return overrides(tmp_path, tasks, "assistant.model=openai/m", f"data.eval=[{', '.join(entries)}]")

    first, second = (f"{{source: {tasks}, name: {name}}}" for name in ("a", "b"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(json.dumps(asdict(evaluation.load(sets(first)))))
    (tmp_path / "out" / "evaluations.json").write_text(json.dumps({"a/model": {"step": 0, "set": "a"}}))
    (tmp_path / "out" / "result.json").write_text("{}")
    assert "all evaluations of" in str(prepared(sets(first)))
    assert not isinstance(prepared(sets(first, second)), str)
    changed = f"{{source: {tasks}, name: a, temperature: 0}}"
    assert "data.eval[a]: run.dir=" in refused(sets(changed)) and "rename the set" in refused(sets(changed))


def ran(folder: Path, *settings: str, stage: str = "rl") -> Path:
    """The folder of a run with these settings and two checkpoints."""
    for step in (10, 20):
        (folder / "checkpoints" / f"step_{step}").mkdir(parents=True)
    of_run = [f"run.dir={folder}", "model.path=m", "data.train=t.jsonl", f"train.stage={stage}", *settings]
    (folder / "config.json").write_text(json.dumps(asdict(compose(of_run))))
    return folder


def inherited_config(run: Path, *arguments: str) -> EvaluateConfig:
    """What an evaluation of the run's checkpoint is played under."""
    command_line = [f"model.path={run}@10", "run.dir=out", *arguments]
    with inherited.settings(command_line) as defaults:
        return evaluation.load(command_line, defaults)


CONVERSATIONS = (
    "model.chat_template_args={enable_thinking: false}",
    "rollout.tools=[calculator]",
    "rollout.turn.max_new_tokens=300",
    "rollout.max_user_turns=4",
    "users={a: {model: openai/a, personas: people.txt}, b: {model: openai/b, weight: 2}}",
    "user.model=openai/u",
    "user.api_base=http://127.0.0.1:1/v1",
    "user.stop=BYE",
    "reward.weights={accuracy: 1, token_amount: -0.01}",
    "reward.metrics.accuracy.judge=true",
    "reward.clamp.token_amount=0.5",
    "reward.judge.model=openai/j",
    "data.eval=held_out.jsonl",
    "train.eval_tasks=7",
)
TRAINING = ("train.steps=3", "optim.lr=0.5", "llm.budget_usd=5", "rollout.futures=6", "reward.workers=9", "run.seed=8")


@pytest.fixture
def people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that CONVERSATIONS name, in the current folder."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "people.txt"
    file.write_text("A nurse.\n")
    return file


@pytest.mark.seconds
def test_a_checkpoint_is_evaluated_in_the_conversations_of_its_run(
    tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ran(tmp_path / "run", *CONVERSATIONS, *TRAINING)
    config, trained = inherited_config(run), compose([f"run.dir={run}", "model.path=m", "data.train=t", *CONVERSATIONS])
    for part in ("user", "users"):
        assert getattr(config, part) == getattr(trained, part), part
    for spec in fields(config.reward):
        assert getattr(config.reward, spec.name) == getattr(trained.reward, spec.name), spec.name
    for part in ("turn", "future", "tools", "max_user_turns", "futures"):
        assert getattr(config.rollout, part) == getattr(trained.rollout, part), part
    assert config.model.chat_template_args == {"enable_thinking": False}
    assert (config.data.eval, config.train.eval_tasks) == ("held_out.jsonl", 7)
    assert (config.llm.budget_usd, config.run.seed) == (None, 0), "of training"
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"settings from {run}/config.json, unless overridden: model.chat_template_args, ")
    assert "reward.weights" in line and "futures" not in line and "llm" not in line


@pytest.mark.seconds
def test_what_is_given_is_not_taken_from_the_run(
    tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ran(tmp_path / "run", *CONVERSATIONS)
    config = inherited_config(
        run, "rollout.tools=[]", "rollout.max_user_turns=1", "reward.weights.asks=0", "data.eval=other.jsonl"
    )
    assert (config.rollout.tools, config.rollout.max_user_turns) == ([], 1)
    assert config.reward.weights == {"accuracy": 1.0, "token_amount": -0.01, "asks": 0.0}, "as of an experiment"
    assert (config.data.eval, config.train.eval_tasks) == ("other.jsonl", 256), "how many is said of the run's own"
    other = inherited_config(run, "user.model=openai/v", "reward=paper")
    assert (other.user.model, other.user.api_base, other.user.stop) == ("openai/v", None, "BYE"), "of another endpoint"
    assert other.reward.weights.keys() == {"accuracy", "interactivity", "token_amount"}, "two rewards are never mixed"
    assert other.reward.clamp == {} and other.reward.judge.model == "openai/j"
    whole = inherited_config(run, "experiment=booking", "data.eval=e.jsonl", "rollout.turn.temperature=0.5")
    assert whole.reward.weights.keys() == compose(["experiment=booking"]).reward.weights.keys()
    assert (whole.rollout.turn.max_new_tokens, whole.rollout.turn.temperature) == (24, 0.5)
    capsys.readouterr()
    command_line = ["model.path=m", "run.dir=out", f"run.fork={run}"]
    with inherited.settings(command_line) as defaults:  # a Hugging Face folder has no run
        assert defaults == {} and capsys.readouterr().out == ""


@pytest.mark.processes
def test_of_a_supervised_run_the_prompt_is_taken_and_its_conversations_are_no_tasks(tmp_path: Path) -> None:
    (tmp_path / "system.j2").write_text("Be kind.")
    supervised = (f"rollout.system_prompt={tmp_path}/system.j2", "data.eval=talk.jsonl", "train.eval_tasks=9")
    run = ran(tmp_path / "run", *supervised, stage="sft")
    config = inherited_config(run, "data.eval=tasks.jsonl", "reward.weights.asks=1")
    assert config.rollout.system_prompt == f"{tmp_path}/system.j2" and config.train.eval_tasks == 256
    with pytest.raises(ConfigError, match=r"data\.eval: not set; give the tasks"):
        inherited_config(run, "reward.weights.asks=1")


@pytest.mark.seconds
def test_what_of_a_run_is_gone_is_said_with_where_it_is_from(tmp_path: Path, tasks: Path, people: Path) -> None:
    model = make_model(tmp_path / "model")
    users = "users={a: {class: llm, model: openai/a, personas: people.txt}}"
    short = [f"rollout.{part}.max_new_tokens=64" for part in ("turn", "future")]
    of_run = (f"model.path={model}", METRIC, users, "rollout.context_length=256", *short)
    run = ran(tmp_path / "run", "data.eval=held_out.jsonl", *of_run)
    command_line = ["run.dir=out", f"model.path={run}@10", "launch.device=cpu"]
    origin = f"is from {run}/config.json; set it to override)"
    assert refused(command_line) == f"data.eval=held_out.jsonl: no such file (data.eval {origin}"
    people.unlink()
    gone = refused([*command_line, f"data.eval={tasks}"])
    assert "personas=people.txt: no such file" in gone and gone.endswith(f"(users.a.personas {origin}")
    (run / "config.json").write_text("{}")
    assert refused(command_line).endswith("config.json contains no run settings; restore it")


BUILDS = ("rollout.max_messages=6", "assistant.max_tokens=50")


@pytest.mark.processes
def test_conversations_are_built_by_several_assistants(tmp_path: Path, tasks: Path) -> None:
    """Without the policy there is neither a model nor a server of it."""
    two = "build.assistants={a: {model: openai/gpt-4o-mini, temperature: 0.2}, b: openai/gpt-4o-mini}"
    config = settings.load(overrides(tmp_path, tasks, two, *BUILDS))
    _, spec, _ = evaluation.prepared(config, building_spec)
    assert spec.serving and spec.serving.policy.placement.replicas == 0 and config.assistant.temperature == 0.2
    assert [(entry.setting, entry.endpoint.temperature) for entry in spec.assistants] == [
        ("build.assistants.a.model", 0.2),
        ("build.assistants.b.model", 1.0),
    ]
    model = make_model(tmp_path / "model")
    both = [f"model.path={model}", "build.assistants={ours: policy, other: openai/m}", "rollout.context_length=256"]
    budgets = [f"rollout.{part}.max_new_tokens=64" for part in ("turn", "future")]
    config = settings.load(overrides(tmp_path, tasks, *both, *budgets, *BUILDS))
    assert config.assistant.model is None and config.rollout.turn.max_new_tokens == 64
    _, spec, _ = evaluation.prepared(config, building_spec)
    assert spec.serving and spec.serving.policy.placement.replicas == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["build.assistants={a: openai/m}", "assistant.model=openai/n"],
            "not used with build.assistants; add it",
        ),
        (
            ["build.assistants={a: openai/m}", "rollout.tools=[calculator]"],
            "build.assistants.a.model=openai/m: cannot call tools yet",
        ),
        (
            ["build.assistants={a: openai/m}", "reward.weights.information_gain=1"],
            "build.assistants.a.model=openai/m: gives no log-probs of an answer, which reward.weights.information_gain",
        ),
        (["build.assistants={a: served/none}"], "build.assistants.a.model=served/none: servers has no none"),
        (
            ["build.assistants={a: {model: openai/m, extra: {seed_token: x}}}"],
            "build.assistants.a.extra.seed_token",
        ),
        (
            ["build.assistants={a: openai/m}", "llm.budget_usd=3"],
            "the price of build.assistants.a.model=openai/m",
        ),
        (
            ["assistant.model=openai/m", "build.push_to_hub=chats"],
            "build.push_to_hub=chats: has no owner",
        ),
        (
            ["assistant.model=openai/m", "data.eval=[{source: t.jsonl, samples: 2}]"],
            "data.eval[t].samples: conv",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_in_a_line(tmp_path: Path, tasks: Path, more: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings.load(overrides(tmp_path, tasks, *BUILDS, *more))
    assert message in str(error.value) and "\n" not in str(error.value)
