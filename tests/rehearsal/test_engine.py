"""Rehearsals of TransformerEngine's layers: their memory, in 16 bits and in FP8, is as planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_collab.planning.memory import plan_memory
from megatron_collab.rehearsal.compare import Comparison, lines
from megatron_collab.rehearsal.run import rehearse
from tests.ranks import run_ranks
from tests.rehearsal.test_run import EXPERTS, SMALL, folder, load_run

pytestmark = pytest.mark.processes

QWEN3 = {"model_type": "qwen3", "tie_word_embeddings": True, "hidden_size": 512}
BFLOAT16 = ["model.fp8=null", "model.fp8_recipe=delayed"]
NO_SERVERS = "train.stage=sft"
# name: (changes to the small Llama, settings)
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "bfloat16": (QWEN3, [*BFLOAT16, "parallel.recompute=full", NO_SERVERS]),
    "blocks": ({}, ["model.fp8=hybrid", "model.fp8_recipe=blockwise", "parallel.recompute=selective"]),
    "tensors": ({}, ["model.fp8=hybrid", "model.fp8_recipe=tensorwise", NO_SERVERS]),
    "experts": (
        EXPERTS | {"num_experts": 8},
        ["model.fp8=hybrid", "model.fp8_recipe=delayed", "parallel.ep=2", NO_SERVERS],
    ),
    "kept in blocks": (
        {},
        ["model.fp8=hybrid", "model.fp8_recipe=blockwise", "model.fp8_params=true", "parallel.recompute=selective"],
    ),
    "kept experts": (
        EXPERTS | {"num_experts": 8},
        ["model.fp8=hybrid", "model.fp8_recipe=tensorwise", "model.fp8_params=true", "parallel.ep=2", NO_SERVERS],
    ),
    "critic": ({"num_hidden_layers": 2}, [*BFLOAT16, "algo=ppo", "parallel.recompute=full"]),
    "virtual stages": ({}, [*BFLOAT16, "parallel.vpp=2", NO_SERVERS]),
    "contexts": (
        {},
        [*BFLOAT16, "parallel.cp=2", "parallel.tp=1", "parallel.sequence_parallel=false", NO_SERVERS],
    ),
}
# Each is a separate process of at most a minute of CPU; in one process they would come near its time limit.
GROUPS = {
    "bfloat16": ["bfloat16"],
    "of stages and slices": ["virtual stages", "contexts", "critic"],
    "fp8": ["blocks", "tensors", "experts"],
    "kept": ["kept in blocks", "kept experts"],
}


class ClassMemory(NamedTuple):
    """Memory of a class of ranks: pipeline stage, bytes by part in training, and deviations from the plan."""

    stage: int
    parts: dict[str, float]
    ratios: list[float]
    apart: list[Comparison]


@pytest.mark.parametrize(
    "group", [pytest.param(name, marks=[pytest.mark.slow] * (name != "bfloat16")) for name in GROUPS]
)
def test_every_class_holds_what_the_plan_says(tmp_path: Path, group: str) -> None:
    [results] = run_ranks(rehearse_all, 1, tmp_path, GROUPS[group], engine=True)
    for case, classes in results.items():
        assert {memory.stage for memory in classes} == {0, 1}, case
        for memory in classes:
            assert len(memory.ratios) >= 6 and memory.parts["workspaces"] > 0
            assert 0.95 <= min(memory.ratios) <= max(memory.ratios) <= 1.05, (case, memory.apart)
    if group == "fp8":
        # A copy in FP8 by rows and one by columns beside bfloat16; a pass without gradient creates only the first.
        parts = results["blocks"][0].parts
        assert parts["parameters"] > 1.25 * parts["reference"] > 1.5 * parts["gradients"] / 2
    if group == "kept":
        # Both copies instead of bfloat16, even if nothing is trained.
        kept = results["kept in blocks"][0].parts
        assert kept["parameters"] == kept["reference"] < 1.01 * kept["gradients"] / 2


def rehearse_all(where: Path, cases: list[str]) -> dict[str, list[ClassMemory]]:
    """Memory of every class, by case."""
    results = {}
    for case in cases:
        changes, settings = CASES[case]
        config, shape, hf = load_run([*SMALL, *settings, f"model.path={folder(where, changes)}"])
        plan = plan_memory(config, shape)
        results[case] = []
        for memory in rehearse(config, shape, hf):
            compared = list(lines(plan[memory.kind.stage], memory.parts))
            ratios = [line.ratio for line in compared if line.ratio is not None]
            apart = [line for line in compared if line.ratio is not None and abs(line.ratio - 1) > 0.05]
            results[case].append(
                ClassMemory(memory.kind.stage, {part.name: part.training for part in memory.parts}, ratios, apart)
            )
    return results
