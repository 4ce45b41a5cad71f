"""Files that a run reads: a resume refuses other content under the same path, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_collab.config import Config, EvaluateConfig, PlayConfig
from megatron_collab.launch import inputs
from megatron_collab.launch.data_specs import data_spec, evaluation_data
from megatron_collab.launch.inputs import record_inputs
from megatron_collab.runtime.process import LAUNCHER
from megatron_collab.settings import ConfigError

ROWS = [json.dumps({"messages": [{"role": "user", "content": f"hello {number}"}]}) + "\n" for number in range(4)]
CODE = "class Mine:\n    pass\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run whose settings name every kind of file, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model-00001.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"):
        (model / name).write_text(f"{name}: content")
    shutil.copytree(model, "judge")
    for file in ("train.jsonl", "eval.jsonl", "many/a.jsonl", "many/b.jsonl"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("".join(ROWS))
    Path("many/README.md").write_text("rows")
    for file in ("my.py", "world_of_mine.py", "prompt.j2", "personas.txt", "rubric.txt", "server.py"):
        Path(file).write_text(CODE)
    config = Config()
    config.run.dir, config.model.path, config.train.stage = "run", "model", "rl"
    config.data.train = ["train.jsonl", {"source": "many", "weight": 2.0}]
    config.data.eval = [{"source": "eval.jsonl", "name": "held"}]
    config.data.format = "auto"
    config.data.world = "world_of_mine:Mine"
    config.reward.weights = {"./my.py:Mine": 1.0, "generative": 0.5}
    config.reward.metrics = {"generative": {"rubric": "rubric.txt", "model": "judge"}}
    config.user.prompt, config.user.personas = "prompt.j2", "personas.txt"
    config.rollout.mcp_servers = {"s": {"command": "/bin/sh", "args": ["server.py"]}}
    return config


def check_inputs(config: PlayConfig) -> None:
    data = data_spec(config) if isinstance(config, Config) else evaluation_data(config)
    inputs.check_inputs(config, data)
    inputs.draft_inputs(config, data)


def begun(config: PlayConfig) -> None:
    check_inputs(config)
    record_inputs(Path(config.run.dir))


def write(file: str, text: str) -> Callable[[], object]:
    return lambda: Path(file).write_text(text)


def one_byte() -> None:
    """Another letter; size and modification time stay."""
    times = os.stat("train.jsonl")
    Path("train.jsonl").write_text("".join(ROWS).replace("hello 3", "hellO 3"))
    os.utime("train.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))


CHANGES: dict[str, tuple[Callable[[], object], str]] = {
    "rows swapped": (write("train.jsonl", "".join(reversed(ROWS))), "data.train=train.jsonl: train.jsonl has changed"),
    "rows appended": (
        write("train.jsonl", "".join([*ROWS, ROWS[0]])),
        "data.train=train.jsonl: train.jsonl has changed",
    ),
    "one byte": (one_byte, "data.train=train.jsonl: train.jsonl has changed"),
    "a shard": (write("many/b.jsonl", ROWS[0]), "data.train=many: b.jsonl has changed"),
    "a new shard": (write("many/c.jsonl", ROWS[0]), "data.train=many: c.jsonl is new"),
    "a lost shard": (lambda: Path("many/b.jsonl").unlink(), "data.train=many: b.jsonl is missing"),
    "evaluation": (write("eval.jsonl", ROWS[0]), "data.eval=eval.jsonl: eval.jsonl has changed"),
    "weights": (write("model/model-00001.safetensors", "other"), "model.path=model: model-00001.safetensors has"),
    "template": (write("model/chat_template.jinja", "other"), "model.path=model: chat_template.jinja has changed"),
    "tokenizer": (write("model/tokenizer.json", "other"), "model.path=model: tokenizer.json has changed"),
    "the judge": (write("judge/tokenizer.json", "{}"), "reward.metrics.generative.model=judge: tokenizer.json has"),
    "a class": (write("my.py", f"{CODE}#"), "reward.weights=./my.py:Mine: my.py has changed"),
    "a module": (write("world_of_mine.py", "#"), "data.world=world_of_mine:Mine: world_of_mine.py has changed"),
    "a prompt": (write("prompt.j2", "other"), "user.prompt=prompt.j2: prompt.j2 has changed"),
    "personas": (write("personas.txt", "other"), "user.personas=personas.txt: personas.txt has changed"),
    "a rubric": (write("rubric.txt", "other"), "reward.metrics.generative.rubric=rubric.txt: rubric.txt has changed"),
    "a server": (write("server.py", "other"), "rollout.mcp_servers.s.args=server.py: server.py has changed"),
}


@pytest.mark.seconds
@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_other_content_under_the_same_path_is_refused(
    config: Config, change: Callable[[], object], message: str
) -> None:
    begun(config)
    check_inputs(config)
    change()
    with pytest.raises(ConfigError) as refused:
        check_inputs(config)
    text = str(refused.value)
    assert text.startswith(f"run.dir=run: {message}") and "\n" not in text
    assert text.endswith("choose another run.dir (run.from=run continues from its checkpoint there)")


def test_files_that_were_touched_or_copied_are_the_same(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(config)
    for file in Path().rglob("*.*"):
        os.utime(file)
    Path("many/README.md").write_text("not read")
    Path("model/README.md").write_text("not read")
    check_inputs(config)
    shutil.copytree(".", "../elsewhere")
    monkeypatch.chdir("../elsewhere")
    begun(config)


@pytest.mark.seconds
def test_files_that_have_not_changed_are_not_read_again(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    digest = inputs._digest
    monkeypatch.setattr(inputs, "_digest", lambda file, size: read.append(file.name) or digest(file, size))
    check_inputs(config)
    assert sorted(read).count("train.jsonl") == 1 and "README.md" not in read and "sh" not in read
    read.clear()
    check_inputs(config)  # the first start has failed before the run began
    record_inputs(Path("run"))
    check_inputs(config)
    assert read == []


def test_data_of_a_start_that_failed_may_be_corrected(config: Config) -> None:
    check_inputs(config)
    Path("train.jsonl").write_text(ROWS[0])
    begun(config)
    Path("train.jsonl").write_text(ROWS[1])
    with pytest.raises(ConfigError, match=r"train\.jsonl has changed"):
        check_inputs(config)


def test_runs_without_fingerprints_resume_and_get_them(config: Config) -> None:
    Path("run").mkdir()
    Path("run/config.json").write_text("{}")
    begun(config)
    Path("train.jsonl").write_text(ROWS[0])
    with pytest.raises(ConfigError, match=r"train\.jsonl has changed"):
        check_inputs(config)
    Path("run/inputs.json").write_text('{"data.train=train.jsonl": {"train.jsonl": {}}}')
    with pytest.raises(ConfigError, match=r"^run/inputs\.json: contains no fingerprints; restore it, or remove it"):
        check_inputs(config)


def test_a_set_that_comes_back_is_compared(config: Config) -> None:
    begun(config)
    sets, config.data.eval = config.data.eval, None
    Path("eval.jsonl").write_text(ROWS[0])
    begun(config)
    config.data.eval = sets
    with pytest.raises(ConfigError, match=r"eval\.jsonl has changed"):
        check_inputs(config)


@pytest.mark.seconds
def test_large_weights_are_sampled_and_large_data_are_not(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "WHOLE", 1000)
    weights, size = Path("model/model-00001.safetensors"), 64 << 20
    weights.write_bytes(bytes(size))
    Path("train.jsonl").write_text("".join(ROWS) * 50)
    begun(config)
    with weights.open("r+b") as stream:  # nine of ten bytes
        stream.seek(size // 10)
        stream.write(b"1" * (size - size // 10))
    with pytest.raises(ConfigError, match="safetensors has changed"):
        check_inputs(config)
    weights.write_bytes(bytes(size))
    check_inputs(config)
    Path("train.jsonl").write_text("".join(ROWS) * 49 + "".join(ROWS[::-1]))
    with pytest.raises(ConfigError, match=r"train\.jsonl has changed"):
        check_inputs(config)


def test_an_evaluation_names_no_checkpoint_and_reads_no_training_data(config: Config) -> None:
    evaluation = EvaluateConfig()
    evaluation.run.dir, evaluation.data.eval, evaluation.model.path = "run", "eval.jsonl", "model"
    begun(evaluation)
    assert set(json.loads(Path("run/inputs.json").read_text())) == {"data.eval=eval.jsonl", "model.path=model"}
    Path("eval.jsonl").write_text(ROWS[0])
    with pytest.raises(ConfigError, match=r"restore it, or choose another run\.dir$"):
        check_inputs(evaluation)


def test_the_text_of_prompts_is_kept_and_ranks_compare_nothing(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(config)
    content = json.loads(Path("run/inputs.json").read_text())
    assert content["user.prompt=prompt.j2"]["prompt.j2"]["text"] == CODE
    Path("prompt.j2").write_text("other")
    monkeypatch.setenv(LAUNCHER, "1")
    check_inputs(config)
