"""Data at its borders: each line gives a file and what the one line of the refusal says, or what is read of it."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_collab.data.examples import RowFormat, load_conversations, load_tasks
from megatron_collab.launch import prepare
from megatron_collab.runtime.process import EXIT_BAD_INPUT
from megatron_collab.train import main
from tests.helpers import byte_level_tokenizer, write_weights

MODEL = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "s"}


def task(text: str = "hi", **other: Any) -> dict[str, Any]:
    return {"prompt": [user(text)], "goal": "g", "user": "replay", "metadata": {"replay": ["so"]}, **other}


def jsonl(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def nested(depth: int) -> bytes:
    return jsonl(task(deep="X")).replace(b'"X"', b"[" * depth + b"]" * depth)


def parquet(**columns: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def arrow(*texts: str) -> bytes:
    out = io.BytesIO()
    table = pa.table({"prompt": texts, "goal": ["g"] * len(texts)})
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


GOOD = jsonl(task(), task("you"))
LATIN = json.dumps(task("né"), ensure_ascii=False).encode("latin-1") + b"\n"
FACTS = {"user": "reveal", "goal": json.dumps({"question": "q", "facts": ["f"]})}
BOOKED = {"user": "scripted/booking"}
TESTS = {"test": "def check(candidate):\n    pass\n"}
PASS_RATE = "reward.weights={pass_rate: 1}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_level_tokenizer(300).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(MODEL))
    write_weights(folder)
    return folder


def started(folder: Path, model: Path, name: str, content: bytes, stage: str, *settings: str) -> int | str:
    """The exit code of a run on a file with `content`; "started" where it would go on to train."""
    (folder / name).write_bytes(content)
    arguments = [f"run.dir={folder}/run", f"model.path={model}", f"data.train={folder}/{name}", f"train.stage={stage}"]
    rl = ["reward.weights={token_amount: -1}", "rollout.turn.max_new_tokens=64", "rollout.future.max_new_tokens=64"]
    settings = (*(rl if stage == "rl" else []), "rollout.context_length=256", *settings)

    def start(*_: object) -> None:
        raise StartedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "replace_by_torchrun", start)
        try:
            return main([*arguments, *settings])
        except StartedError:
            return "started"


class StartedError(Exception):
    """The run would become torchrun."""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        # Encodings
        ("d.jsonl", LATIN, " row 1: its byte 43, 0xe9, is not UTF-8; write the file in UTF-8; of a text in Latin-1"),
        ("d.jsonl", GOOD + LATIN, " row 3: its byte 43, 0xe9, is not UTF-8"),
        ("d.csv", "question,answer\nné,1\n".encode("latin-1"), " row 2: its byte 2, 0xe9, is not UTF-8"),
        ("d.txt", "né\n".encode("latin-1"), " row 1: its byte 2, 0xe9, is not UTF-8"),
        ("d.jsonl", GOOD.decode().encode("utf-16"), ": is text in UTF-16; write it in UTF-8, as iconv -f UTF-16"),
        ("d.jsonl", GOOD.decode().encode("utf-16-le"), ": is text in UTF-16; write it in UTF-8"),
        ("d.jsonl", GOOD.decode().encode("utf-32"), ": is text in UTF-32; write it in UTF-8"),
        ("d.jsonl", bytes(range(256)) * 40, " row 1: contains NUL bytes, so the file is damaged or not text; write it"),
        # Compression, and what has another name
        (
            "d.jsonl",
            gzip.compress(GOOD),
            ": is compressed with gzip, which its name does not say; rename it",
        ),
        (
            "d.jsonl",
            bz2.compress(GOOD),
            ": is compressed with bzip2, which its name does not say; rename it to",
        ),
        ("d.csv", lzma.compress(GOOD), ": is compressed with xz, which its name does not say; rename it to d.csv.xz"),
        ("d.jsonl.gz", GOOD, ": is not compressed as .gz says; correct its name, or copy it again"),
        ("d.jsonl.gz", gzip.compress(GOOD * 99)[:-9], ": its compressed content is cut off or damaged ("),
        ("d.jsonl.bz2", bz2.compress(GOOD * 99)[:-9], ": its compressed content is cut off or damaged ("),
        ("d.jsonl", b"PK\3\4" + b"x" * 60, ": is an archive (zip), or a workbook, not text; give the files in it"),
        ("d.jsonl", parquet(prompt=["a"], goal=["g"]), ": is Parquet, not text; rename it to d.parquet"),
        ("d.parquet", GOOD, ": cannot be read as parquet (Parquet magic bytes not found"),
        # Parquet and Arrow
        ("d.parquet", b"PAR1" + b"x" * 90 + b"PAR1", ": cannot be read as parquet ("),
        ("d.parquet", parquet(prompt=["a"], goal=["g"])[:-9], ": cannot be read as parquet ("),
        ("d.parquet", parquet(prompt=pa.array([], pa.string())), ": has no rows; give a source with some"),
        ("d.arrow", b"ARROW1\0\0" + b"x" * 90, ": cannot be read as arrow ("),
        ("d.arrow", arrow("a", "b")[:-200], ": cannot be read as arrow ("),
        ("d.arrow", arrow("aZZ").replace(b"ZZ", b"\xff\xfe"), ": cannot be read as arrow (In column 0: Invalid"),
        # Rows of JSON
        ("d.jsonl", b"null\n" + GOOD, " row 1: is null, not a JSON object; give an object with the columns"),
        ("d.jsonl", GOOD + b"null\n" + GOOD, " row 3: is null, not a JSON object"),
        ("d.jsonl", GOOD + b"\n\n5\n", " row 5: is a number, not a JSON object"),
        ("d.jsonl", GOOD + b"[1, 2]\n", " row 3: is a list, not a JSON object"),
        ("d.json", b'[{"question": "q", "answer": "a"}, "x"]', " row 2: is a text, not a JSON object"),
        ("d.json", b"[null]", " row 1: is null, not a JSON object"),
        ("d.jsonl", GOOD + b"\0\0\0\n", " row 3: contains NUL bytes"),
        ("d.jsonl", b"\0" * 5000, " row 1: contains NUL bytes"),
        ("d.jsonl", GOOD + nested(3_000), " row 3: nests lists and objects more than 100 deep; flatten or remove it"),
        ("d.jsonl", nested(101) + GOOD, " row 1: nests lists and objects more than 100 deep"),
        ("d.jsonl", nested(1_000_000), " row 1: nests lists and objects more than 100 deep"),
        ("d.json", b"[" * 100_000 + b"]" * 100_000, ": nests lists and objects more than 100 deep"),
        ("d.jsonl", GOOD + jsonl(task("\ud800")), r" row 3: holds \ud800, half a pair of surrogates; correct it"),
        ("d.jsonl", GOOD + b'{"a": "\xed\xa0\x80"}\n', " row 3: its byte 8, 0xed, is not UTF-8"),
        ("d.jsonl", GOOD + GOOD[:40], " row 3: is not JSON ("),
        ("d.jsonl", GOOD + jsonl(task(n=0)).replace(b"0", b"9" * 5000), " row 3: is not readable JSON ("),
        (
            "d.jsonl",
            b"null\n" + GOOD + b"5\n{\n" + LATIN + b"\0\n" * 4,
            " row 1: is null, not a JSON object; give an object with the columns (8 of 10 rows are refused; also rows "
            "4, 5, 6, 7 and 3 more)\n",
        ),
        ("d.jsonl", GOOD + b'{"goal": "g", "goal": "h"}\n', " row 3: names 'goal' twice in an object; remove one of"),
        ("d.jsonl", GOOD + b'{"m": [{"a": 1, "a": 1}]}\n', " row 3: names 'a' twice in an object; remove one of them"),
        ("d.json", b'[{"goal": "g", "goal": "h"}]', ": names 'goal' twice in an object; remove one of them"),
        ("d.jsonl", b"", ": has no rows; give a source with some"),
        # Tables
        ("d.csv", b"question,answer\nq,1\nr,2,3\n", " row 3: has 3 values for 2 columns; quote values"),
        ("d.csv", b'question,answer\n"q,1\nr,2\n', " row 2: cannot be read as a table (unexpected end of data)"),
        ("d.csv", b"question,question\nq,1\n", " row 1: names the column 'question' twice; rename one of them"),
        ("d.csv", b"question,answer\nq\0,1\n", " row 2: contains NUL bytes"),
        # Tasks
        ("d.jsonl", GOOD + jsonl(task(metadata="oops")), " row 3: metadata is a text; give an object {name: value}"),
        ("d.jsonl", jsonl(task(metadata=["oops"])), " row 1: metadata is a list; give an object"),
        (
            "d.jsonl",
            jsonl(task(metadata="[" * 3000 + "]" * 3000)),
            " row 1: nests lists and objects more than 100 deep",
        ),
        ("d.jsonl", jsonl(task(prompt=[user("a"), user("b")])), " row 1: the prompt has two messages of the user in a"),
        (
            "d.jsonl",
            jsonl(task(prompt=[user("a"), SYSTEM, user("b")])),
            " row 1: the prompt has a system message",
        ),
        ("d.jsonl", jsonl(task(prompt=[{"role": ["user"], "content": "a"}])), " row 1: prompt has a message of role ["),
        (
            "d.jsonl",
            jsonl({"conversations": [{"from": ["a"], "value": "b"}]}),
            " row 1: conversations has a message of role ['a']; choose one of system, user, assistant, tool",
        ),
        ("d.jsonl", jsonl(task(), *[task(goal="")] * 3), " row 2: goal is not a string with content (3 of 4 rows are"),
        # What its user, tools and metrics read
        (
            "d.jsonl",
            jsonl(task(), task(metadata={"replay": "so"}), task(metadata={})),
            " row 2: user replay cannot read it: metadata.replay must be a list of strings; correct it, or "
            "choose another user (2 of 3 rows are refused; also row 3)",
        ),
        (
            "d.jsonl",
            jsonl(task(**FACTS), task(**FACTS | {"goal": "g"})),
            " row 2: user reveal cannot read it: the goal must be a JSON object {question, facts}",
        ),
        ("d.jsonl", jsonl(task(user="reveal", goal="[" * 5000)), " row 1: user reveal cannot read it: the goal must"),
        (
            "d.jsonl",
            jsonl(task(**BOOKED)),
            " row 1: user scripted/booking cannot read it: the goal must be a JSON object with strings for ",
        ),
        # Code that a row names
        *(
            (
                "d.jsonl",
                jsonl(task(), task(user=path)),
                f" row 2: the user {path!r} is no name, and rows name no code; ",
            )
            for path in ("os:getcwd", "./mine.py:User", "a.b.User", "scripted/./mine.py:reply", "scripted/os.path:join")
        ),
        # Longer than the model's positions
        ("d.jsonl", jsonl(task("x" * 900), task("y" * 900)), ": all rows are left out: 2 of more than 255 tokens"),
    ],
)
def test_a_file_that_cannot_be_trained_on_is_refused_in_one_line(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    assert started(tmp_path, model, name, content, "rl") == EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"megatron-collab: data.train={tmp_path}/{name}{message}")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"test": ["assert True"]}, "metadata.test is not a string; give the code that pass_rate runs"),
        (TESTS, "metadata.test defines check(candidate), but metadata.entry_point is not set; set it"),
    ],
)
def test_tests_that_cannot_be_run_are_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], metadata: dict[str, Any], message: str
) -> None:
    content = jsonl(task(metadata={"replay": ["so"], **metadata}))
    assert started(tmp_path, model, "d.jsonl", content, "rl", PASS_RATE) == EXIT_BAD_INPUT
    assert f"d.jsonl row 1: reward.weights.pass_rate cannot read it: {message}" in capsys.readouterr().err


@pytest.mark.processes
def test_metadata_that_a_prompt_of_the_user_lacks_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "user.j2").write_text("{{ goal }} {{ metadata.mood }}")
    content = jsonl(*(task(user="llm", metadata=metadata) for metadata in ({"mood": "glad"}, {})))
    settings = ("user.model=policy", f"user.prompt={tmp_path}/user.j2")
    assert started(tmp_path, model, "d.jsonl", content, "rl", *settings) == EXIT_BAD_INPUT
    message = f"row 2: user llm cannot read it: prompt={tmp_path}/user.j2 line 1: UndefinedError: 'dict object' has no"
    assert message in capsys.readouterr().err


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "content", "stage", "message"),
    [
        ("d.jsonl.gz", gzip.compress(GOOD), "rl", "2 rows, read as task"),
        ("d.jsonl", b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n"), "rl", "2 rows, read as task"),
        ("d.jsonl", b"\n" + GOOD + b"\n  \n" + GOOD, "rl", "4 rows, read as task"),
        ("d.jsonl", nested(98), "rl", "1 rows, read as task"),
        ("d.jsonl", jsonl(task(level=1), task(level="hard"), task(level={"a": 1})), "rl", "3 rows, read as task"),
        ("d.jsonl", jsonl(task("a\0b")), "rl", "1 rows, read as task"),
        (
            "d.jsonl",
            jsonl(task("x" * 900), task()),
            "rl",
            "1 rows, read as task (it has prompt, goal); left out: 1 of ",
        ),
        (
            "d.jsonl",
            jsonl(*({"messages": [user("a"), assistant(text)]} for text in ("b" * 600_000, "b"))),
            "sft",
            "1 rows, read as messages (it has messages); left out: 1 of more than 256 tokens",
        ),
        (
            "d.jsonl",
            jsonl(task(id="x"), task(id="y"), task(id="x"), task(id="x")),
            "rl",
            "repeated ids: 2 rows have the id of an earlier one, the first is row 3 that of row 1 ('x')",
        ),
        ("d.jsonl", jsonl(task(id="../../etc"), task(id="<b>\n" * 999)), "rl", "2 rows, read as task"),
    ],
)
def test_a_file_that_can_be_trained_on_is(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, stage: str, message: str
) -> None:
    context = ("rollout.context_length=8192",) if stage == "sft" else ()  # the model has 256 positions
    assert started(tmp_path, model, name, content, stage, *context) == "started"
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if f"data.train={tmp_path}/{name}: {message}" in line]
    assert len(lines) == 1 and err == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("weight: 2", "weight=2: not read, there is no other source"),
        ("epochs: 3", "epochs=3: not read, there is no other source"),
        ("from_step: 1000", None),
    ],
)
def test_settings_of_a_source_that_change_nothing_are_named(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], settings: str, message: str | None
) -> None:
    source = f"data.train={{source: {tmp_path}/d.jsonl, {settings}}}"
    code = started(tmp_path, model, "d.jsonl", GOOD, "rl", source, "train.steps=10")
    out, err = capsys.readouterr()
    if message is None:  # refused: no source has rows
        assert code == EXIT_BAD_INPUT and "no source has rows for step 0" in err
        return
    assert code == "started"
    assert out.splitlines()[1:] == [f"data.train={tmp_path}/d.jsonl: {message}", "starting 1 rank"]


@pytest.mark.processes
def test_a_split_that_a_reader_of_ones_own_does_not_read_is_named(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "read.py").write_text(
        "from megatron_collab.types import Message, Task\n"
        "def lines(path):\n"
        "    for line in path.read_text().splitlines():\n"
        "        yield Task(line, (Message('user', line),), line, '', 'replay', {'replay': ['so']})\n"
        "def fails(path):\n"
        "    return {}['tasks']\n"
    )
    source = f"data.train={{source: {tmp_path}/d.txt, split: 'train[:1]'}}"
    reader = f"data.format={tmp_path}/read.py"
    assert started(tmp_path, model, "d.txt", b"a\nb\n", "rl", source, f"{reader}:lines") == "started"
    message = "split=train[:1]: not read, data.format reads all of the source"
    assert f"data.train={tmp_path}/d.txt: {message}" in capsys.readouterr().out.splitlines()
    assert started(tmp_path, model, "d.txt", b"a\nb\n", "rl", f"{reader}:fails") == EXIT_BAD_INPUT
    message = f"data.train={tmp_path}/d.txt: data.format={reader[12:]}:fails fails (KeyError"
    assert message in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "seconds", "fault"),
    [
        pytest.param("while True: yield task", 2.0, "does not finish within 2 s", marks=pytest.mark.slow),
        ("while True: pass\n    yield task", 2.0, "does not finish within 2 s"),
        ("yield task; bytes(1 << 35)", 60.0, "takes more than 4 GiB of memory"),
        ("yield task; os.abort()", 60.0, "ends the process with code -6"),
        ("yield lambda: task", 60.0, "fails (AttributeError: "),
    ],
)
def test_a_reader_of_ones_own_has_limits(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    seconds: float,
    fault: str,
) -> None:
    (tmp_path / "read.py").write_text(
        "import os\n"
        "from megatron_collab.types import Message, Task\n"
        "task = Task('a', (Message('user', 'hi'),), 'g', '', 'replay', {'replay': ['so']})\n"
        f"def rows(path):\n    {code}\n"
    )
    monkeypatch.setattr("megatron_collab.data.examples.READER_SECONDS", seconds)
    reader = f"data.format={tmp_path}/read.py:rows"
    assert started(tmp_path, model, "d.txt", b"a\n", "rl", reader) == EXIT_BAD_INPUT
    err = capsys.readouterr().err
    assert err.startswith(f"megatron-collab: data.train={tmp_path}/d.txt: {reader} {fault}") and err.count("\n") == 1


def test_ranks_take_the_tasks_that_a_reader_gave_at_the_start(tmp_path: Path) -> None:
    """It is called once; whatever it would give, or never give, in another process."""
    (tmp_path / "read.py").write_text(
        "from megatron_collab.types import Message, Task\n"
        "def rows(path):\n"
        "    text = path.read_text()\n"
        "    while text == 'never': pass\n"
        "    return [Task('a', (Message('user', text),), 'g', '', 'replay', {1: (2,)})]\n"
    )
    file, format = tmp_path / "d.txt", RowFormat(f"{tmp_path}/read.py:rows")
    file.write_text("hi")
    at_start = load_tasks(file, "data.train", format, tmp_path / "cache")
    file.write_text("never")
    in_rank = load_tasks(file, "data.train", format, tmp_path / "cache", calls_reader=False)
    assert list(in_rank) == list(at_start) and in_rank[0].metadata == {1: (2,)}
    assert in_rank.rows.fingerprint == at_start.rows.fingerprint
    file.write_text("new")
    (reread,) = load_tasks(file, "data.train", format, tmp_path / "cache")
    assert reread.messages[0].content == "new"


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.parquet"])
def test_values_stay_as_they_were_written(tmp_path: Path, name: str) -> None:
    """Dates, times, and numbers with zeros in front or behind: no column gets a type of its own."""
    answers = ["2024-01-02", "2024-01-03T10:00:00Z", "007", "1.50", "NA"]
    rows = [{"question": "q", "answer": answer} for answer in answers]
    contents = {
        "d.jsonl": jsonl(*rows),
        "d.json": json.dumps(rows, indent=1).encode(),
        "d.csv": ("question,answer\n" + "".join(f"q,{answer}\n" for answer in answers)).encode(),
        "d.parquet": parquet(question=["q"] * len(answers), answer=answers),
    }
    (tmp_path / name).write_bytes(contents[name])
    assert [loaded.answer for loaded in load_tasks(tmp_path / name)] == answers


def test_a_row_has_what_it_was_given_and_no_more(tmp_path: Path) -> None:
    """Neither do rows get the entries of others, nor is a column that comes late lost."""
    metadata: list[dict[str, Any]] = [{}, {"a": None, "t": "2024-01-02"}, {"a": {"b": [1]}}, {"a": 1.5, "n": 10**30}]
    rows = [task(metadata={"replay": ["so"], **extra}) for extra in metadata for _ in range(700)]
    (tmp_path / "d.jsonl").write_bytes(jsonl(*rows, task(late="x")))
    tasks = list(load_tasks(tmp_path / "d.jsonl"))
    assert [dict(loaded.metadata) for loaded in tasks] == [row["metadata"] for row in rows] + [task()["metadata"]]
    conversation = {"messages": [user("a"), {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]}
    (tmp_path / "c.jsonl").write_bytes(jsonl(conversation))
    assert [[message.content for message in messages] for messages in load_conversations(tmp_path / "c.jsonl")] == [
        ["a", "b"]
    ]


def test_dates_and_decimals_of_a_table_are_texts(tmp_path: Path) -> None:
    times = pa.array([86_400_000_000], pa.timestamp("us"))
    content = parquet(question=["q"], answer=pa.array([19_724], pa.date32()), at=times)
    (tmp_path / "d.parquet").write_bytes(content)
    assert [loaded.answer for loaded in load_tasks(tmp_path / "d.parquet")] == ["2024-01-02"]


@pytest.mark.processes
def test_code_in_the_folder_of_a_data_set_is_not_run(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name in ("tasks", "__init__", "dataset"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    assert started(tmp_path, model, "tasks/train.jsonl", GOOD, "rl", f"data.train={folder}") == "started"
    assert "2 rows, read as task" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


def test_a_file_is_parsed_once_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others map what the first wrote; what was being written when its process ended is written anew."""
    from megatron_collab.data import storing

    (tmp_path / "d.jsonl").write_bytes(GOOD)
    with monkeypatch.context() as patch:
        patch.setattr(storing.files, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load_tasks(tmp_path / "d.jsonl", cache=tmp_path / "cache")
    first = load_tasks(tmp_path / "d.jsonl", cache=tmp_path / "cache")

    def parse(file: Path) -> Any:
        raise AssertionError(f"{file} is parsed a second time by {os.getpid()}")

    monkeypatch.setattr(storing, "parse", parse)
    assert list(load_tasks(tmp_path / "d.jsonl", cache=tmp_path / "cache")) == list(first)


def test_stored_rows_that_are_damaged_are_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither file is in its place before its content is on the disk."""
    from megatron_collab.data.storing import stored_rows

    synced, fsync = list[str](), os.fsync

    def recorded(number: int) -> None:
        synced.append(Path(f"/proc/self/fd/{number}").readlink().name.partition(".")[2])
        fsync(number)

    monkeypatch.setattr(os, "fsync", recorded)
    (tmp_path / "d.jsonl").write_bytes(GOOD * 50)
    stored_rows(str(tmp_path / "d.jsonl"), "here", cache := tmp_path / "cache")
    assert synced == ["arrow.tmp", "json.tmp"]
    arrow, about = next(cache.glob("*.arrow")), next(cache.glob("*.json"))
    whole = {arrow: (content := arrow.read_bytes()), about: about.read_bytes()}
    middle = content[:100] + bytes(len(content) - 200) + content[-100:]
    damages = [(arrow, part) for part in (b"", bytes(len(content)), content[:-5], middle)]
    damages += [(about, part) for part in (b"", b"{}", b"[]", b"null", b"\xff", b'{"columns": 5}', bytes(30))]
    for file, damaged in damages:
        file.write_bytes(damaged)
        assert len(stored_rows(str(tmp_path / "d.jsonl"), "here", cache)) == 50 * GOOD.count(b"\n"), damaged
        assert {file: file.read_bytes() for file in whole} == whole, damaged
