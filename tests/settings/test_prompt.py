from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_collab.config import compose
from megatron_collab.settings import ConfigError, PromptError, bounded_jinja, read_prompt
from megatron_collab.settings.bounded_jinja import BoundedTemplate, bounded
from megatron_collab.settings.extension import make_absolute
from megatron_collab.settings.prompt import PROMPTS, PromptLimit

VARIABLES = ("conversation", "goal", "metadata")


def written(folder: Path, text: str) -> str:
    file = folder / "rubric.j2"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one\n{% if goal %}two", " line 2: Unexpected end of template."),
        ("one\ntwo {{ goal | shout }}", " line 2: No filter named 'shout'."),
        ("one\n\n{{ gaol }}", " line 3: no variable gaol; there are conversation, goal, metadata; the nearest is goal"),
        ("{% set mine = goal %}{{ mine }} {{ self_made }}", " line 1: no variable self_made; there are"),
        ("a\n{% include 'other.j2' %}", " line 2: includes another template; copy it into this file"),
    ],
)
def test_a_template_that_cannot_work_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        read_prompt("user.prompt", file, "", VARIABLES)
    assert str(refused.value).startswith(f"user.prompt={file}{message}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("file", "message"), [("none.j2", "no such file"), ("rubric.txt", "name the file of a Jinja tem")]
)
def test_what_is_no_file_of_a_template_is_refused(file: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"user.prompt={file}: {message}"):
        read_prompt("user.prompt", file, "", VARIABLES)


def test_values_are_text_and_no_template(tmp_path: Path) -> None:
    prompt = read_prompt("p", written(tmp_path, "{{ conversation }}|{{ goal | tojson }}\n"), "", VARIABLES)
    attack = "{{ 7 * 7 }}{% for x in range(9) %}{# & <b> '"
    assert prompt.render(conversation=attack, goal='ü "&<', metadata={}) == f'{attack}|"ü \\"&<"'
    assert prompt.used == {"conversation", "goal"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n{{ metadata.grade }}", "line 2: UndefinedError: 'dict object' has no attribute 'grade'"),
        ("a\nb\n{{ goal.__class__.__mro__ }}", "line 3: SecurityError"),
        ("{{ metadata.update(goal=1) }}", "line 1: SecurityError"),
        ("{{ goal + 1 }}", "line 1: TypeError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}\n{{ again() }}", "line 1: RecursionError"),
    ],
)
def test_what_fails_on_a_task_names_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    metadata: dict[str, Any] = {}
    prompt = read_prompt("user.prompt", file := written(tmp_path, text), "", VARIABLES)
    with pytest.raises(PromptError) as failed:
        prompt.render(conversation="", goal="g", metadata=metadata)
    assert str(failed.value).startswith(f"user.prompt={file} {message}") and metadata == {}


def test_files_of_prompts_are_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"generative": {"prompt": "prompts/kind.j2"}, "text": "Is {conversation} like kind.j2"}
    assert make_absolute(settings) == {**settings, "generative": {"prompt": f"{tmp_path}/prompts/kind.j2"}}


def test_a_name_without_a_folder_that_is_no_file_here_is_one_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_absolute("collaborator.j2") == str(PROMPTS / "collaborator.j2")
    prompt = read_prompt("rollout.system_prompt", "collaborator.j2", "", ()).render()
    assert "one short question at a time" in prompt and "answer at once" in prompt
    assert make_absolute("./collaborator.j2") == f"{tmp_path}/collaborator.j2"
    Path("user_published.j2").write_text("mine")
    assert make_absolute("user_published.j2") == f"{tmp_path}/user_published.j2"
    config = compose(["experiment=collabllm_code"])
    assert (config.user.prompt, config.rollout.system_prompt) == ("user_published.j2", "collaborator.j2")
    assert compose(["experiment=collabllm_code_sft"]).rollout.system_prompt == "collaborator.j2"


GROWS = "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set "
TOO_MUCH = {
    "rounds": ("{% for a in range(99999) %}{% for b in range(99999) if not b %}{% endfor %}{% endfor %}", "takes more"),
    "calls": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "takes"),
    "output": ("{% for a in goal %}{{ goal }}{% endfor %}", "gives too many characters"),
    "times": ("{{ goal * 10**6 }}", "computes"),
    "power": ("{{ 9 ** 99999999 }}", "computes"),
    "a width": ("{{ goal | center(10**10) }}{{ goal.ljust(10**10) }}", "computes"),
    "a width of a method": ("{{ goal.ljust(10**10) }}", "computes"),
    "a width of JSON": ("{{ [goal] | tojson(indent=10**9) }}", "computes"),
    "a width of a format": ("{{ '%0300000000d' % 1 }}", "computes"),
    "a width of a format's method": ("{{ '{:300000000}'.format(1) }}", "computes"),
    "elements that are left out": ("{% for a in range(99999) if range(9999) | sum < 0 %}{% endfor %}", "takes more"),
    "a clock of its own": (
        "{% set _clock = namespace %}{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "takes more",
    ),
    "sums": (GROWS + "ns.x = ns.x + ns.x %}{% endfor %}", "computes"),
    "joined texts": (GROWS + "ns.x = ns.x ~ ns.x %}{% endfor %}", "computes"),
    "replacements": (GROWS + "ns.x = ns.x.replace('a', 'aa') %}{% endfor %}", "computes"),
    "lists within lists": (GROWS.replace("'ab'", "[]") + "ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}", "takes more"),
    "dicts within dicts": (
        GROWS.replace("'ab'", "{}") + "ns.x = {0: ns.x, '': ns.x} %}{% endfor %}{{ ns.x }}",
        "takes more",
    ),
    "blocks": (GROWS + "ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}", "computes"),
}


@pytest.mark.processes
@pytest.mark.parametrize(("text", "message"), TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_rendering_is_bounded_in_a_run_too(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For values that are longer than those of the trial."""
    monkeypatch.setattr(bounded_jinja, "SECONDS", 0.2)
    template = read_prompt("p", written(tmp_path, text), "", VARIABLES)
    assert template.used <= {"goal"}
    with pytest.raises(PromptLimit, match=message):
        template.render(goal="x" * 2000)


@pytest.mark.parametrize(
    "text",
    [
        "goal.replace('x', goal * 99)",
        "goal | replace('x', goal * 99)",
        "range(9999) | map('string') | join(goal * 20)",
        "(goal * 20).join(range(9999) | map('string') | list)",
        "[goal * 4000] * 99",
        "[1] | tojson(indent=300000000)",
        "'%(n)300000000d' % {'n': 1}",
        "'%(n)300000000d' | format(n=1)",
        "'%(n(x)y)300000000d' % {'n(x)y': 1}",
        "'%%%5%%-300000000d' % 1",
        "'%(n) -300000000ld' % {'n': 1}",
        "'{:300000000}'.format(1)",
        "'{n:300000000}'.format_map({'n': 1})",
        "'{:0100000000000}'.format(1)",
        "('{0:9000000}' * 30).format(1)",
        "('%9000000s' * 30) % range(30) | map('string') | list",
        "range(9999) | map('center', 10**6) | list",
        "range(9999) | map('center', 10**6) | join",
        "('\\t' * 10**6).expandtabs(10**6)",
        "('\\n' * 10**6) | indent(10**6)",
        "('\\n' * 10**6) | indent(goal * 500)",
        "(goal * 500) | wordwrap(1, wrapstring=goal * 500)",
        "('a.com ' * 10**5) | urlize(rel=goal * 500)",
        "goal.translate({120: goal * 500})",
        "range(9999) | list | tojson(indent=10**6)",
        pytest.param("('%(a)s' * 10**5) % {'a': goal}", marks=pytest.mark.seconds),
        pytest.param("('%(a)s' * 10**5) | format(a=goal)", marks=pytest.mark.seconds),
        "('{0}' * 10**5).format(goal)",
        "('{a}' * 10**5).format_map({'a': goal})",
    ],
)
def test_values_above_the_bound_are_not_computed(tmp_path: Path, text: str) -> None:
    template = read_prompt("p", written(tmp_path, f"{{{{ {text} }}}}"), "", VARIABLES)
    tracemalloc.start()
    try:
        with pytest.raises(PromptLimit, match="computes a value of more than 16777216 characters"):
            template.render(goal="x" * 2000)
        assert tracemalloc.get_traced_memory()[1] < 100e6  # bytes, of 200e6 to 790e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    [
        "{% set x %}{% for a in range(9999) %}{{ goal * 500 }}{% endfor %}{% endset %}",
        "{% filter upper %}{% for a in range(9999) %}{{ goal * 500 }}{% endfor %}{% endfilter %}",
        "{% macro f() %}{% for a in range(9999) %}{{ goal * 500 }}{% endfor %}{% endmacro %}{{ f() }}",
        "{% set x %}{% for a in range(99999) %}" + "constant" * 99 + "{% endfor %}{% endset %}",
        "{% for a in range(9999) | map('center', 10**6) %}{{ loop.length }}{% endfor %}",
        "{% macro f(n) %}{% set x = goal * 500 ~ n %}{{ f(n + 1) if n < 99 }}{{ x }}{% endmacro %}{{ f(0) }}",
        "".join(f"{{% set x{n} = goal * {500 + n} %}}" for n in range(99)),
        "{% set t = goal * 500 %}{% macro f(n) %}{% set x = t[n:] %}{{ f(n + 1) if n < 99 }}{{ x }}{% endmacro %}"
        "{{ f(1) }}",
    ],
)
def test_all_values_of_a_rendering_together_are_bounded(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_jinja, "_MOST", 1 << 25)
    template = read_prompt("p", written(tmp_path, text), "", VARIABLES)
    tracemalloc.start()
    try:
        with pytest.raises(PromptLimit, match="computes more than 33554432 characters"):
            template.render(goal="x" * 2000)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    [
        "'%*d' | format(300000000, 1)",
        "'%%%-*d' % (300000000, 1)",
        "'%.*f' % (300000000, 1)",
        "'{:{}}'.format(1, 300000000)",
        "'{:{w}}'.format(1, w='300000000')",
        "'{:3{w.n}}'.format(1, w=namespace(n='00000000'))",
        "'{a[}]:{w}}'.format(a={'}': 1}, w=300000000)",
        "'{:{w}}'.format_map({'': 1, 'w': 300000000})",
    ],
)
def test_a_width_that_is_an_argument_is_refused(tmp_path: Path, text: str) -> None:
    template = read_prompt("p", written(tmp_path, f"{{{{ {text} }}}}"), "", VARIABLES)
    with pytest.raises(PromptLimit, match="line 1: has a format whose width is an argument"):
        template.render()


@pytest.mark.parametrize(
    ("start", "step", "end"),
    [
        ("''", "ns.t + '<' + m + '>' + '\\n'", "ns.t"),
        ("''", "ns.t ~ '<' ~ m ~ '>' ~ '\\n'", "ns.t"),
        ("[]", "ns.t + ['<' + m + '>\\n']", "ns.t | join"),
    ],
    ids=["+", "~", "lists"],
)
def test_a_template_may_collect_a_long_conversation(start: str, step: str, end: str) -> None:
    loop = f"{{% for m in texts %}}{{% set ns.t = {step} %}}{{% endfor %}}"
    text = f"{{% set ns = namespace(t={start}) %}}{loop}{{{{ {end} }}}}"
    template = BoundedTemplate(bounded(ImmutableSandboxedEnvironment()), text)
    texts = [f"{number:0400}" for number in range(2000)]
    assert template.render({"texts": texts}) == "".join(f"<{text}>\n" for text in texts)


def test_sums_are_those_of_jinja() -> None:
    source = "{{ 1 + 2 + 3.5 }} {{ 'a' + 'b' + 'c' }} {{ [1] + [2] + [] }} {{ 7 - 2 + 3 }} {{ (1 + 2) * 2 + (3 + n) }}"
    environment = ImmutableSandboxedEnvironment()
    template = BoundedTemplate(bounded(environment), source)
    assert template.render({"n": 4}) == environment.from_string(source).render(n=4)


def test_bounds_leave_ordinary_templates_as_they_are(tmp_path: Path) -> None:
    text = (
        "{% macro tag(n) %}<{{ n ~ '|' ~ 2 }}>{{ caller() if caller is defined }}{% endmacro %}{{ tag(1) }}"
        "{% for x in range(3) if x %}{{ loop.index }}{{ x * 2 + 1 }}{% else %}none{% endfor %}"
        "{% call tag('a') %}in{% endcall %}{{ ('ab' * 2) | upper | center(6) }}{{ [1] + [2] }}{{ 2 ** 5 }}"
        "{% macro f(context, obj) %}{{ context ~ obj }}{% endmacro %}{{ f(obj=10**9, context=namespace(self=2).self) }}"
        "{{ (10**9) | tojson }}{{ 5 * 10**9 }}"
        "{{ (10**9) | string | join('-') }}{{ '%5.1f' % 2 }}{{ '{:3}'.format(10**9) }}"
        "{{ '20250101 %s' % 1 }}{{ '20250101 {}'.format(2) }}"
        """{{ '{"a": {"b": %s}} 100%% *(x) 20250101*' % 3 }}{{ '{{{}: {{%*9}}}}'.format('%*d') }}"""
        "{{ '%(a)2s (of 300000000) 300000000) %(a (300000000))s' % {'a': 4, 'a (300000000)': 5} }}"
    )
    prompt = read_prompt("p", written(tmp_path, text), "", VARIABLES)
    numbers = "21000000000100000000050000000001-0-0-0-0-0-0-0-0-0  2.0100000000020250101 120250101 2"
    formats = '{"a": {"b": 3}} 100% *(x) 20250101*{%*d: {%*9}} 4 (of 300000000) 300000000) 5'
    assert prompt.render() == f"<1|2>1325<a|2>in ABAB [1, 2]32{numbers}{formats}"
    long = "x" * (5 << 20)
    assert read_prompt("q", written(tmp_path, "{{ goal }}"), "", VARIABLES).render(goal=long) == long
