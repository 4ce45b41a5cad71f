"""Templates that take too long, or give too much, are refused before anything reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_collab.commands.__main__ import run
from megatron_collab.config import Config
from megatron_collab.launch import prompts
from megatron_collab.launch.prompts import check_prompts
from megatron_collab.launch.spec import run_spec
from megatron_collab.runtime.process import EXIT_BAD_INPUT
from megatron_collab.settings import ConfigError, bounded_jinja

ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}
LONG = {
    "constant": '{{ "x" * 10**9 }}',  # which Jinja computes when it compiles
    "value": "{{ goal * 10**7 }}",
    "padded": "{{ goal.center(10**10) }}",
    "formatted": "{{ '%1000000000d' % 1 }}",
    "joined": "{{ range(99999) | join('x' * 99999) }}",
    "quadratic": "{% for letter in goal %}{{ goal }}{% endfor %}",
    "metadata": "{% for letter in metadata.story %}{{ metadata.story }}{% endfor %}",
}
ORDINARY = {
    "text": "You are a nurse.",
    "values": "{{ goal }} {{ metadata.grade | tojson }}{% for line in goal.split() %}\n- {{ line }}{% endfor %}",
    "invalid": "{% for",  # for whoever reads it
    "unknown": "{{ nothing }}",
    "unfit": "{{ goal + 1 }}",
}


def config(file: Path, text: str) -> Config:
    file.write_text(text)
    settings = Config()
    settings.user.prompt = str(file)
    return settings


@pytest.mark.processes
@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_template_without_an_end_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "SECONDS", 0.5)
    file = tmp_path / "p.j2"
    with pytest.raises(ConfigError, match=rf"^user.prompt={file}: the template does not finish within 0.5 s; shorten"):
        run_spec(config(file, text))


@pytest.mark.processes
@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
def test_a_template_that_gives_too_much_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "p.j2"
    with pytest.raises(
        ConfigError,
        match=rf"^user.prompt={file}: the template (line 1: computes|gives too many|fails \(Mem)",
    ):
        run_spec(config(file, text))


@pytest.mark.processes
@pytest.mark.parametrize("text", ORDINARY.values(), ids=ORDINARY.keys())
def test_other_templates_are_left_to_their_readers(text: str, tmp_path: Path) -> None:
    settings = config(tmp_path / "p.j2", text)
    check_prompts(settings)
    settings.user.prompt = "user.j2"
    check_prompts(settings)


@pytest.mark.processes
def test_an_edited_template_is_tried_again(tmp_path: Path) -> None:
    check_prompts(config(tmp_path / "p.j2", "short"))
    with pytest.raises(ConfigError, match="has more than 1048576 bytes; give a shorter one"):
        check_prompts(config(tmp_path / "p.j2", "x" * (bounded_jinja.LONGEST + 1)))


def test_ranks_try_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prompts.LAUNCHER, "1")
    check_prompts(config(tmp_path / "p.j2", LONG["constant"]))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "option", "arguments"),
    [
        ("prepare-data", "--system-prompt", ["rows.jsonl", "--to", "sft"]),
        ("users-from-logs", "--prompt", ["log.jsonl", "reward.judge.model=openai/m"]),
    ],
)
def test_templates_of_commands_are_tried_too(
    command: str,
    option: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(prompts, "SECONDS", 0.5)
    file = tmp_path / "p.j2"
    file.write_text(f"{{{{ conversation }}}}{ENDLESS['loops']}")
    assert run(command, [*arguments, "--out", f"{tmp_path}/out", option, str(file)]) == EXIT_BAD_INPUT
    assert f"{option}={file}: the template does not finish within 0.5 s; shorten" in capsys.readouterr().err
