"""Keys are redacted from all output: texts, settings, the folder of a run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest

import megatron_collab
from megatron_collab.config import Config, run_record
from megatron_collab.launch.validate import refuse_keys
from megatron_collab.llm.answer import Field, LlmError
from megatron_collab.llm.client import LlmClient
from megatron_collab.observability.run import Run
from megatron_collab.runtime.redact import LONGEST_EXCERPT, excerpt, redact
from megatron_collab.settings import ConfigError
from megatron_collab.types import Conversation, Ending, Future, Group, Message, Missing, Reward, Rollout, Task
from tests.helpers import refused
from tests.llm.endpoint import Endpoint, fails

KEY, SECRET = "sesame.open|(please)", 'quoted "and\\slashed'  # what a pattern and JSON would write otherwise


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "OPENAI_API_KEY": KEY,
        "MY_SECRET": SECRET,
        "PIN_TOKEN": "1234567",
        "KEYBOARD": "querty-us",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"Incorrect API key provided: {KEY}.", "Incorrect API key provided: ***."),
        (f"{SECRET}{KEY}", "******"),
        ("no key sk-proj-abcdefgh12345678 there", "no key *** there"),
        ("Authorization: Bearer abc123.def-456=", "Authorization: Bearer ***"),
        ("http://me:open@host/v1?a=1&api_key=xyz&b=2", "http://***@host/v1?a=1&***&b=2"),
        ("1234567 on a querty-us: too short, no name of a key", "1234567 on a querty-us: too short, no name of a key"),
        ("the bearer certificates of task-sk-learn", "the bearer certificates of task-sk-learn"),
    ],
)
def test_a_text_without_its_keys(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_an_excerpt_is_bounded_marked_and_has_no_part_of_a_key() -> None:
    assert excerpt("short") == "short" and excerpt("y" * LONGEST_EXCERPT) == "y" * LONGEST_EXCERPT
    text = "y" * (LONGEST_EXCERPT - 3) + KEY
    assert excerpt(text) == "y" * (LONGEST_EXCERPT - 3) + "***", "cut after it is redacted"
    cut = excerpt(text + "more")
    assert len(cut) == LONGEST_EXCERPT and cut.endswith("yyy… [cut]")
    assert excerpt(cut) == cut and excerpt("half a pair \ud800") == "half a pair ?"


# Forms that no variable of the environment tells: none of them was ever valid.
_LONG = "Ab1dE2fG3hI4jK5lM6nO7pQ8rS9tU0vW1xY2z"


@pytest.mark.parametrize(
    "key",
    [
        *("sk-ant-api03-" + _LONG, "sk-or-v1-" + _LONG, "xai-" + _LONG, "pplx-" + _LONG, "csk-" + _LONG),
        *("AIza" + _LONG, "AQ." + _LONG, "ya29." + _LONG, "GOCSPX-" + _LONG),
        *("hf_" + _LONG, "gsk_" + _LONG, "r8_" + _LONG, "fw_" + _LONG, "npm_" + _LONG, "nvapi-" + _LONG),
        *("ghp_" + _LONG, "gho_" + _LONG, "github_pat_11AB_" + _LONG, "glpat-" + _LONG, "pypi-" + _LONG),
        *("tgp_v1_" + _LONG, "wandb_v1_" + _LONG, "lsv2_pt_" + _LONG, "tvly-dev-" + _LONG, "sk_live_" + _LONG),
        *("AKIAIOSFODNN7EXAMPLE", "ABSK" + _LONG, "bedrock-api-key-" + _LONG, "dapi" + "0123456789abcdef" * 2),
        *("xoxb-" + _LONG, f"SG.{_LONG}.{_LONG}", f"eyJhbGciOiJIUzI1.eyJ{_LONG}.{_LONG}", "do" + "p_v1_" + _LONG),
        f"-----BEGIN RSA PRIVATE KEY-----\n{_LONG}\n{_LONG}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\\n{_LONG}\\n-----END PRIVATE KEY-----",  # as the JSON of a service account
    ],
)
def test_keys_of_services_are_known_by_their_form(key: str) -> None:
    assert redact(f"before {key}, 'after' {key}") == "before ***, 'after' ***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic ***"),
        ("{'Authorization': 'Basic dXNlcjpwYXNz', 'a': 1}", "{'Authorization': 'Basic ***', 'a': 1}"),
        ("sent Basic dXNlcjpwYXNzMQ== there", "sent Basic *** there"),
        ('"x-api-key": "0a1b2c3d4e5f"', '"x-api-key": "***"'),
        ("(b'api-key', b'0a1b2c3d4e5f')", "(b'api-key', b'0a1b2c3d4e5f')"),  # a pair is no assignment
        ("Ocp-Apim-Subscription-Key: 0a1b2c3d4e5f", "Ocp-Apim-Subscription-Key: ***"),
        ("x-goog-api-key=0a1b2c3d4e5f", "x-goog-api-key=***"),
        ("Cookie: session=abc; id=12", "Cookie: ***"),
        ("Set-Cookie: session=abc", "Set-Cookie: ***"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "AWS_SECRET_ACCESS_KEY=***"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "aws_secret_access_key = ***"),
        ('"AZURE_API_KEY": "0a1b2c3d4e5f"', '"AZURE_API_KEY": "***"'),
        ("GATEWAY_KEY_2: 0a1b2c3d4e5f", "GATEWAY_KEY_2: ***"),
        ("AccountName=a;AccountKey=0a1b2c3d4e5f==;x", "AccountName=a;AccountKey=***;x"),
        ("password: hunter2hunter2", "password: ***"),
        ("api_key='0a1b2c3d4e5f'", "api_key='***'"),
        ("https://a.blob/x?sv=1&sig=abc%3D", "https://a.blob/x?sv=1&***"),
        ("https://a.s3/x?X-Amz-Signature=abc", "https://a.s3/x?***"),
    ],
)
def test_what_follows_the_name_of_a_key_is_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "a basic understanding of JavaScript, basic arithmetic2, bearer of bad news",
        "Authorization: required for every request; authorization=none",
        "the cookie: a small cake; cookies: none",
        "api key: ask your administrator; password: required; a password = something secret",
        "max_tokens=100000000, eos_token: 151645999, token: 12345678901, llm/tokens 123456789",
        "tokens_per_minute=100000000 requests_per_minute=10000000",
        "pa-2024-budget-review, task-sk-learn-and-others, hf_transformers_4_57, fw_bw_pass_0123456789_again",
        "commit 0123456789abcdef0123456789abcdef01234567, sha256:0123456789abcdef0123456789abcdef",
        "https://host:8080/v1?key_count=3&page=2, ratio 3://4, see http://[::1]:30000/health",
        "OPENAI_API_KEY is not set; export OPENAI_API_KEY=$YOUR_KEY",
        "-----BEGIN CERTIFICATE----- MIIB -----END CERTIFICATE-----",
        "The quick brown fox costs $3.50 on 2026-11-23; x = y + 2 and f_key(a) == b_key[1].",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("part", ["sk-", "eyJ-", "://a:", "a:", "password: ", "api_key=", "Cookie: a=b; ", "Basic "])
def test_no_text_takes_long(part: str) -> None:
    """A search in quadratic time would take minutes, and a policy may write anything."""
    began = time.process_time()
    redact("://" + part * (400_000 // len(part)))
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    "name",
    [
        *("AWS_BEARER_TOKEN_BEDROCK", "VERTEXAI_CREDENTIALS", "GATEWAY_KEY_2", "DB_PASSWD", "SMTP_PASS", "GITHUB_PAT"),
        *(
            "AWS_SECRET_ACCESS_KEY",
            "AZURE_STORAGE_CONNECTION_STRING",
            "SESSION_COOKIE",
            "openai_apikey",
            "DEEPINFRAKEY",
        ),
    ],
)
def test_the_value_of_a_variable_with_the_name_of_a_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = 'open "it"\\now/é'
    monkeypatch.setenv(name, value)
    written = [value, repr(value), json.dumps(value), quote(value, safe="")]
    assert redact("|".join(written)) == "***|'***'|\"***\"|***"


@pytest.mark.parametrize(
    "name",
    [
        *("SSL_KEY_FILE", "HF_TOKEN_PATH", "AWS_ACCESS_KEY_ID", "NCCL_IB_PKEY", "TOKENIZERS_PARALLELISM", "PWD"),
        *("SSH_AUTH_SOCK", "KEYBOARD", "COMPASS", "SECRETS_DIR"),
    ],
)
def test_the_value_of_another_variable_is_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "something-else")
    assert redact("something-else") == "something-else"


PRINTS = """
import asyncio, gc, logging, sys, threading, warnings
from megatron_collab.runtime.redact import redact_output

redact_output()
redact_output()

def fails(*_):
    raise ValueError("said {key}")  # {key}

class Dying:
    __del__ = fails

async def forgotten():
    await asyncio.wait([asyncio.create_task(asyncio.to_thread(fails))])

print("printed {key}")
logging.getLogger("ray").error("logged {key}")
warnings.warn("warned {key}")
thread = threading.Thread(target=fails)
thread.start()
thread.join()
asyncio.run(forgotten())
gc.collect()
dying = Dying()
del dying
sys.stderr.writelines(["written {key}\\n"])
fails()  # {key}
"""


@pytest.mark.processes
def test_nothing_that_python_prints_holds_a_key(tmp_path: Path) -> None:
    """Uncaught errors of the main thread, another thread, a task, a destructor; logs; source lines."""
    key = "correct-horse-battery"
    script = tmp_path / "prints.py"
    script.write_text(PRINTS.replace("{key}", key))
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "MY_SECRET": key}, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == "printed ***\n"
    assert key not in done.stderr
    for line in (
        "logged ***",
        "UserWarning: warned ***",
        "Exception in thread",
        "Task exception was never retrieved",
        "Exception ignored in",
        "written ***\n",
        "fails()  # ***\n",
    ):
        assert line in done.stderr, line
    assert done.stderr.count("ValueError: said ***") == 4
    assert done.stderr.count('raise ValueError("said ***")  # ***') >= 4


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "where"),
    [
        ("megatron_collab.train", "megatron_collab.launch.validate.load"),
        pytest.param("megatron_collab.evaluate", "megatron_collab.launch.evaluation.load", marks=pytest.mark.slow),
        pytest.param("megatron_collab.commands", "megatron_collab.commands.report.main", marks=pytest.mark.slow),
        pytest.param("megatron_collab.launch.slurm", "megatron_collab.runtime.network.address", marks=pytest.mark.slow),
        ("megatron_collab.launch.torchrun", "torch.distributed.run.run"),
    ],
)
def test_no_program_prints_a_key(module: str, where: str, tmp_path: Path) -> None:
    """Each ends with an unexpected error whose message and source line contain the key."""
    owner, _, name = where.rpartition(".")
    # Read at the start of every Python process: in its place the function fails.
    (tmp_path / "failing.py").write_text(f"def {name}(*_, **__):\n    raise KeyError('{KEY}')  # {KEY}\n")
    patch = f"""
import importlib.abc, importlib.machinery, sys

class After(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "{owner}":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            import failing
            module.{name} = failing.{name}
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, After())
"""
    (tmp_path / "sitecustomize.py").write_text(patch)
    arguments = {
        "megatron_collab.commands": ["report", "x"],
        "megatron_collab.launch.slurm": ["address", "experiment=gsm8k"],
        "megatron_collab.launch.torchrun": ["x.py"],
    }
    words = arguments.get(module, ["experiment=gsm8k", "launch.nproc_per_node=1", f"run.dir={tmp_path}/run"])
    path = os.pathsep.join([str(tmp_path), str(Path(megatron_collab.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "OPENAI_API_KEY": KEY}
    done = subprocess.run([sys.executable, "-m", module, *words], env=environment, capture_output=True, text=True)
    assert "raise KeyError('***')  # ***" in done.stderr and "KeyError: '***'" in done.stderr, done.stderr[-2000:]
    assert "sesame" not in done.stderr + done.stdout


def test_a_key_that_begins_like_another_is_hidden_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "abcdefgh")
    monkeypatch.setenv("B_KEY", "abcdefghijkl")
    assert redact("abcdefghijkl abcdefgh") == "*** ***"


@pytest.mark.parametrize(
    ("override", "name", "key"),
    [
        ('user.api_base="http://me:letmein@host/v1"', "user.api_base=http://***@host/v1", "letmein"),
        ('reward.judge.api_base="http://host/v1?api_key=xyz"', "reward.judge.api_base", "xyz"),
        (f'user.model="openai/{KEY}"', "user.model", KEY),
    ],
)
def test_a_setting_that_holds_a_key_is_refused_and_not_shown(override: str, name: str, key: str) -> None:
    line = refused(override)
    assert re.match(rf"{re.escape(name)}: contains a (key|user) or a password; remove it,? and set ", line), line
    assert key not in line


def test_settings_in_lists_and_free_groups_are_looked_at() -> None:
    refuse_keys({"rollout": {"tools": ["calculator"]}, "launch": {"timeout": 1.0, "interface": None}})
    for settings in ({"rollout": {"tools": ["a", KEY]}}, {"reward": {"metrics": {"accuracy": {"note": KEY}}}}):
        with pytest.raises(ConfigError, match=r"^(rollout\.tools|reward\.metrics\.accuracy\.note): contains a key"):
            refuse_keys(settings)


def test_no_file_of_a_run_holds_a_key(tmp_path: Path) -> None:
    """The real writers, and errors of an endpoint that quotes the key."""

    async def ask() -> str:
        long = "x" * 285  # the reason is cut within the key
        async with Endpoint(fails(401, f"{long} not {KEY}, {SECRET}")) as endpoint:
            with pytest.raises(LlmError) as error:
                await LlmClient().ask(endpoint.config(), [{"role": "user", "content": "?"}], [Field("score", float)])
            return str(error.value)

    why = asyncio.run(ask())
    assert "not ***" in why
    assert KEY[:4] not in why
    task = Task("t", (Message("user", "a table ."),), "goal", "answer", "llm")
    start = Conversation(task.messages, (1,)).add_messages([Message("assistant", f"say {KEY}")], ())
    futures = [
        Future(start.end(Ending.ERROR, f"user: {KEY} {SECRET}"), {"accuracy": Missing(why)}),
        Future(start.end(Ending.USER_DONE), {"accuracy": Missing(f"refused: Bearer {SECRET}")}),
    ]
    group = Group(task, (Rollout(start, tuple(futures), Reward(Missing(KEY))),))
    config = Config()
    config.run.dir, config.train.steps, config.user.api_base = str(tmp_path), 1, f"http://me:{KEY}@host"
    with Run(run_record(config), config.train, 0, {}, {}) as run:
        for when in ("before", "after"):
            run.evaluation(when, "", 0, {"reward": 1.0}, [group])
        run.transcripts(0, [group])
        run.record(0, {"reward": 1.0, "reward_se": 0.0})
        run.finish()
    written = {file.name: file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file()}
    for file in tmp_path.rglob("*.parquet"):  # whose content is compressed
        written[file.name] = str(pq.read_table(file).to_pylist())
    transcript, evaluation = "step_000000.parquet", "eval_before.parquet"
    assert {"config.json", transcript, evaluation, "report.html", "result.json"} <= written.keys()
    assert all("say ***" in written[name] for name in (transcript, evaluation, "report.html"))
    for name, text in written.items():
        for part in ("sesame.open", "slashed"):
            assert part not in text, name
