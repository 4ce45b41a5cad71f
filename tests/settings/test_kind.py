"""Addresses, headers and paths to write: which texts are of the kind, in one table each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import compose
from megatron_collab.settings import WRITTEN_FILE, WRITTEN_FOLDER, ConfigError, EndpointConfig, build, check_path
from megatron_collab.settings.kind import address_fault, header_fault, is_blank

LONG = "a" * 64
ADDRESSES = (
    "http://127.0.0.1:8000/v1 http://[::1]:8000/v1 https://api.example.com/v1 HTTP://H http://my_service:80 "
    "http://müller.example/v1 https://例え.jp/v1 http://localhost http://host.:1 http://[::ffff:1.2.3.4] "
    "http://a-b.c:65535/x/y?api-version=2 http://0.0.0.0:8000/v1 http://h/a%20b/ü"
)
NO_ADDRESSES = {
    "must begin with http:// or https://": "notaurl localhost:8000 //h/v1 http:/h http:h http//h file:///etc/passwd "
    "file:x ftp://h ws://h unix:///run/x os.environ/BASE 'http://h' 127.0.0.1:8000/v1",
    "names no host": "http:// http:///v1 https://?x=1 http://:8000",
    "is no host with a port; give": "http://h: http://h:/v1 http://h:-1 http://h:\uff18 http://HOST:PORT/v1 "
    "https://https://h http://h:80,http://g:80 http://[::1]x:80 http://h:80:90",
    "is no host with a port; put IPv6 in brackets": "http://::1:8000 http://fe80::1 http://[::1 http://::1]",
    "does not exist; give one from 1 to 65535": "http://h:0 http://h:99999/v1 http://h:65536 http://h:" + "9" * 5000,
    "contains a user or a password": "http://u:p@h http://token@h/v1 https://:p@h",
    "is neither a host's name nor an IP address": "http://[fe80::1%25eth0]:80 http://[] http://[1.2.3.4] http://1.2.3 "
    f"http://999.1.1.1 http://2130706433 http://0x7f000001 http://a..b http://-a.b http://{LONG} http://* http://a!b",
    "contains a character": r"http://h/{x} http://<host>:80 http://h\v1 http://h#x",
}
NO_ADDRESSES_WITH_BLANKS = ["http://h ", "http://h /v1", "http://h\n", "http://h\0", "http://\u200bh", "http://h\u2028"]


@pytest.mark.parametrize("text", ADDRESSES.split())
def test_an_address_is_accepted(text: str) -> None:
    assert address_fault(text) == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *((text, reason) for reason, texts in NO_ADDRESSES.items() for text in texts.split()),
        *((text, "contains a character that no address has") for text in NO_ADDRESSES_WITH_BLANKS),
    ],
)
def test_what_is_no_address_is_refused(text: str, reason: str) -> None:
    assert reason in address_fault(text)


def settings_fault(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        build(EndpointConfig, settings, "user.")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_header_that_can_be_sent_is_accepted() -> None:
    headers = {"X-Team": "blue", "x_a": "a\tb", "Accept": "text/*; q=0.5", "X.1": "os.environ/NAME", "X~": "'a, b'"}
    assert build(EndpointConfig, {"headers": headers, "api_base": "http://[::1]:8000/v1"}, "user.").headers == headers


@pytest.mark.parametrize(
    "value", ["a\n", "a\r\nX: y", "é", "日", "a\0b", " a", "a ", "", " ", "\n", "\x7f", "a\u2028b"]
)
def test_a_value_of_a_header_that_cannot_be_sent_is_refused(value: str) -> None:
    assert header_fault(value)
    assert settings_fault({"headers": {"X-A": value}}).startswith("user.headers.X-A=")


@pytest.mark.parametrize("name", ["", " ", "X A", "X:A", "Ü", "a\n", "(a)", "a\0", "X-A:"])
def test_a_name_of_a_header_that_cannot_be_sent_is_refused(name: str) -> None:
    assert settings_fault({"headers": {name: "a"}}).startswith("user.headers.")


def test_the_user_of_an_address_is_not_shown() -> None:
    assert "secret" not in settings_fault({"api_base": "http://me:secret@h/v1"})


@pytest.mark.parametrize("text", ["", " ", "\n", "\t", "\xa0", "\u3000", "\u200b", "\ufeff", "\u2060 ", "\x1b"])
def test_a_text_that_shows_nothing_is_blank(text: str) -> None:
    assert is_blank(text) and not is_blank(f"{text}a{text}")
    if text:
        assert "is blank; give a value" in settings_fault({"model": text})


PLACES = ["new", "new/deep/folder", "ü b/[x]*#%", "folder", "folder/" + "x" * 200, "link", "/".join(["y" * 200] * 15)]
NO_FOLDERS = {
    "file": "it is not a folder",
    "file/x": "/file is not a folder",
    "file/x/y": "/file is not a folder",
    "dangling": "it is not a folder",
    "fifo": "it is not a folder",
    "n" * 256: "File name too long",
    "loop/x": "Too many levels of symbolic links",
    "/dev/null": "it is not a folder",
    "/proc": "No such file or directory: /proc",
    "/proc/self/x": "No such file or directory: /proc/self",
    "/sys/x": ": /sys",
}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


def test_a_folder_that_can_be_written_is_accepted_and_nothing_is_written(places: Path) -> None:
    before = sorted(places.rglob("*"))
    for place in PLACES:
        check_path("llm.cache", place, WRITTEN_FOLDER)
        check_path("llm.cache", places / place, WRITTEN_FOLDER)
    assert sorted(places.rglob("*")) == before


@pytest.mark.parametrize("place", NO_FOLDERS)
def test_a_folder_that_cannot_be_written_is_refused(places: Path, place: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_path("llm.cache", place, WRITTEN_FOLDER)
    assert str(error.value).startswith(f"llm.cache={place}: cannot be used (")
    assert f"{NO_FOLDERS[place]}" in str(error.value) and str(error.value).endswith("; choose another llm.cache")


def test_a_file_is_written_where_no_folder_is(places: Path) -> None:
    for place in ("file", "new", "new/x.jsonl", "/dev/null"):
        check_path("--out", place, WRITTEN_FILE)
    for place in ("folder", ".", "file/x", "/proc/x", "dangling", "link"):
        with pytest.raises(ConfigError, match=rf"^--out={place}: cannot be used \(.*\); choose another --out$"):
            check_path("--out", place, WRITTEN_FILE)


@pytest.mark.parametrize("place", ["/", "//", "/./", "/tmp/..", "~nobody", "~nobody/x", "a\0b", " ", "\u200b"])
def test_a_path_that_no_run_is_to_have_is_refused(place: str) -> None:
    for kind in (WRITTEN_FILE, WRITTEN_FOLDER):
        with pytest.raises(ConfigError, match=r"^run.dir=[^\n\0]*: (is|only|contains) "):
            check_path("run.dir", place, kind)


def test_the_home_folder_is_expanded() -> None:
    assert compose(["run.dir='~/runs/ü'", "data.train=x", "model.path=m"]).run.dir == f"{Path.home()}/runs/ü"
    assert compose(['run.dir="~"', "data.train=x", "model.path=m"]).run.dir == str(Path.home())
