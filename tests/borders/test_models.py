"""A model that cannot be used costs nothing: one line that names it and the way out, exit code 2, no process."""

from __future__ import annotations

import json
import mmap
import os
import resource
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file

from megatron_collab import evaluate
from megatron_collab.checkpoint.convert import to_checkpoint
from megatron_collab.config import compose
from megatron_collab.launch import models, prepare
from megatron_collab.launch.data_specs import data_spec
from megatron_collab.launch.inputs import record_inputs
from megatron_collab.launch.spec import RunSpec
from megatron_collab.models import hf_config
from megatron_collab.runtime.process import EXIT_BAD_INPUT
from megatron_collab.runtime.trial import TrialError, run_trial
from megatron_collab.settings import ConfigError
from megatron_collab.synthesis import build_dataset
from megatron_collab.train import main
from tests.borders.damage import (
    ENDLESS,
    WEIGHTS,
    WRONG,
    Damage,
    cut,
    described,
    index,
    more_tokens,
    more_words,
    template,
    tensors,
    written,
)
from tests.helpers import make_model, make_reward_model


class Started(Exception):
    """All was well, and the ranks would have been started."""


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise Started

    monkeypatch.setattr(prepare, "replace_by_torchrun", start)


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("made") / "model", vocab=301)


@pytest.fixture
def model(base_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base_model, tmp_path / "model"))


def supervised(tmp_path: Path, model: Path) -> list[str]:
    data = tmp_path / "data.jsonl"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    data.write_text(json.dumps({"messages": messages}) + "\n")
    return [f"run.dir={tmp_path}/run", f"model.path={model}", f"data.train={data}", "train.stage=sft"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    began = time.monotonic()
    assert main(list(arguments)) == EXIT_BAD_INPUT
    assert time.monotonic() - began < 60
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, out + err
    return err


@pytest.mark.processes
@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_cannot_be_used(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(models, "_SECONDS", 1.0)
    change, message = WRONG[name]
    change(model)
    line = refused(capsys, *supervised(tmp_path, model))
    assert f"model.path={model}: " in line and message in line and "; " in line, line
    assert not (tmp_path / "run").exists(), "the lock leaves nothing behind"


WHOLE = [lambda folder: None, index(), tensors(lm_head__weight=None)]


@pytest.mark.processes
@pytest.mark.parametrize("change", WHOLE, ids=["one", "index", "tied"])
def test_a_model_that_is_whole(tmp_path: Path, model: Path, change: Damage) -> None:
    change(model)
    if "lm_head.weight" not in load_file(next(model.glob("*.safetensors"))):
        described(tie_word_embeddings=True)(model)
    with pytest.raises(Started):
        main(supervised(tmp_path, model))


PLAIN = (
    "{% for m in messages %}{{ '[' + m.role + '] ' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def test_marks_that_any_text_can_imitate_are_named_once(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template(PLAIN)(model)
    with pytest.raises(Started):
        main(supervised(tmp_path, model))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "marks turns by plain text such as" in line]
    assert f"model.path={model}: " in line and "'[user]'" in line


def test_code_in_the_folder_of_a_model_is_not_run(tmp_path: Path, model: Path) -> None:
    """Which config.json and tokenizer_config.json name as transformers has it, and which Python would find."""
    ran = tmp_path / "ran"
    for name in ("configuration_own", "modeling_own", "tokenization_own", "sitecustomize", "__init__"):
        (model / f"{name}.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    described(auto_map={"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"})(model)
    named = json.loads((model / "tokenizer_config.json").read_text())
    named["auto_map"] = {"AutoTokenizer": ["tokenization_own.Own", "tokenization_own.Own"]}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(Started):
        main(supervised(tmp_path, model))
    assert not ran.exists()


@pytest.mark.processes
def test_what_a_model_costs_to_check(model: Path) -> None:
    """Less than its imports, which come with any run."""
    config = compose(["train.stage=sft", "data.train=unused", f"model.path={model}", "run.dir=unused"])
    shape = hf_config.read(model / "config.json")
    spec = RunSpec(data_spec(config))
    models.check_models(config, spec, shape)  # imports
    began = time.process_time()
    models.check_models(config, spec, shape)
    assert time.process_time() - began < 1.0


SMALL = ["rollout.context_length=256", "rollout.turn.max_new_tokens=16", "rollout.future.max_new_tokens=16"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut(WEIGHTS, 0.5), "model.safetensors is truncated or corrupt ("),
        (index(model__norm__weight="../x"), "names '../x', which is not a file in this folder"),
        (written("tokenizer.json", "{}"), "its tokenizer cannot be read (KeyError"),
        (more_tokens, "gives '<|more|>' the id 301, but its embedding has 301 rows"),
        (partial(more_tokens, number=99_999), "gives '<|more|>' the id 301, but its"),  # the library counts by itself
        (partial(more_tokens, special=False), "gives '<|more|>' the id 301, but its embedding has 301 rows"),
        (partial(more_tokens, content="\n"), "gives '\\n' the id 301, but its embedding has 301 rows"),
        (more_words, "gives 'more' the id 4000, but its embedding has 301 rows"),
        (template(ENDLESS), "does not finish within 1 s"),
        (template("{{ raise_exception('never') }}"), "its chat template fails (never)"),
        (written("config.json", "{"), "config.json cannot be read as JSON"),
        (written("config.json", "[]"), "config.json does not describe a model"),
    ],
)
@pytest.mark.parametrize("scores", [False, True])
def test_a_model_beside_the_policy(
    tmp_path: Path,
    base_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: Damage,
    message: str,
    scores: bool,
) -> None:
    monkeypatch.setattr(models, "_SECONDS", 1.0)
    make = make_reward_model if scores else make_model
    beside = make(tmp_path / "beside", vocab=301)
    change(beside)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}], "goal": "g", "user": "replay"}) + "\n")
    of = ["reward.weights={reward_model: 1}", f"reward.metrics.reward_model.model={beside}"]
    of = of if scores else ["reward.weights={token_amount: -1}", f"servers.judge.model={beside}"]
    settings = [f"run.dir={tmp_path}/run", f"model.path={base_model}", f"data.train={tasks}", "train.stage=rl", *of]
    line = refused(capsys, *settings, *SMALL)
    assert str(beside) in line and message in line, line


@pytest.mark.parametrize("name", ["a tensor less", "another head", "a name more", "a layer more"])
def test_train_evaluate_and_convert_refuse_the_same(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    change, message = WRONG[name]
    change(model)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"prompt": "hi", "goal": "g", "user": "replay"}) + "\n")
    evaluated = [
        f"run.dir={tmp_path}/run",
        f"model.path={model}",
        f"data.eval={tasks}",
        "reward.weights={token_amount: -1}",
    ]
    assert message in refused(capsys, *supervised(tmp_path, model))
    assert evaluate.main([*evaluated, *SMALL]) == EXIT_BAD_INPUT
    assert message in capsys.readouterr().err
    with pytest.raises(ConfigError) as refusal:
        to_checkpoint(model, tmp_path / "out", None, 10**9)
    assert message in str(refusal.value)


@pytest.mark.processes
@pytest.mark.parametrize("program", [evaluate, build_dataset], ids=["evaluate", "build-dataset"])
def test_what_has_changed_since_the_same_command_began_is_named(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], program: ModuleType
) -> None:
    """The ranks record what the start before them has read; tests/e2e/test_evaluate.py has them do it."""
    judge = make_reward_model(tmp_path / "judge", vocab=301)
    data, prompt, run = tmp_path / "tasks.jsonl", tmp_path / "brief.j2", tmp_path / "run"
    data.write_text(json.dumps({"prompt": "hi", "goal": "g", "user": "replay", "metadata": {"replay": ["so"]}}) + "\n")
    prompt.write_text("Be brief.")
    settings = {
        "run.dir": run,
        "data.eval": data,
        "model.path": model,
        "reward.metrics.reward_model.model": judge,
        "rollout.system_prompt": prompt,
    }
    command = ["reward.weights={reward_model: 1}", "rollout.max_messages=4", *SMALL]
    command += [f"{name}={value}" for name, value in settings.items()]
    with pytest.raises(Started):
        program.main(command)
    record_inputs(run)
    capsys.readouterr()
    for setting, file in (
        ("data.eval", data),
        ("model.path", model / "tokenizer.json"),
        ("model.path", model / WEIGHTS),
        ("reward.metrics.reward_model.model", judge / WEIGHTS),
        ("rollout.system_prompt", prompt),
    ):
        before = file.read_bytes()
        file.write_bytes(before + b" ")
        assert program.main(command) == EXIT_BAD_INPUT
        line = f"run.dir={run}: {setting}={settings[setting]}: {file.name} has changed since the run began; restore it"
        assert capsys.readouterr().err == f"megatron-collab: {line}, or choose another run.dir\n"
        file.write_bytes(before)
    with pytest.raises(Started):
        program.main(command)


@pytest.mark.processes
def test_work_that_is_tried_ends_as_it_would_here() -> None:
    assert run_trial(lambda: {"a": [1]}, 5.0) == {"a": [1]}
    with pytest.raises(ValueError, match="of its own"):
        run_trial(lambda: int("of its own"), 5.0)
    with pytest.raises(TrialError, match=r"fails \(KeyError"):
        run_trial(lambda: {}["x"], 5.0)
    with pytest.raises(TrialError, match=r"fails \(SystemExit: 0\)"):
        run_trial(lambda: sys.exit(0), 5.0)
    with pytest.raises(TrialError, match=r"fails \(.*pickle"):
        run_trial(lambda: lambda: None, 5.0)
    with pytest.raises(TrialError, match="ends the process with code 7"):
        run_trial(lambda: os._exit(7), 5.0)


@pytest.mark.processes
def test_files_that_are_mapped_are_no_memory_and_ulimit_bounds_it_too(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)

    def mapped() -> int:
        with (tmp_path / "large").open("rb") as file:
            return len(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    assert run_trial(mapped, 60.0) == 1 << 40
    with pytest.raises(TrialError, match=r"^takes more than 4 GiB of memory$"):  # OSError: [Errno 12]
        run_trial(lambda: mmap.mmap(-1, 1 << 35, flags=mmap.MAP_PRIVATE), 60.0)

    def under_ulimit() -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (size + (3 << 30), size + (3 << 30)))
        assert run_trial(lambda: "done", 60.0) == "done"
        run_trial(lambda: bytes(7 << 29), 60.0)

    with pytest.raises(TrialError, match=r"takes more than (2\.9\d?|3) GiB of memory"):
        run_trial(under_ulimit, 60.0)
