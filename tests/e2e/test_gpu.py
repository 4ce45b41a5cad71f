"""The main job on a node of GPUs: two steps with colocated servers, which lose their memory and get it back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.processes, pytest.mark.timeout(1800)]
# Sides that are multiples of a block of FP8, which the booking world's own model lacks.
SIZES = {"vocab": 512, "hidden": 512, "ffn": 1024, "heads": 8, "kv_heads": 4, "head_dim": 64}
CASES = {
    "bfloat16": ("qwen3", []),
    "fp8": ("llama", ["rollout.server.fp8=true"]),
    "fp8 trainer": ("qwen3", ["model.fp8=hybrid", "model.fp8_recipe=tensorwise"]),
    "masters of fp8 parameters": (
        "qwen3",
        ["model.fp8=hybrid", "model.fp8_recipe=tensorwise", "model.fp8_params=true"],
    ),
    "experts": ("qwen3_moe", []),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_sampled_is_what_is_trained(tmp_path: Path, case: str) -> None:
    """Every step proves by checksums what the server holds, and compares its log-probs with the trainer's."""
    family, settings = CASES[case]
    sizes = SIZES | ({"moe_intermediate_size": 256} if family == "qwen3_moe" else {})
    folder = make_model(tmp_path / "model", family=family, **sizes)  # type: ignore[arg-type]
    command = [sys.executable, "-m", "megatron_collab.train", "experiment=booking", *settings]
    command += [f"run.dir={tmp_path}/run", f"data.dir={tmp_path}/world", f"model.path={folder}"]
    command += ["launch.device=cuda", "launch.nproc_per_node=1", "parallel.tp=1", "model.dtype=bfloat16"]
    command += ["parallel.offload=true", "publish.verify=1", "reward.malformed=null"]
    command += ["train.steps=3", "train.prompts_per_step=4", "train.rollouts_per_prompt=4", "train.eval_tasks=0"]
    command += ["train.checkpoint_every=2"]
    with (tmp_path / "console.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=1500).returncode
    assert code == 0, (tmp_path / "console.log").read_text()[-5000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["mismatch/k3"] < (0.02 if "fp8" in case else 0.002)
        assert line.get("servers/lost", 0) == 0
