"""Kinds of texts that options hold: addresses, headers, names for a service, and paths of what is written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from pathlib import Path
from tempfile import TemporaryFile

_NOT_IN_ADDRESS = re.compile(r'[\s\\#<>"{}|^`]')
_PLACE = re.compile(r"(?:\[(?P<ipv6>[^\]]*)\]|(?P<host>[^:\[\]]+))(?::(?P<port>[0-9]+))?")
_BARE_IPV6 = re.compile(r"[0-9A-Fa-f:.\[\]]+")
_LABEL = re.compile(r"\w(?:[\w-]*\w)?", re.ASCII)  # of a host; names in containers may have underscores
_LONGEST_HOST = 253
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a token of RFC 9110
_HEADER_VALUE = re.compile(r"[!-~](?:[\t -~]*[!-~])?")  # HTTP clients refuse other characters and outer blanks


@dataclass(frozen=True)
class Kind:
    """A kind of text, `name` in the help. Each function returns why a text is refused; empty: it is accepted.

    `fault`: of a value; `key_fault`: of a key if the option is a dict; `write_fault`: of a path on this machine.
    """

    name: str
    fault: Callable[[str], str]
    key_fault: Callable[[str], str] = lambda _: ""
    write_fault: Callable[[str], str] | None = None


def is_blank(text: str) -> bool:
    """Whether `text` shows nothing: it is empty, or all blanks, control characters and marks without width."""
    return not any(char.isprintable() and not char.isspace() for char in text)


def address_fault(text: str, schemes: tuple[str, ...] = ("http", "https")) -> str:
    """Why `text` is no address SCHEME://HOST[:PORT][/PATH] with one of `schemes`; empty if it is one."""
    scheme, separator, location = text.partition("://")
    if not separator or scheme.lower() not in schemes:
        return f"must begin with {' or '.join(f'{known}://' for known in schemes)}, as {schemes[0]}://HOST:PORT"
    place = re.split(r"[/?]", location, maxsplit=1)[0]
    if "@" in place:
        return "contains a user or a password; remove it, and set a key in the environment"
    if _NOT_IN_ADDRESS.search(text) or not text.isprintable():
        return "contains a character that no address has, such as a blank or a quote; remove it"
    if re.fullmatch(r":[0-9]*|", place):
        return f"names no host; give {scheme}://HOST:PORT"
    match = _PLACE.fullmatch(place)
    if match is None:
        out = "put IPv6 in brackets, as [::1]" if _BARE_IPV6.fullmatch(place) else f"give {scheme}://HOST:PORT"
        return f"{place} is no host with a port; {out}"
    if match["port"] and not 0 < int(match["port"][:9]) < 1 << 16:
        return f"port {match['port'][:9]} does not exist; give one from 1 to 65535"
    exists = _is_ipv6(match["ipv6"]) if match["host"] is None else _is_host(match["host"])
    return "" if exists else f"{match['host'] or match['ipv6'] or '[]'} is neither a host's name nor an IP address"


def _is_ipv6(text: str) -> bool:
    try:
        return IPv6Address(text).scope_id is None  # HTTP clients refuse a zone
    except AddressValueError:
        return False


def _is_host(text: str) -> bool:
    """Whether it is a name, also of other letters than ASCII, or an IPv4 address in four numbers."""
    try:
        host = text.encode("idna").decode()  # also refuses labels that are empty or too long
        labels = host.removesuffix(".").split(".")
        if labels[-1].isdigit() or labels[-1].lower().startswith("0x"):
            return bool(IPv4Address(host))
    except ValueError:  # UnicodeError and AddressValueError
        return False
    return len(host) <= _LONGEST_HOST and all(map(_LABEL.fullmatch, labels))


def header_fault(value: str) -> str:
    """Why `value` cannot be sent in a header; does not contain it, since it may be a key."""
    message = "must be printable ASCII without line breaks, and without blanks at the ends; correct it"
    return "" if _HEADER_VALUE.fullmatch(value) else message


def _header_name_fault(name: str) -> str:
    return "" if _HEADER_NAME.fullmatch(name) else "is no name of a header; use letters, digits and -"


def _wandb_fault(text: str, longest: int, forbidden: str = "") -> str:
    """Why Weights & Biases refuses a name, also offline."""
    fits = len(text) <= longest and not set(forbidden) & set(text)
    without = f", none of {' '.join(forbidden)}" if forbidden else ""
    return "" if fits else f"must have at most {longest} characters{without}; choose another name"


def _path_fault(text: str) -> str:
    if "\0" in text:
        return "contains a NUL character; remove it"
    if text.startswith("~"):
        return "only ~/ at the beginning of an option is expanded; give the whole path"
    return "is the root folder; choose another" if os.path.abspath(text).strip("/") == "" else ""


def _write_fault(text: str, *, folder: bool) -> str:
    """Why this process cannot write the file or `folder`; tries it in the nearest folder that exists."""
    path = place = Path(os.path.abspath(text))
    try:
        while not _exists(place):
            place = place.parent
        if place == path and not folder:
            if place.is_dir():
                return "it is a folder, not a file"
            return "" if os.access(place, os.W_OK) else "it is not writable"
        if not place.is_dir():
            return f"{'it' if place == path else place} is not a folder"
        TemporaryFile(dir=place).close()
    except OSError as error:
        return f"{error.strerror}: {place}"
    return ""


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


ADDRESS = Kind("an address, http://HOST:PORT/PATH or https://…", address_fault)
HEADERS = Kind("names and values in ASCII", header_fault, _header_name_fault)
WRITTEN_FILE = Kind("a file to write", _path_fault, write_fault=partial(_write_fault, folder=False))
WRITTEN_FOLDER = Kind("a folder to write", _path_fault, write_fault=partial(_write_fault, folder=True))
WANDB_PROJECT = Kind("at most 128 characters", partial(_wandb_fault, longest=128, forbidden="/\\#?%:"))
WANDB_TAG = Kind("at most 64 characters", partial(_wandb_fault, longest=64))
