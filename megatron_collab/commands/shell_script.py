"""Reads the command lines of a shell script without running anything.

Variables and arrays that the script sets are put in; of branches all assignments count, the last one last. What only a
run would know (a command's output, a variable from outside) stays as UNKNOWN in the word.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_collab.settings import require

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_DOLLAR = "\x00"  # a dollar sign that names no variable
_LONGEST, _LONGEST_WORD = 1 << 20, 1 << 12  # characters of all words together, and of one that is still looked into
_MOST_COMMANDS = 10_000
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+|[@*#?])(?:\[[@*]\])?(?::?([-=+])((?:[^{}]|\{[^{}]*\})*))?\}|(\w+|[@*#?]))")
_ARITHMETIC = re.compile(r"\$\(\(([\w\s${}()*/%+-]{1,200}?)\)\)(?!\))")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_ALONE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?\}|(\w+))")
_KEYWORDS = {"export", "local", "declare", "readonly", "then", "else", "do", "if", "!", "{"}
_SEPARATORS = ";&|\n"
_DOCUMENT = re.compile(r"<<-?[ \t]*[\"']?(\w+)[\"']?")
_REDIRECT = re.compile(r"&>>?|<<<|[<>](?!\()[<>&|]?")


@dataclass(frozen=True)
class _Word:
    text: str
    quoted: bool = False


def commands(text: str) -> list[list[str]]:
    """The words of each command. Raises ConfigError if they become too long."""
    return _Shell().read(text)


class _Shell:
    def __init__(self) -> None:
        self.variables: dict[str, str] = {"HOME": "~", "@": "", "*": ""}
        self.arrays: dict[str, list[str]] = {}
        self.length = 0

    def read(self, text: str) -> list[list[str]]:
        lines: list[list[str]] = []
        words: list[_Word] = []
        array: str | None = None
        for token in _tokens(text):
            if isinstance(token, _Word):
                if array is None:
                    words.append(token)
                else:
                    self.arrays[array] += self.expanded(token)
            elif token == "(" and words and (match := _ASSIGNMENT.fullmatch(words[-1].text)) and not match[3]:
                array = match[1]
                words.pop()
                self.arrays[array] = [*self.arrays.get(array, [])] if match[2] else []
            elif token == ")":
                array = None
            elif array is None and token in _SEPARATORS:
                lines += [self.command(words)] if words else []
                words = []
                require(len(lines) <= _MOST_COMMANDS, f"--from: has more than {_MOST_COMMANDS} commands; shorten it")
        lines += [self.command(words)] if words else []
        return [command for command in lines if command]

    def command(self, words: list[_Word]) -> list[str]:
        """The expanded words of a command; empty if it only assigns variables."""
        while words and not words[0].quoted and words[0].text in _KEYWORDS:
            words = words[1:]
        while words and (match := _ASSIGNMENT.fullmatch(words[0].text)):
            value = self.text(match[3])
            self.variables[match[1]] = self.variables.get(match[1], "") + value if match[2] else value
            words = words[1:]
        match [word.text for word in words]:
            case ["read", *_, name, "<<", body]:
                self.variables[name] = body
                return []
        return [text for word in words for text in self.expanded(word)]

    def expanded(self, word: _Word) -> list[str]:
        """The words that one word becomes; a variable that stands alone may hold several."""
        match = _ALONE.fullmatch(word.text)
        name = (match[1] or match[2]) if match else ""
        if name in self.arrays or "[" in (word.text if match else ""):  # an array of another script is empty
            texts = self.arrays.get(name, [])
        elif name in self.variables and not word.quoted:
            tokens = _tokens(self.variables[name], redirects=False)
            texts = [self.text(token.text) for token in tokens if isinstance(token, _Word)]
        else:
            texts = [self.text(word.text)]
            texts = texts if texts[0] or word.quoted else []
        self.count(texts)
        return texts

    def text(self, text: str) -> str:
        """`text` with its variables replaced."""
        for _ in range(8):  # defaults may contain variables
            if len(text) > _LONGEST_WORD:
                return UNKNOWN
            changed = _VARIABLE.sub(self.value, _ARITHMETIC.sub(self.number, text))
            if changed == text:
                break
            text = changed
            self.count([text])
        return re.sub(r"\$(?=[\w{(@*#?])", UNKNOWN, text).replace(_DOLLAR, "$")

    def value(self, match: re.Match[str]) -> str:
        name, operator, default = match[1] or match[4], match[2], match[3] or ""
        value = self.variables.get(name, " ".join(self.arrays.get(name, [])))
        known = name in self.variables or name in self.arrays
        if operator == "+":
            return default if value else ""
        if operator:
            return value or default
        return value if known else UNKNOWN

    def number(self, match: re.Match[str]) -> str:
        """The value of an arithmetic expression of whole numbers; UNKNOWN if it has something else."""
        names = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: self.variables.get(name[1], UNKNOWN), match[1])
        try:
            return str(_calculated(ast.parse(names.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return UNKNOWN

    def count(self, texts: list[str]) -> None:
        self.length += sum(map(len, texts))
        require(self.length <= _LONGEST, f"--from: its variables become more than {_LONGEST} characters; shorten it")


def _calculated(node: ast.AST) -> int:
    """The value of a parsed expression. Raises ValueError for anything but sums and products of numbers."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_calculated(operand)
        case ast.BinOp(left=first, op=operation, right=second) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_calculated(first), _calculated(second))
    raise ValueError("no sum or product of numbers")


def _tokens(text: str, *, redirects: bool = True) -> Iterator[_Word | str]:
    """Words, and separators and parentheses as single characters.

    Comments, command substitutions, here-strings and redirections with their files are left out; a variable's value has
    no `redirects`.
    """
    place, quoted, is_file = 0, False, False
    parts: list[str] = []
    documents: list[str] = []  # ends of texts that follow the line
    while place < len(text):
        char, following = text[place], text[place + 1 : place + 2]
        redirect = _REDIRECT.match(text, place) if redirects and char in "<>&" else None
        document = _DOCUMENT.match(text, place) if redirect else None
        if redirect or char in " \t\r()" + _SEPARATORS:
            word = _Word("".join(parts), quoted)
            if quoted or (parts and not (redirect and word.text.isdigit())):  # digits: a descriptor
                yield from () if is_file else (word,)
                is_file = False
            parts, quoted = [], False
        if document:
            documents.append(document[1])
            place = document.end()
            yield _Word("<<")
        elif redirect:
            is_file, place = True, redirect.end()
        elif char in " \t\r()" + _SEPARATORS:
            is_file = is_file and char in " \t\r"
            if char == "\n" and documents:
                body, place = _document(text, place + 1, documents.pop(0))
                yield _Word(body, True)
            if char in "()" + _SEPARATORS:
                yield char
            place += 1
        elif redirects and char in "<>":  # a command in place of a file
            parts.append(UNKNOWN)
            place = _balanced(text, place + 1, "()")
        elif char == "#" and not parts and not quoted:
            place = _find(text, "\n", place)
        elif char == "\\":
            parts += [] if following == "\n" else [following.replace("$", _DOLLAR)]
            place += 2
        elif char == "'":
            end = _find(text, "'", place + 1)
            parts.append(text[place + 1 : end].replace("$", _DOLLAR))
            place, quoted = end + 1, True
        elif char == '"':
            body, place = _double_quoted(text, place + 1)
            parts.append(body)
            quoted = True
        else:
            part, place = _part(text, place)
            parts.append(part)
    if (parts or quoted) and not is_file:
        yield _Word("".join(parts), quoted)


def _part(text: str, place: int) -> tuple[str, int]:
    """A character, a variable in braces, or UNKNOWN for a command's output, and the place after it."""
    if text.startswith("$((", place):
        end = _balanced(text, place + 1, "()")
        return text[place:end], end
    if text.startswith("$(", place):
        return UNKNOWN, _balanced(text, place + 1, "()")
    if text.startswith("${", place):
        end = _balanced(text, place + 1, "{}")
        inside = text[place:end].replace('"', "")
        output, last = re.search(r"\$\((?!\()", inside), inside.rfind(")")
        if output and output.start() < last:
            inside = inside[: output.start()] + UNKNOWN + inside[last + 1 :]
        return inside, end
    if text[place] == "`":
        return UNKNOWN, _find(text, "`", place + 1) + 1
    return text[place], place + 1


def _double_quoted(text: str, place: int) -> tuple[str, int]:
    """The text up to the closing quotation mark, and the place after it."""
    parts = []
    while place < len(text) and text[place] != '"':
        if text[place] == "\\":
            following = text[place + 1 : place + 2]
            kept = following.replace("$", _DOLLAR) if following in '$`"\\' else "\\" + following
            parts.append("" if following == "\n" else kept)
            place += 2
        else:
            part, place = _part(text, place)
            parts.append(part)
    return "".join(parts), place + 1


def _document(text: str, place: int, end: str) -> tuple[str, int]:
    """A here-document that begins at `place`, and the place of the line feed after its end."""
    match = re.compile(rf"^[ \t]*{end}[ \t]*$", re.MULTILINE).search(text, place)
    return (text[place : match.start()], match.end()) if match else (text[place:], len(text))


def _balanced(text: str, place: int, pair: str) -> int:
    """The place after the parenthesis that closes the one at `place`."""
    depth = 0
    for index in range(place, len(text)):
        depth += (text[index] == pair[0]) - (text[index] == pair[1])
        if depth == 0:
            return index + 1
    return len(text)


def _find(text: str, mark: str, place: int) -> int:
    end = text.find(mark, place)
    return len(text) if end < 0 else end
