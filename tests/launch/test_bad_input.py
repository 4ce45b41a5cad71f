"""Bad input costs nothing: one line that names the setting and the way out, exit code 2, no process."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_collab.config import compose
from megatron_collab.launch import machine, prepare, validate
from megatron_collab.observability import writers
from megatron_collab.runtime import device
from megatron_collab.runtime.process import EXIT_BAD_INPUT
from megatron_collab.train import main
from tests import helpers
from tests.helpers import byte_level_tokenizer, write_weights


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a process was about to be started")

    monkeypatch.setattr(prepare, "replace_by_torchrun", refuse)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, f"more than one line:\n{err}"
    return err


@pytest.fixture
def booking(tmp_path: Path) -> list[str]:
    """The supervised stage over a world in tmp_path: valid until something is changed."""
    return ["experiment=booking_sft", f"data.dir={tmp_path}/world", f"run.dir={tmp_path}/run"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    byte_level_tokenizer(300).save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen3",
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "num_hidden_layers": 3,
                "hidden_size": 64,
                "intermediate_size": 128,
                "vocab_size": 512,
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 8192,
            }
        )
    )
    write_weights(folder)
    return folder


def overrides(tmp_path: Path, model: Path, rows: list[dict], *more: str) -> list[str]:
    """A supervised run on a model and a file of the user's own."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"run.dir={tmp_path}/run", f"model.path={model}", f"data.train={data}", "train.stage=sft", *more]


ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def test_an_unknown_option(capsys: pytest.CaptureFixture[str], booking: list[str]) -> None:
    assert "lerning_rate" in refused(capsys, *booking, "optim.lerning_rate=1")


def test_an_unknown_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing_like_it" in refused(capsys, "experiment=nothing_like_it")


def test_a_value_of_the_wrong_type(capsys: pytest.CaptureFixture[str], booking: list[str]) -> None:
    line = refused(capsys, *booking, "train.steps=many")
    assert "train.steps=many: must be a whole number" in line


def test_a_value_that_cannot_be(capsys: pytest.CaptureFixture[str], booking: list[str]) -> None:
    assert "optim.lr=-1.0: must be above 0" in refused(capsys, *booking, "optim.lr=-1")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optim.beta1=1", "optim.beta1=1.0: must be at least 0 and below 1"),
        ("optim.beta2=-0.1", "optim.beta2=-0.1: must be at least 0 and below 1"),
        ("optim.warmup_steps=-1", "optim.warmup_steps=-1: must be at least 0"),
        ("train.keep_checkpoints=0", "train.keep_checkpoints=0: must be at least 1"),
    ],
)
def test_a_value_out_of_its_range(
    capsys: pytest.CaptureFixture[str], booking: list[str], setting: str, message: str
) -> None:
    assert message in refused(capsys, *booking, setting)


def test_more_servers_than_gpus(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where servers run, and on GPUs."""
    monkeypatch.setattr(device, "probe", lambda name: SimpleNamespace(available=True, detail=""))
    monkeypatch.setattr(device, "count", lambda: 3)
    servers = ["rollout.server.tp=2", "rollout.server.replicas=2", "rollout.server.max_total_tokens=8192"]
    settings = overrides(tmp_path, model, [ROW], *servers, "launch.device=cuda")
    rl = [*settings, "train.stage=rl", "reward.weights={token_amount: -1}"]
    line = refused(capsys, *rl)
    assert "rollout.server.replicas=2 x rollout.server.tp=2: needs more than the 3 GPUs of this node" in line
    for allowed in (settings, [*rl, "launch.device=cpu"], [*rl, "rollout.server.replicas=1"]):
        validate.validate(compose(allowed))


@pytest.mark.parametrize(
    "setting", ["launch.nproc_per_node=1024", "rollout.workers=10000", "rollout.server.replicas=10000"]
)
def test_more_processes_than_this_machine_could_hold(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Ray would start thousands of workers one after the other until the kernel ends them."""
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(total=64 << 30))
    rl = ["train.stage=rl", "reward.weights={token_amount: -1}", "launch.device=cpu"]
    line = refused(capsys, *overrides(tmp_path, model, [ROW], *rl, setting))
    assert f"{setting}: the processes of a node need " in line and "this machine has 64; lower it" in line


def test_a_required_option_that_is_not_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not set; give" in refused(capsys)


def test_a_layout_that_the_ranks_do_not_fill(capsys: pytest.CaptureFixture[str], booking: list[str]) -> None:
    line = refused(capsys, *booking, "parallel.tp=2", "parallel.pp=2")
    assert "launch.nproc_per_node=2" in line and "multiple of 4" in line


def test_a_layout_that_does_not_divide_the_heads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    line = refused(capsys, *overrides(tmp_path, model, [ROW], "parallel.tp=4", "launch.nproc_per_node=4"))
    assert "parallel.tp=4: does not divide the model's 2 key/value heads" in line


def test_more_stages_than_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    line = refused(capsys, *overrides(tmp_path, model, [ROW], "parallel.pp=4", "launch.nproc_per_node=4"))
    assert "parallel.pp=4: the model has only 3 layers" in line


def test_a_missing_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    arguments = [f"run.dir={tmp_path}/run", f"model.path={model}", f"data.train={tmp_path}/none.jsonl"]
    line = refused(capsys, *arguments, "reward.weights.token_amount=1")
    assert f"data.train={tmp_path}/none.jsonl: no such file" in line


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("[{source: rows.jsonl, wieght: 2}]", "data.train[0].wieght: no such setting; the nearest is weight"),
        ("[rows.jsonl]", "data.train=rows.jsonl: no such file"),
        ("data/rows.jsonl", "data.train=data/rows.jsonl: no such file"),
        ("[]", "data.train=[]: names no source"),
        ("some/data", "data.train=some/data: not in "),
    ],
)
def test_a_source_that_cannot_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, train: str, message: str
) -> None:
    arguments = [f"run.dir={tmp_path}/run", f"model.path={model}", "train.stage=sft", f"data.train={train}"]
    assert message in refused(capsys, *arguments)


def test_a_name_of_the_hub_that_cannot_be_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    line = refused(capsys, *overrides(tmp_path, Path("some/model"), [ROW]))
    assert "model.path=some/model: not in " in line and "HF_HUB_OFFLINE is set; unset it" in line
    assert not (tmp_path / "run").exists()


def test_a_missing_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    line = refused(capsys, *overrides(tmp_path, tmp_path / "none", [ROW]))
    assert f"model.path={tmp_path}/none: no config.json there; give the folder of a Hugging Face model, or " in line
    assert "OWNER/NAME of the Hub" in line


def test_a_model_of_an_unknown_family(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"model_type": "rwkv"}
    (model / "config.json").write_text(json.dumps(config))
    line = refused(capsys, *overrides(tmp_path, model, [ROW]))
    assert "unknown model family model_type='rwkv'" in line and "qwen3" in line


def test_a_model_with_an_unsupported_feature(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"use_sliding_window": True}
    (model / "config.json").write_text(json.dumps(config))
    line = refused(capsys, *overrides(tmp_path, model, [ROW]))
    assert "model.path" in line and "use_sliding_window" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: cannot be read as JSON"),
        ("[1]", "config.json: holds a list"),
        ('"hidden_size": "64"', "config.json: hidden_size='64' is not a whole number above 0"),
        ('"num_key_value_heads": 3', "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    ],
)
def test_a_broken_description_of_a_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, text: str, message: str
) -> None:
    file = model / "config.json"
    file.write_text(file.read_text()[:-1] + f", {text}}}" if text.startswith('"') else text)
    line = refused(capsys, *overrides(tmp_path, model, [ROW]))
    assert f"model.path={model}: " in line and message in line and "give another model" in line


@pytest.mark.processes
def test_a_dataset_row_without_a_prompt(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    task = {"id": "0", "prompt": [{"role": "user", "content": "hi"}], "goal": "g", "answer": "a", "user": "booking"}
    rows = [task, {key: value for key, value in task.items() if key != "prompt"} | {"id": "1"}]
    line = refused(capsys, *overrides(tmp_path, model, rows, "train.stage=rl", "reward.weights={token_amount: -1}"))
    assert "data.train" in line and "prompt" in line


@pytest.mark.processes
def test_a_task_that_nobody_plays(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "goal": "g", "user": "nobody"}]
    line = refused(capsys, *overrides(tmp_path, model, rows, "train.stage=rl", "reward.weights={token_amount: -1}"))
    known = "no such name; known are desk, feedback, llm, replay"
    assert f"data.train={tmp_path}/data.jsonl, task 0: user=nobody: {known}" in line
    played = tmp_path / "played.jsonl"
    played.write_text(json.dumps(rows[0] | {"user": "replay", "metadata": {"replay": ["so"]}}) + "\n")
    sets = f"data.eval=[{{source: {tmp_path}/data.jsonl, name: held}}]"
    more = ("train.stage=rl", "reward.weights={token_amount: -1}", sets, f"data.train={played}")
    line = refused(capsys, *overrides(tmp_path, model, rows), *more)
    assert f"data.eval[held]={tmp_path}/data.jsonl, task 0: user=nobody:" in line


def test_a_user_without_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "goal": "g"}]
    line = refused(capsys, *overrides(tmp_path, model, rows, "train.stage=rl", "reward.weights={token_amount: -1}"))
    assert "data.jsonl, task 0: user llm" in line and "user.model" in line


@pytest.mark.processes
def test_a_user_whose_model_takes_no_such_setting(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], "goal": "g", "user": user} for user in ("", "llm/openai/o3")
    ]
    settings = ["train.stage=rl", "reward.weights={token_amount: -1}", "user.model=openai/gpt-5"]
    line = refused(capsys, *overrides(tmp_path, model, rows, *settings, "user.top_p=0.5", "user.temperature=null"))
    assert "user.top_p=0.5: openai/gpt-5 does not accept it" in line and "set user.top_p=null" in line
    line = refused(capsys, *overrides(tmp_path, model, rows[1:], *settings, "user.temperature=0.5"))
    assert "user.temperature=0.5: openai/o3 does not accept it" in line


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("user.prompt=none.j2", "user.prompt={}/none.j2: no such file"),
        ("user.prompt=bad.j2", "user.prompt={}/bad.j2 line 1: no variable goals; there are goal, "),
        ("users={a: {model: m, prompt: bad.j2}}", "users.a.prompt={}/bad.j2 line 1: no variable goals"),
    ],
)
def test_a_prompt_that_is_none_is_refused_before_data_is_read(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.j2").write_text("{{ goals }}")
    settings = ["train.stage=rl", "reward.weights={token_amount: -1}", setting]
    assert message.format(tmp_path) in refused(capsys, *overrides(tmp_path, model, [{"nothing": "of use"}], *settings))


@pytest.mark.processes
def test_a_user_that_the_paused_servers_write_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "goal": "g", "user": "llm"}]
    settings = ["train.stage=rl", "reward.weights={token_amount: -1}", "user.model=policy", "launch.device=cpu"]
    settings += ["rollout.max_staleness=1", "algo.correction=truncated", "rollout.context_length=4096"]
    line = refused(capsys, *overrides(tmp_path, model, rows, *settings))
    assert "user.model=policy: rollout.max_staleness=1: its servers pause in the middle of its messages" in line


@pytest.mark.processes
def test_a_user_without_a_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "goal": "g"}]
    settings = ["train.stage=rl", "reward.weights={token_amount: -1}", "user.model=openai/gpt-4o-mini"]
    line = refused(capsys, *overrides(tmp_path, model, rows, *settings))
    assert "user.model=openai/gpt-4o-mini: OPENAI_API_KEY is not set; export it" in line


@pytest.mark.seconds
def test_a_metric_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "experiment=booking", "reward.weights.helpfulness=1")
    assert "reward.weights=helpfulness: no such name" in line and "interactivity" in line


PAIR = {"prompt": "hi", "chosen": "hello", "rejected": "no"}


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["reward.weights={accuracy: 1}"], "reward.weights.accuracy=1: data.train={}: none of its tasks has an answer"),
        (["reward.weights={accuracy: 0.5, asks: 1}"], "reward.weights.accuracy=0.5: data.train={}: none of its tasks"),
        (["reward.weights={pass_rate: 1}"], "reward.weights.pass_rate=1: data.train={}: none of its tasks has tests"),
        (
            ["reward.weights={bleu: 1, accuracy: 0}", "reward.metrics.bleu.extract=false"],
            "reward.weights.bleu=1: data.train={}: none of its tasks has an answer",
        ),
        (
            ["reward.weights={asks: 1, information_gain: 1}"],
            "reward.weights.information_gain=1: data.train={}: none of its tasks has an answer",
        ),
        (["reward.weights={asks: 1}", "user.name=feedback"], "data.train={}: none of its tasks has an answer, which"),
        (
            ["reward.weights={asks: 1}", "users={strict: {class: feedback}}"],
            "data.train={}: none of its tasks has an answer, which its user needs",
        ),
    ],
)
def test_a_metric_or_a_user_for_whom_no_task_is_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, settings: list[str], message: str
) -> None:
    user = [] if any("user" in setting for setting in settings) else ["user.model=policy"]
    line = refused(capsys, *overrides(tmp_path, model, [PAIR, PAIR], "train.stage=rl", *settings, *user))
    assert message.format(tmp_path / "data.jsonl") in line


def test_a_reward_of_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    line = refused(capsys, *overrides(tmp_path, model, [ROW], "train.stage=rl"))
    assert "reward.weights: no metric has a weight" in line


def test_a_wandb_key_without_wandb(
    capsys: pytest.CaptureFixture[str], booking: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "key")
    monkeypatch.setattr(writers, "find_spec", lambda name: None)
    line = refused(capsys, *booking)
    assert "run.writers=wandb: needs the package wandb; pip install wandb, or remove it from run.writers" in line


def test_fp8_without_transformer_engine(capsys: pytest.CaptureFixture[str], booking: list[str]) -> None:
    line = refused(capsys, *booking, "model.fp8=hybrid", "model.dtype=bfloat16")
    assert "model.fp8=hybrid: needs TransformerEngine" in line and "model.fp8=null" in line


@pytest.mark.processes
def test_a_busy_port(capsys: pytest.CaptureFixture[str], booking: list[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        line = refused(capsys, *booking, f"rollout.server.port={port}")
    assert f"rollout.server.port={port}: address already in use" in line


@pytest.mark.seconds
def test_a_folder_that_holds_another_run(
    capsys: pytest.CaptureFixture[str], booking: list[str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"optim": {"lr": 0.5}}))
    line = refused(capsys, *booking)
    assert "choose another run.dir" in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["data.eval=[{source: a.jsonl, sampels: 2}]"],
            "data.eval[0].sampels: no such setting; the nearest is samples",
        ),
        (["data.eval=[b/a.jsonl, b/a.jsonl]"], "data.eval: two sets are named a; rename one"),
        (["data.eval=[{source: a.jsonl, max_new_tokens: 5000}]"], "data.eval[a]: max_new_tokens=5000 leaves no room"),
        (
            ["train.keep_best=eval/acuracy"],
            "no such metric; the nearest is eval/accuracy; there are eval/reward, eval/",
        ),
        (["data.eval=[{source: a.jsonl, name: m}]", "train.keep_best=eval/accuracy"], "the nearest is eval/m/accuracy"),
        (["train.keep_best=-eval/token_amount", "train.eval_every=70"], "to a multiple of train.checkpoint_every=50"),
        (["train.stage=sft", "rollout.routing_replay=true"], "rollout.routing_replay=true: sft samples no tokens"),
        (
            ["train.stage=sft", "data.eval=[{source: a.jsonl, samples: 2}]"],
            "data.eval[a]: samples is for played",
        ),
    ],
)
def test_an_evaluation_that_cannot_be(settings: list[str], message: str) -> None:
    assert message in helpers.refused(*settings)
