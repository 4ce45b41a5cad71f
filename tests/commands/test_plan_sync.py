"""What plan-sync prints of an experiment, and how it refuses."""

from __future__ import annotations

import pytest

from megatron_collab.commands.__main__ import run

APART = ["rollout.server.colocated=false", "parallel.offload=false"]


@pytest.mark.seconds
def test_the_plan_of_an_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    """Sixteen colocated servers of a 70B model in FP8, 72.7 GB each: a node holds one pipeline stage of four."""
    assert run("plan-sync", ["experiment=train_70b"]) == 0
    printed = capsys.readouterr().out
    assert "trainer of 128 ranks, tp=8 pp=4" in printed and "16 servers of tp=8 ep=1 FP8" in printed
    rows = {line[:26].strip(): line[26:].split() for line in printed.splitlines()}
    assert rows["the same device"] == ["290.77", "0.00"] and rows["a device of another node"] == ["872.30", "0.00"]
    assert "rank 0 of server 0 receives the most, 9.09 GB" in printed and "1163.06 GB take " in printed


@pytest.mark.seconds
def test_adapters_are_a_small_part_of_a_sync(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["experiment=train_70b", *APART, "rollout.server.fp8=false", "model.lora.rank=32"]
    assert run("plan-sync", [*options, "model.lora.serve=adapters"]) == 0
    printed = capsys.readouterr().out
    a = 3 * 8192 + 2 * 8192 + (8192 + 28672) / 8  # columns of qkv, gate and up, o, down on each of 128 server ranks
    b = (10240 + 2 * 28672) / 8 + 2 * 8192  # rows of these
    assert f"Later syncs send only adapters: {2 * 80 * 32 * (a + b) * 128 / 1e9:.3f} GB take " in printed
    assert f"{2258.01 + 2 * 80 * 32 * (a + b) * 128 / 1e9:.2f} GB take " in printed


@pytest.mark.seconds
def test_slower_links_take_longer(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["experiment=train_70b", *APART, "rollout.server.fp8=false"]
    assert run("plan-sync", [*options, "--bandwidth", "1000", "100", "1"]) == 0
    printed = capsys.readouterr().out
    assert "2258.01 GB take 18.17 s" in printed and "1.0 times the floor of 17.64 s" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.path=models/unknown"], "model.path=models/unknown: not in"),
        (["rollout.server.tp=16", "rollout.server.ep=3"], "rollout.server.ep=3: does not divide"),
        ([*APART, "rollout.server.tp=64"], "448 rows on a server's rank, not a multiple of 128"),
        (["parallel.pq=3"], "parallel.pq"),
        (["train.stage=sft"], "train.stage=sft: has no servers"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert run("plan-sync", ["experiment=train_70b", *options]) == 2
    printed, line = capsys.readouterr()
    assert printed == "" and line.count("\n") == 1 and message in line


@pytest.mark.parametrize("speed", ["0", "-1", "nan", "fast"])
def test_no_bandwidth(capsys: pytest.CaptureFixture[str], speed: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run("plan-sync", ["experiment=train_70b", "--bandwidth", "1000", speed, "1"])
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.count("\n") == 1 and f"invalid positive value: {speed!r}" in line
