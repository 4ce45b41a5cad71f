"""One run over two hosts, each a network of its own: two torchrun agents, two Ray nodes, an SGLang server on each."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--mount-proc", "--fork"]
OPTIONS = [
    "experiment=booking",
    "train.steps=2",
    "train.checkpoint_every=2",
    "train.prompts_per_step=2",
    "train.rollouts_per_prompt=4",
    "rollout.futures=1",
    "train.eval_tasks=0",
    "algo.entropy_coef=0.01",  # where all rewards of a group are equal there is a gradient too
]


def test_two_hosts_train_what_one_trains(tmp_path: Path) -> None:
    """To the last bit: seeds decide the samples, whichever server gives them, and the two ranks compute the same."""
    options = [*OPTIONS, f"data.dir={tmp_path}/world", f"model.path={tmp_path}/world/model"]
    alone = [sys.executable, "-m", "megatron_collab.train", *options, f"run.dir={tmp_path}/one"]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]

    script = [*NAMESPACES, "--kill-child", "bash", str(Path(__file__).with_name("two_hosts.sh")), str(tmp_path)]
    apart = [*script, *options, f"run.dir={tmp_path}/two", "rollout.server.replicas=2"]
    environment = os.environ | {"PYTHON": sys.executable, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    done = subprocess.run(apart, env=environment, capture_output=True, text=True, timeout=900)
    console = (tmp_path / "host0.log").read_text() if done.returncode == 0 else ""
    logs = "\n".join(log.read_text()[-2000:] for log in sorted(tmp_path.glob("*.log")))
    assert done.returncode == 0, f"{done.stderr}\n{logs}"
    ready = next(line for line in console.splitlines() if line.startswith("engine: ready"))
    assert "(http://10.77.0.1:" in ready and ", http://10.77.0.2:" in ready
    one, two = ((tmp_path / name / "hf" / "model.safetensors").read_bytes() for name in ("one", "two"))
    start = (tmp_path / "world" / "model" / "model.safetensors").read_bytes()
    assert two == one != start
