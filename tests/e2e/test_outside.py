"""A run with every kind of extension, from an installed package and from a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from site import getsitepackages

import pytest

from tests.helpers import transcript_rows

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
LENGTH = """
from megatron_collab.reward.metrics import Metric


class Length(Metric):
    async def score(self, task, conversation):
        return float(len(conversation.messages))
"""
SETTINGS = [
    "data.world=collab_extras:Greetings",
    "data.world_options.tasks=5",
    "data.train=${data.dir}/greetings.txt",
    "data.eval=${data.dir}/greetings.txt",
    "data.format=collab_extras:Lines",
    "user.name=collab_extras:TerseUser",
    "user.options.word=yes",
    "rollout.player=collab_extras:Counting",
    "rollout.player_options.name=greetings",
    "publish.transport=./files.py:FileTransport",
    "publish.verify=1",
    "rollout.tools=[collab_extras:Dice]",
    "rollout.tool_options.dice.sides=4",
    "reward.mode=collab_extras:Best",
    "reward.mode_options.bonus=0.5",
    "reward.weights.polite=1",
    "reward.weights.length=0",
    "reward.metrics.polite.metric=collab_extras:Polite",
    "reward.metrics.polite.word=a",
    "reward.metrics.length.metric=./my_metric.py:Length",
    "algo.loss=collab_extras:Reinforce",
    "algo.loss_options.scale=2.0",
    "model.path=${data.dir}/model",
    "model.dtype=float32",
    "train.steps=2",
    "train.prompts_per_step=2",
    "train.rollouts_per_prompt=2",
    "train.eval_tasks=2",
    "rollout.futures=2",
    "rollout.max_user_turns=1",
    "rollout.turn.max_new_tokens=8",
    "rollout.future.max_new_tokens=8",
    "rollout.context_length=900",
    "rollout.server.max_total_tokens=65536",
    "reward.malformed=null",  # the random model never ends a turn by itself
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the package, which also imports what is installed in this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    where = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], check=True, capture_output=True, text=True
    ).stdout.strip()
    lines = [f"import site; site.addsitedir({folder!r})" for folder in getsitepackages()]
    (Path(where) / "shared.pth").write_text("\n".join([*lines, str(ROOT)]) + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps"]
    install += ["--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    source = folder / "source"
    subprocess.run(["cp", "-r", ROOT / "tests" / "outside", source], check=True)  # pip writes its build there
    subprocess.run([*install, str(source)], check=True)
    return python


def transport() -> str:
    """The transport of a how-to, which SGLang's processes load too."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/howto/transport.md").read_text(), re.DOTALL)
    return code


def test_a_run_with_every_extension_from_outside(python: Path, tmp_path: Path) -> None:
    (tmp_path / "my_metric.py").write_text(LENGTH)
    (tmp_path / "files.py").write_text(transport())
    run, weights = tmp_path / "run", tmp_path / "weights"
    command = [python, "-m", "megatron_collab.train", *SETTINGS, f"run.dir={run}", f"data.dir={tmp_path}/world"]
    command.append(f"publish.transport_options.folder={weights}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (tmp_path / "console.log").open("w") as log:
        code = subprocess.run(command, cwd=tmp_path, env=environment, stdout=log, stderr=log, timeout=400).returncode
    assert code == 0, (tmp_path / "console.log").read_text()[-5000:]

    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [0, 1]
    assert all(line["clip_fraction"] == 1.0 for line in metrics), "the loss is the package's"
    assert all(line["count/greetings"] >= 2 for line in metrics), "the player is the package's"
    assert weights.is_dir() and not list(weights.iterdir()), "the transport is the file's, and leaves nothing"
    transcripts = transcript_rows(run)
    assert len(transcripts) == 2 * 2 * 2 * 2
    rollouts: dict[tuple, list[dict]] = {}
    for line in transcripts:
        assert line["messages"][0]["content"].startswith("hello ")
        assert [message["content"] for message in line["messages"][2::2]] == ["yes"]
        assert line["turn_rewards"][0] == 0.25
        assert line["scores"]["length"] == len(line["messages"]) == 4
        text = "".join(message["content"] for message in line["messages"][1::2])
        assert line["scores"]["polite"] == text.count("a")
        rollouts.setdefault((line["step"], line["task"], line["rollout"]), []).append(line)
    for lines in rollouts.values():
        assert lines[0]["reward"] == max(line["scores"]["polite"] for line in lines) + 0.5 * 4
    assert any(line["scores"]["polite"] for line in transcripts), "some random text has the letter"
    result = json.loads((run / "result.json").read_text())
    settings = json.loads((run / "config.json").read_text())
    assert settings["reward"]["metrics"]["length"]["metric"] == f"{tmp_path}/my_metric.py:Length"
    assert set(result) >= {"politeness_before", "politeness_after"}, "the world names the metric"


def test_a_name_that_the_package_lacks_ends_the_command_in_one_line(python: Path, tmp_path: Path) -> None:
    settings = [setting for setting in SETTINGS if not setting.startswith(("algo.", "model."))]
    command = [python, "-m", "megatron_collab.train", *settings, f"run.dir={tmp_path}/run", f"data.dir={tmp_path}/w"]
    command += ["model.path=/nowhere", "algo.loss=collab_extras:Reinforcee"]
    (tmp_path / "my_metric.py").write_text(LENGTH)
    (tmp_path / "files.py").write_text(transport())
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    message = "algo.loss=collab_extras:Reinforcee: collab_extras has no Reinforcee; the nearest is Reinforce"
    assert f"megatron-collab: {message}" in done.stderr.splitlines()
