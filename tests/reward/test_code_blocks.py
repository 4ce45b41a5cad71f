"""Conversations whose merged code is run: each gives the function `f` that they end with."""

from __future__ import annotations

import ast
import decimal
import gzip
import json
import random
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.reward.metrics.code_blocks import merged
from megatron_collab.reward.metrics.code_statements import free_names


def block(code: str, language: str = "python") -> str:
    return f"So:\n\n```{language}\n{code.strip()}\n```\n"


def value(*replies: str) -> object:
    """What `f()` of the merged code returns; a reply without a fence is one block, "---" on a line separates blocks."""
    texts = [reply if "```" in reply else "".join(map(block, reply.split("\n---\n"))) for reply in replies]
    namespace: dict[str, Any] = {"__name__": __name__}
    with decimal.localcontext():  # which some of them set
        exec(merged(texts, {"f"}), namespace)
        return namespace["f"]()


REVISIONS = {
    "a helper of a table": ("def build(): return 1\nTABLE = build()\ndef f(): return TABLE", "def build(): return 2"),
    "a helper of that helper": (
        "def one(): return 1\ndef build(): return one()\nTABLE = build()\ndef f(): return TABLE",
        "def one(): return 2",
    ),
    "a decorator": (
        "def add(g): return lambda: g() + 5\n@add\ndef f(): return 1",
        "def add(g): return lambda: g() + 1",
    ),
    "a base class": (
        "class Base: k = 1\nclass A(Base): pass\ndef f(): return A.k",
        "Thanks, wait:",
        "class Base: k = 2",
    ),
    "a parent of a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 1\n@dataclass\nclass Q(P):\n"
        "    y: int = 2\ndef f(): return Q().x",
        "@dataclass\nclass P:\n    x: int = 2",
    ),
    "a constant as a default": ("N = 1\ndef f(n=N): return n", "N = 2"),
    "a constant of a constant": ("A = 1\nB = A\ndef f(): return B", "A = 2"),
    "one of two constants": ("A, B = 1, 5\nC = A\ndef f(): return C + B - 5", "A = 2"),
    "a default that needs a later import": ("N = 1\ndef f(n=N): return n", "import math\nN = math.isqrt(4)"),
    "a base class that needs a later one": (
        "class A: k = 1\nclass B(A): pass\ndef f(): return B.k",
        "class Root: k = 2\nclass A(Root): pass",
    ),
    "a base class written behind": ("class B(A): pass\ndef f(): return B.k\n---\nclass A: k = 2",),
    "a class whose method makes a subclass": (
        "class A:\n    def twin(self): return B()\nclass C(A): k = 1\nclass B(C): pass\ndef f(): return C().twin().k",
        "class B(C): k = 2",
    ),
    "a function by a lambda": ("def f(): return 1", "f = lambda: 2"),
    "a lambda by a function": ("f = lambda: 1", "def f(): return 2"),
    "a function by a method": ("def f(): return 1", "class A:\n    def g(self): return 2\nf = A().g"),
    "a function by its wrapper": ("import functools\ndef f(): return 2", "f = functools.cache(f)"),
    "a wrapped function": ("def f(): return 1\nf = (lambda g: lambda: g())(f)", "def f(): return 2"),
    "a table and what fills it": (
        "T = [1]\nT.append(1)\nS = sum(T)\ndef f(): return S",
        "T = []\nfor i in range(2):\n    T.append(1)",
    ),
    "a table that begins anew": ("T = [1]\nT.append(1)\ndef f(): return T[0]", "T = [2]"),
    "an import with a fallback": (
        "try:\n    from no_such_module import g\nexcept ImportError:\n    def g(): return 1\n"
        "X = g()\ndef f(): return X",
        "def g(): return 2",
    ),
    "a program that is no program": (
        "def g(): return 1\ndef f(): return g()",
        "def g(): return 2\nif __name__ == '__main__':\n    print(f(input()))",
    ),
    "twice": ("def g(): return 0\nX = g()\ndef f(): return X", "def g(): return 1", "def g(): return 2"),
    "within a block the written order": ("k = 2\nX = k\nk = 3\nY = k\ndef f(): return X",),
    "state that a repeated import keeps": (
        "import decimal\ndecimal.getcontext().prec = 1\ndef f(): return 0",
        "import decimal\ndef f(): return int(str(decimal.Decimal(2) / 1 + decimal.Decimal('.01')))",
    ),
    "a constant by what a function returns": (
        "def build(n): return n\nTABLE = build(1)\ndef f(): return TABLE",
        "TABLE = build(2)",
    ),
}
REPEATED_ALONE = {
    "try": "try:\n    import no_such_module as m\nexcept ImportError:\n    m = 2",
    "if": "import sys\nif sys.maxsize < 0:\n    m = 1\nelse:\n    m = 2",
    "loop": "t = {}\nfor k in 'ab':\n    t[k] = 1\nm = len(t)",
    "loop of a loop": "t = [[], []]\nfor row in t:\n    for k in 'a':\n        row.append(k)\nm = sum(map(len, t))",
    "while": "m = 0\nwhile m < 2:\n    m += 1",
    "with": "import io\nwith io.StringIO('2') as file:\n    m = int(file.read())",
    "append": "t = []\nt.append(2)\nm = t[0]",
    "update": "t = {}\nt.update(a=2)\nm = t['a']",
    "setdefault": "t = {}\nt.setdefault('a', []).append(2)\nm = t['a'][0]",
    "alias": "t = {'a': []}\nu = t['a']\nu.append(2)\nm = t['a'][0]",
    "argument": "from heapq import heappush\nt = []\nheappush(t, 2)\nm = t[0]",
    "attribute": "class C: pass\nc = C()\nc.k = 2\nm = c.k",
    "class attribute": "class C: pass\nC.k = 2\nm = C.k",
    "setattr": "class C: pass\nc = C()\nsetattr(c, 'k', 2)\nm = c.k",
    "deletion": "t = {1: 1, 2: 2, 3: 3}\ndel t[3]\nm = len(t)",
    "set-up call": "t = []\ndef fill():\n    t.append(2)\nfill()\nm = t[0]",
    "set-up call of a global": "def init():\n    global m\n    m = 2\ninit()",
    "set-up call with an argument": "t = []\ndef fill(rows):\n    rows.append(2)\nfill(t)\nm = t[0]",
    "match": "match [2]:\n    case [m]:\n        pass",
    "walrus": "if (m := 2) > 3:\n    m = 4",
    "star": "from math import *\nm = int(sqrt(4))",
    "decorator that registers": "t = []\ndef add(g): return t.append(g)\n@add\ndef g(): return 2\nm = t[0]()",
    "globals": "globals()['m'] = 2",
    "f-string": "t = f\"{'\\n'.join(['1', '1'])}\"\nm = len(t.split())",
    "semicolons": "é = 'é'; m = 2; k = 'ü'",
}
EXAMPLES = {
    "a constant anew": "DATA = [5]\nprint(f())",
    "a constant anew with an alias": "rows = DATA\nrows.append(f())\nprint(rows)",
    "a constant changed": "DATA.append(5)\nresult = f()",
    "a constant changed in a test": "DATA.append(5)\nassert f() == 7",
    "rows of a file": "import csv\nrows = list(csv.reader(open('no such file')))\nprint(f(rows))",
    "a result": "result = f(None)",
    "results": "results = [f(n) for n in undefined]\nfor result in results:\n    print(result)",
    "a loop": "for case in undefined:\n    print(f(case))",
    "a file": "with open('no such file') as file:\n    print(f(file.read()))",
    "a try": "try:\n    f(input())\nexcept ValueError:\n    pass",
    "a main guard": "if __name__ == '__main__':\n    DATA = []",
    "an object": "class Pair: pass\npair = Pair()\npair.missing()",
    "a coroutine": "import asyncio\nasync def main():\n    raise ValueError\nasyncio.run(main())",
    "a main function": "def main():\n    raise SystemExit(f())\nmain()",
    "an exit": "import sys\nsys.exit(f())",
    "a module of its own": "from solution import f\nprint(f())",
    "a whole module of its own": "from solution import *\nprint(f())",
    "a package that is missing": "import no_such_module as np\nprint(f(np.zeros(3)))",
    "a plot": "import no_such_module as plt\nplt.plot(f())\nplt.show()",
    "a file that it removes": "import os\nprint(f())\nos.remove('no such file')",
    "unit tests": "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        f()\nunittest.main()",
    "doc tests": "import doctest\ndoctest.testmod()",
    "a timer": "import timeit\nprint(timeit.timeit(lambda: f(1), number=1))",
    "await": "await f()",
    "nothing that runs": "raise SystemExit",
}
SOLUTION = "DATA = [1, 1]\ndef f(): return sum(DATA)"


@pytest.mark.parametrize("replies", REVISIONS.values(), ids=REVISIONS.keys())
def test_a_later_definition_counts_also_for_what_needs_it_when_it_runs(replies: tuple[str, ...]) -> None:
    assert value(*replies) == 2


@pytest.mark.parametrize("state", REPEATED_ALONE.values(), ids=REPEATED_ALONE.keys())
def test_a_function_that_is_repeated_alone_has_the_state_of_its_module(state: str) -> None:
    """Whether that stands in one block with an earlier function, in one of its own, or in an earlier reply."""
    assert value(f"{state}\ndef f(): return 1", "def f(): return m") == 2
    assert value(f"{state}\n---\ndef f(): return m") == 2
    assert value(state, "def f(): return m") == 2
    assert value(f"def f(): return m\n{state}") == 2


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_an_example_takes_nothing_away(example: str) -> None:
    """In the block of the solution, in the next one, and in the next reply."""
    assert value(f"{SOLUTION}\n# Example usage\n{example}") == 2
    assert value(f"{SOLUTION}\n---\n{example}") == 2
    assert value(SOLUTION, example) == 2
    assert value("def f(): return 1", SOLUTION, example, "You're welcome!") == 2


STATEFUL = """
ITEMS = []
CACHE = {}
def add(item): ITEMS.append(item)
def fib(n):
    if n not in CACHE:
        CACHE[n] = n if n < 2 else fib(n - 1) + fib(n - 2)
    return CACHE[n]
def f(): return len(ITEMS) + len(CACHE) + fib(2)
"""


def test_examples_leave_the_state_of_a_module_alone() -> None:
    assert value(f"{STATEFUL}\nadd('a')\nfib(5)\nprint(f())") == 1
    assert value(STATEFUL, "add('a')\nadd('b')\nprint(f())\nITEMS.clear()") == 1


def test_what_only_an_example_binds_stays() -> None:
    replies = ("def g(n): return n\ndef f(): return DATA", "DATA = g(2)\nprint(f())")
    assert value(*replies) == 2
    assert value(*replies, "def g(n): return n + 1") == 3


def test_a_setting_of_a_module_stays_in_front_of_definitions() -> None:
    """Also if they do not read the module."""
    code = merged([block("import os\nos.environ['KEY'] = '2'\ndef f(): return 2\nprint(f())\nos.remove('a')")], {"f"})
    assert "KEY" in code and "remove" not in code


UNUSED = {
    "a test": "import zzz_pytest\ndef test_f(): assert f() == 1",
    "a test with a decorator": "from zzz_hypothesis import given\n@given(1)\ndef test_f(x): assert f() == 1",
    "an alternative": "import zzz_numpy as np\nONES = np.ones(2)\ndef fast(): return ONES.sum()",
    "a draft that does not parse": "def g(:\n    return f()",
    "a name of a builtin": "sum = f() - 3\nprint(sum)",
    "an import of the same package": "import xml.dom.minidom",
    "an import of the package": "import xml",
}


@pytest.mark.parametrize("code", UNUSED.values(), ids=UNUSED.keys())
def test_what_the_tests_do_not_need_breaks_nothing(code: str) -> None:
    solution = "import xml.etree.ElementTree\ndef f(): return sum([2, len(xml.etree.ElementTree.__name__) * 0])"
    merged_code = merged([block(solution), block(code)], {"f", "sum", "print"})
    namespace: dict[str, Any] = {}
    exec(merged_code, namespace)
    assert namespace["f"]() == 2
    assert "import xml.etree.ElementTree" in merged_code  # which other tests may have imported


def test_all_definitions_stay_if_none_has_a_name_of_the_tests() -> None:
    namespace: dict[str, Any] = {}
    exec(merged([block("def g(): return 1\ndef h(): return 2")], {"f"}), namespace)
    assert namespace["g"]() + namespace["h"]() == 3


LONG = {
    "fences": ("", "```\n)\n", ""),
    "calls": ("```python\ndef f():0\n", "f()\n", "```"),
}


@pytest.mark.seconds
@pytest.mark.parametrize(("head", "unit", "end"), LONG.values(), ids=LONG.keys())
def test_the_time_of_long_replies_is_bounded(head: str, unit: str, end: str) -> None:
    reply = head + "".join(map(unit.format, range(40_000 // len(unit)))) + end
    start = time.process_time()
    merged([reply], {"f"})
    assert time.process_time() - start < 6  # quadratic: 11 and more


def test_names_of_the_tests_count_as_definitions() -> None:
    assert value("class A:\n    def g(self): return 2\nf = A().g\nprint(f())", "print(f())") == 2
    assert value("from functools import partial\nf = partial(int, '2')", "print(f())") == 2
    code = [block("def f(): return 1\nlimit = 2")]
    assert "limit" in merged(code, {"limit"}) and "limit" not in merged(code)


LANGUAGES = ["python", "Python3", "python3.12", "python:a.py", "python title=x", "{python}", "{.python .n}", "ipython"]
LANGUAGES += ["ipython3", "py", "PY3", "python{1,3}", "", "text", "sage"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_block_is_python_by_its_language_or_by_a_definition(language: str) -> None:
    code = block("def f(): return 2", language)
    assert value(code) == 2
    assert value(code + block("print(f())")) == 2
    assert value(code + block("f = 3", "pycon") + block("2", "output")) == 2


CONVERSATIONS = {
    "a method revised with its class": (
        "class A:\n    def g(self): return 1\n    def h(self): return self.g()\ndef f(): return A().h()",
        "class A:\n    def g(self): return 2\n    def h(self): return self.g()",
    ),
    "a subclass in a later reply": ("class A:\n    k = 1", "class B(A):\n    k = 2", "def f(): return B.k"),
    "an enum revised": (
        "from enum import Enum\nclass E(Enum):\n    A = 1\nDEFAULT = E.A\ndef f(e=DEFAULT): return e.value",
        "class E(Enum):\n    A = 2",
    ),
    "an abstract base": (
        "from abc import ABC, abstractmethod\nclass A(ABC):\n    @abstractmethod\n    def g(self): ...",
        "class B(A):\n    def g(self): return 2\ndef f(): return B().g()",
        "b = B()\nprint(b.g(), f())",
    ),
    "a named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 1).x",
        "def f():\n    p = P(1, 1)\n    return p.x + p.y",
    ),
    "a type alias and a type variable": (
        "from typing import TypeVar\nT = TypeVar('T')\ntype Row = list[T]\ndef g(x: T) -> T: return x",
        "def f() -> Row: return g(2)",
    ),
    "an import of the future": (
        "def g(x): return x",
        "from __future__ import annotations\ndef f(x: Missing = 2): return g(x)",
    ),
    "helpers in four replies": (
        "def a(): return 1",
        "def b(): return a()",
        "def c(): return b()",
        "def f(): return c() + 1",
    ),
    "helpers in reverse": ("def f(): return c() + 1", "def c(): return b()", "def b(): return 1"),
    "a draft that raises when it runs": (
        "DATA = open('no such file').read()\ndef f(): return DATA",
        "def f(): return 2",
    ),
    "a call of a draft": ("def g(): 1 / 0\nX = g()\ndef f(): return X", "X = 2"),
    "mutual recursion": (
        "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return True\n"
        "def f(): return 2 if even(4) and not even(3) else 1",
        "def odd(n):\n    return n > 0 and even(n - 1)",
    ),
    "a dispatcher": (
        "from functools import singledispatch\n@singledispatch\ndef g(x): return 1\n"
        "@g.register\ndef _(x: int): return 2\n@g.register\ndef _(x: str): return 3\ndef f(): return g(0)",
        "def f():\n    return g(1)",
    ),
    "a registry revised": (
        "REG = {}\ndef reg(g):\n    REG[g.__name__] = g\n    return g\n"
        "@reg\ndef a(): return 1\ndef f(): return REG['a']()",
        "@reg\ndef a(): return 2",
    ),
    "a table of functions": ("def a(): return 1\nOPS = {'a': a}\ndef f(): return OPS['a']()", "def a(): return 2"),
    "a compiled pattern": (
        "import re\nP = re.compile('a')\ndef f(): return len(P.findall('aab'))",
        "def f():\n    'Counts.'\n    return len(P.findall('aab'))",
    ),
    "a revised pattern": (
        "import re\nP = re.compile('b')\ndef f(): return len(P.findall('aab'))",
        "P = re.compile('a')",
    ),
    "a logger": (
        "import logging\nlogging.basicConfig(level=logging.ERROR)\nlog = logging.getLogger('x')\n"
        "def f():\n    log.info('')",
        "def f():\n    log.debug('')\n    return 2",
    ),
    "a seed": (
        "import random\nrandom.seed(0)\ndef f(): return 1",
        "def f():\n    return 2 if random.random() == random.Random(0).random() else 1",
    ),
    "an augmented constant": ("A = 1\ndef f(): return A", "A += 1"),
    "a swap": ("A, B = 2, 1\ndef f(): return B", "A, B = B, A"),
    "a function by one that calls it": ("def f(): return 1", "old = f\ndef f(): return old() + 1"),
    "a constant by its block": ("K = 2\nX = K\ndef f(): return X", "X = K\nK = 5"),
    "a shadowed name": ("x = 5\ndef f():\n    x = 2\n    def g(): return x\n    return g()", "x = 7"),
    "a comprehension": ("N = 2\nT = [k for k in range(N)]\ndef f(): return len(T)", "k = [1, 2, 3]\nprint(k)"),
    "a conditional function": (
        "import sys\nif sys.maxsize > 1:\n    def g(): return 1\nelse:\n    def g(): return 3\n"
        "X = g()\ndef f(): return X",
        "def g(): return 2",
    ),
    "a prompt of the interpreter": ("def f():\n    return 2", ">>> f()\n2"),
    "pasted output": ("def f(): return 2", block("f() = 2\n[1, 2]", "")),
    "a block of the shell": ("def f(): return 2", block("pip install x\npython a.py", "bash")),
    "a block of JSON": ("def f(): return 2", block('{"f": 3}', "json")),
    "a block whose text assigns": ("K = 2\ndef f(): return K", block("K = 3", "text")),
    "a deleted helper": ("def g(): return 1\ndef f(): return 2", "del g"),
    "several statements on a line": ("import math; N = 2; M = math.pi\ndef f(): return N", "print(f()); N = 3; f()"),
    "comments": ("# constants\nN = 2  # two\n# the function\ndef f(): return N  # end", "# Thanks!"),
    "line ends of another system": ("N = 2\r\ndef f():\r\n    return N\r\n",),
    "a lambda of a lambda": ("g = lambda: 1\nf = lambda: g()", "g = lambda: 2"),
    "a partial function": ("from functools import partial\ndef g(x): return x\nf = partial(g, 1)", "f = partial(g, 2)"),
    "a partial function of a revised one": (
        "from functools import partial\ndef g(x): return 1\nf = partial(g, 1)",
        "def g(x): return 2",
    ),
    "a generator": ("G = (n for n in (2, 3))\ndef f(): return FIRST\nFIRST = next(G)",),
    "a context of decimals": (
        "from decimal import Decimal, getcontext\ngetcontext().prec = 1\ndef f(): return Decimal(7) / 3",
        "def f(): return Decimal(7) / 3",
    ),
    "a context of decimals by an import of all": (
        "from decimal import *\ngetcontext().prec = 1\ndef f(): return Decimal(7) / 3",
        "def f(): return Decimal(7) / 3",
    ),
    "an import of a missing package": (
        "import missing as math\ndef f(): return math.isqrt(4)",
        "import math",
    ),
    "a helper that a decorator registers": (
        "REG = []\ndef reg(g): REG.append(g)\n@reg\ndef a(): return 2\ndef f(): return REG[0]()",
    ),
    "commands of IPython": ("!pip install x\n%matplotlib inline\ndef f(): return 2\n%timeit f()", "%timeit f()"),
    "constants of a body of a class": (
        "N = 1\nclass A:\n    size = N\n    rows = [0] * N\ndef f(): return A.size + len(A.rows)",
        "N = 5\nprint(f())",
    ),
    "a metaclass": (
        "class M(type):\n    j = 1\nclass A(metaclass=M): k = 1\ndef f(): return type(A).j",
        "class M(type):\n    j = 2",
    ),
}


@pytest.mark.parametrize("replies", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_conversations_merge(replies: tuple[str, ...]) -> None:
    assert value(*replies) == 2


EXAMPLE_CALLS = (
    "print({}(missing))",
    "result = {}(open('no such file'))\nprint(result)",
    "for case in missing:\n    assert {}(case)",
    "if __name__ == '__main__':\n    {}()",
    "try:\n    {}(1 / 0)\nexcept ValueError as error:\n    print(error)",
)


def conversation(code: str, entry: str, rng: random.Random) -> list[str]:
    """Replies that end with the code: drafts of some of its functions, its statements over blocks, and examples."""
    body = ast.parse(code).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    drafts = [f"{ast.unparse(node.args)}" for node in functions]
    blocks = [[f"def {node.name}({args}):\n    return None"] for node, args in zip(functions, drafts, strict=True)]
    blocks = [draft for draft in blocks if rng.random() < 0.5]
    if rng.random() < 0.5:  # a draft is a whole program
        rest_of_body = [ast.unparse(node) for node in body if node not in functions]
        blocks = [[*rest_of_body, *chain.from_iterable(blocks)]]
    parts: list[list[str]] = [[]]
    for node in body:
        if rng.random() < 0.5:
            parts.append([])
        parts[-1].append(ast.unparse(node))
    if rng.random() < 0.5:
        rng.shuffle(parts)
    for part in (*parts, []):
        if rng.random() < 0.5:
            part.append("# Example usage\n" + rng.choice(EXAMPLE_CALLS).format(entry))
        blocks.append(part)
    replies = [""]
    for part in blocks:
        if rng.random() < 0.5:
            replies.append("Next:\n")
        replies[-1] += block("\n\n".join(part))
    return [*replies, "You're welcome!"]


@pytest.mark.seconds
def test_solutions_of_human_eval_pass_however_they_are_split(dataset: Callable[[str], Path]) -> None:
    lines = gzip.decompress(dataset("humaneval/HumanEval.jsonl.gz").read_bytes()).splitlines()
    failing = []
    for seed, problem in enumerate(map(json.loads, lines)):
        code, entry = problem["prompt"] + problem["canonical_solution"], problem["entry_point"]
        replies = conversation(code, entry, random.Random(seed))
        namespace: dict[str, Any] = {"__name__": __name__}
        exec(merged(replies, {entry, *free_names(problem["test"])}), namespace)
        exec(problem["test"], namespace)
        try:
            namespace["check"](namespace[entry])
        except (AssertionError, NameError, TypeError):
            failing.append((problem["task_id"], replies))
    assert failing == []
