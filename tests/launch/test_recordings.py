"""What is checked of recordings before a run starts, and what is not asked for where they answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_collab.commands.__main__ import run
from megatron_collab.config import compose
from megatron_collab.launch import endpoints, server_specs, validate
from megatron_collab.launch.play_specs import reward_spec
from megatron_collab.llm.recording import Call, CallKey, Shard, Usage
from megatron_collab.rollout import llm_endpoints
from megatron_collab.settings import ConfigError

REPLAYED = ["experiment=gsm8k", "user.name=llm", "user.model=served/gone", "servers={gone: {model: /no/such/model}}"]
REPLAYED += [
    "reward.metrics.accuracy.judge=true",
    "reward.judge.model=openai/judge",
    "user.headers.X-Way=os.environ/NONE",
]
REPLAYED += ["reward.weights.good=1", "reward.metrics.good={metric: reward_model, model: /no/such/folder}"]


def make_recording(folder: Path, name: str) -> Path:
    question = {"model": "m", "messages": []}
    Shard(folder, name).record(CallKey("a", 0, question), Call("a", 0, 1.0, question, {}, None, Usage()))
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["llm.replay_latency=1"], "llm.replay_latency=1.0: nothing is replayed; set llm.replay, or remove it"),
        (["llm.replay_missing=live"], "llm.replay_missing=live: nothing is replayed; set llm.replay, or remove it"),
        (["llm.replay_missing=no", "llm.replay=a"], "llm.replay_missing=no: choose one of error, live"),
        (["llm.replay_latency=-1", "llm.replay=a"], "llm.replay_latency=-1.0: must be at least 0 and at most 1000"),
        (
            ["llm.record=./a", "llm.replay=b/../a"],
            "llm.record=./a: is also llm.replay; choose",
        ),
    ],
)
def test_options_that_cannot_be_together_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate.check_settings(compose(["experiment=gsm8k", *settings]))
    assert str(error.value).startswith(message)


def test_folders_are_looked_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, foreign = (
        make_recording(tmp_path / "ours", f"{tmp_path}/run"),
        make_recording(tmp_path / "others", "/other/run"),
    )
    config = compose(["experiment=gsm8k", f"run.dir={tmp_path}/run", f"llm.record={ours}", f"llm.replay={foreign}"])
    endpoints.check_recordings(config.llm, tmp_path / "run")
    config.llm.record = str(tmp_path / "new")
    endpoints.check_recordings(config.llm, tmp_path / "run")
    config.llm.record = str(foreign)
    with pytest.raises(ConfigError, match=r"^llm\.record=.*others: holds calls of /other/run; choose another folder$"):
        endpoints.check_recordings(config.llm, tmp_path / "run")
    (next(foreign.iterdir())).write_bytes(b"{}\n")
    with pytest.raises(ConfigError, match=r"^llm\.replay=.*not a shard of a recording; give another folder$"):
        endpoints.check_recordings(config.llm, tmp_path / "run")
    config.llm.replay = str(tmp_path)
    with pytest.raises(ConfigError, match=r"^llm\.replay=.*holds no recorded calls .*; give another folder$"):
        endpoints.check_recordings(config.llm, tmp_path / "run")
    assert capsys.readouterr().err == ""
    config.llm.record, config.llm.replay = None, str(ours)
    with next(ours.iterdir()).open("ab") as file:
        file.write(b"torn")
    endpoints.check_recordings(config.llm, tmp_path / "run")
    assert "ends in the middle of a call; complete calls: 1" in capsys.readouterr().err


def test_where_recorded_calls_answer_no_model_key_or_variable_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    calls = make_recording(tmp_path / "calls", "run")
    settings = [*REPLAYED, f"llm.replay={calls}", "llm.budget_usd=1"]
    config = compose(settings)
    validate.check_settings(config)
    assert server_specs.served_models(config) == {}
    judges = llm_endpoints.judge_endpoints(reward_spec(config.reward))
    assert endpoints.check_prices(config, judges) == []
    endpoints.check_support(config, judges)
    with pytest.raises(ConfigError, match=r"^reward\.weights\.good: /no/such/folder: no config\.json there"):
        validate.check_settings(compose([*settings, "llm.replay_missing=live"]))
    assert run("doctor", ["--llm", *settings, f"data.train={tmp_path}/none.jsonl"]) == 0
    expected = f"Recorded calls replace served/gone, openai/judge (llm.replay={calls}); nothing is called.\n"
    assert capsys.readouterr().out == expected
