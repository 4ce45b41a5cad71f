"""A stand-in for the Hugging Face Hub's HTTP API on loopback, as far as huggingface_hub and datasets use it.

`with serving() as hub: hub.add("model", "owner/name", folder)`; processes that use it need
`hub.environment(home)`, since both libraries read HF_ENDPOINT when they are imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_API = re.compile(
    r"/api/(?P<kind>model|dataset)s/(?P<repo>[^/]+/[^/]+)(?:/(?P<call>revision|tree|paths-info)/(?P<revision>[^/]+)(?:/(?P<path>.+))?)?"
)
_UPLOAD = re.compile(r"/api/datasets/(?P<repo>[^/]+/[^/]+)/(?P<call>preupload|commit)/main")
_RESOLVE = re.compile(r"(?P<kind>/datasets)?/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class Repo:
    """Commits in order, each {path: content}; `gated`: readable only with the token."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def find(self, revision: str) -> str | None:
        last = next(reversed(self.commits))
        return last if revision == "main" else revision if revision in self.commits else None


@dataclass
class StandInHub:
    """`requests`: method and path of every request, in order; the next `fails` commits fail with a 503."""

    url: str = ""
    token: str = "hf_StandInToken123"
    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    fails: int = 0

    def add(self, kind: str, repo: str, folder: Path, *, gated: bool = False) -> str:
        """Commit the files of `folder` to the main branch; return the commit id."""
        repository = self.repos.setdefault((kind, repo), Repo(gated=gated))
        files = {
            str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
        }
        return self.commit(repo, repository, files)

    def commit(self, repo: str, repository: Repo, files: dict[str, bytes]) -> str:
        commit = hashlib.sha1(f"{repo} {len(repository.commits)}".encode()).hexdigest()
        repository.commits[commit] = files
        return commit

    def environment(self, home: Path, **other: str) -> dict[str, str]:
        """The environment of a process that uses this server as the Hub, with its caches in `home`."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return {**inherited, "HF_ENDPOINT": self.url, "HF_HOME": str(home), **other}


@contextmanager
def serving() -> Iterator[StandInHub]:
    """A hub that answers until the block ends."""
    hub = StandInHub()

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        self.served.requests.append(f"{self.command} {self.path}")

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := _API.fullmatch(path):
            self._api(**match.groupdict())
        elif match := _RESOLVE.fullmatch(path):
            self._file("dataset" if match["kind"] else "model", match["repo"], match["revision"], match["path"])
        else:
            self._refuse(404, "EntryNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        upload = _UPLOAD.fullmatch(path)
        if not upload and path not in ("/api/repos/create", "/api/validate-yaml"):
            return self.do_GET()
        # A commit comes in chunks, without a length.
        body = self._chunks() if "chunked" in self.headers.get("Transfer-Encoding", "") else None
        lines = (body or self.rfile.read(int(self.headers.get("Content-Length", 0)))).splitlines()
        if self.headers.get("Authorization") != f"Bearer {self.served.token}":
            self._refuse(401, "Unauthorized")
        elif upload:
            self._upload(upload["repo"], upload["call"], [json.loads(line) for line in lines])
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        else:
            self._create(**json.loads(lines[0]))

    def _chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _create(self, name: str, organization: str, type: str, visibility: str, **_: Any) -> None:
        repo = f"{organization}/{name}"
        exists = (type, repo) in self.served.repos
        self.served.repos.setdefault((type, repo), Repo(private=visibility == "private"))
        body = json.dumps({"url": f"{self.served.url}/{type}s/{repo}"}).encode()
        self._send(409 if exists else 200, body, {"Content-Type": "application/json"})

    def _upload(self, repo: str, call: str, lines: list[dict[str, Any]]) -> None:
        repository = self.served.repos[("dataset", repo)]
        if call == "preupload":
            files = lines[0]["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            return self._answer({"files": modes})
        if self.served.fails:
            self.served.fails -= 1
            return self._refuse(503, "Unavailable")
        files = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
        commit = self.served.commit(repo, repository, {path: b64decode(content) for path, content in files.items()})
        self._answer({"commitUrl": f"{self.served.url}/datasets/{repo}/commit/{commit}", "commitOid": commit})

    def _api(self, kind: str, repo: str, call: str | None, revision: str | None, path: str | None) -> None:
        opened = self._open(kind, repo, revision or "main")
        if opened is None:
            return
        commit, files = opened
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if call in ("tree", "paths-info"):
            names = [name for name in files if not path or name.startswith(f"{path}/")]
            if call == "paths-info":
                paths = json.loads(body)["paths"]
                names = [name for name in files if name in paths]
            folders = {str(parent) for name in names for parent in list(Path(name).parents)[:-1]}
            listed = [{"type": "directory", "path": name, "oid": _oid(name.encode())} for name in sorted(folders)]
            if call == "paths-info":
                listed = [entry for entry in listed if entry["path"] in paths]
            listed += [
                {"type": "file", "path": name, "size": len(files[name]), "oid": _oid(files[name])} for name in names
            ]
            self._answer(listed)
        else:
            siblings = [{"rfilename": name} for name in files]
            self._answer(
                {"id": repo, "sha": commit, "siblings": siblings, "private": False, "gated": False, "tags": []}
            )

    def _file(self, kind: str, repo: str, revision: str, path: str) -> None:
        opened = self._open(kind, repo, revision)
        if opened is None:
            return
        commit, files = opened
        if path not in files:
            return self._refuse(404, "EntryNotFound")
        content = files[path]
        begin, status = 0, 200
        if byte_range := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, status = int(byte_range[1]), 206
            content = content[begin : int(byte_range[2]) + 1 if byte_range[2] else None]
        headers = {"ETag": f'"{_oid(files[path])}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if status == 206:
            headers["Content-Range"] = f"bytes {begin}-{begin + len(content) - 1}/{len(files[path])}"
        self._send(status, content, headers)

    def _open(self, kind: str, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and its files; None, after an error response, if it is missing or may not be read."""
        repository = self.served.repos.get((kind, repo))
        if repository is None:
            self._refuse(401, "RepoNotFound")  # as the Hub answers clients without a token
            return None
        if repository.gated and self.headers.get("Authorization") != f"Bearer {self.served.token}":
            self._refuse(403, "GatedRepo")
            return None
        commit = repository.find(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound")
            return None
        return commit, repository.commits[commit]

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _answer(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
