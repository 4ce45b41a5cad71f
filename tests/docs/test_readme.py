"""The commands of the README: their settings can be composed, their programs take their arguments."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_collab.commands import convert
from megatron_collab.config import compose
from megatron_collab.launch.validate import check_settings
from megatron_collab.planning.memory import plan_memory, read_run
from megatron_collab.settings import ConfigError

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = re.findall(r"^    ((?:.*\\\n)*.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)


def arguments(program: str) -> list[list[str]]:
    """The arguments of every command that starts with these words, without comments."""
    starting = (command for command in COMMANDS if command.startswith(program))
    return [shlex.split(command.replace("\\\n", " "), comments=True)[len(program.split()) :] for command in starting]


TRAININGS = [
    *arguments("megatron-collab train"),
    *arguments("torchrun --nproc-per-node=2 -m megatron_collab.train"),
    *(["experiment=train_70b", *options] for options in arguments("sbatch slurm/train_70b.sh")),
]


@pytest.mark.parametrize("options", TRAININGS, ids=str)
def test_a_training_has_valid_settings(options: list[str]) -> None:
    check_settings(compose(options))


def test_all_five_ways_are_shown() -> None:
    assert len(TRAININGS) == 3 and (ROOT / "slurm/train_70b.sh").is_file()
    assert arguments("megatron-collab doctor --plan") == [["experiment=train_70b"]]
    assert "make setup" in {command.partition("#")[0].strip() for command in COMMANDS}


@pytest.mark.seconds
def test_the_largest_run_is_planned() -> None:
    config, shape = read_run(*arguments("megatron-collab doctor --plan"))
    assert len(plan_memory(config, shape)) == config.parallel.pp


def test_a_conversion_is_refused_only_because_there_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (words,) = arguments("python tools/convert_ckpt.py")
    with pytest.raises(ConfigError, match=f"^{words[0]}: contains no checkpoint"):
        convert.main(words)
