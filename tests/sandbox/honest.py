"""Correct programs with tests in the forms of published tasks; all must pass. Each is (solution, metadata)."""

from __future__ import annotations

from typing import Any

_CASES = """import asyncio, collections, datetime, io, math, os, random, sys, tempfile, types, unittest
from unittest.mock import MagicMock, call, mock_open, patch
class TestCases(unittest.TestCase):
"""


def cases(body: str) -> dict[str, Any]:
    return {"test": _CASES + body, "entry_point": "task_func"}


HONEST: dict[str, tuple[str, dict[str, Any]]] = {
    "values of every kind": (
        """import datetime, decimal, fractions, pathlib, uuid, collections, enum
Point = collections.namedtuple("Point", "x y")
class Level(enum.IntEnum):
    HIGH = 3
def task_func(kind):
    return {
        "int": 10**5000, "float": -0.5, "complex": 1 + 2j, "bytes": b"\\0\\xff", "text": "\\ud800é", "none": None,
        "tuple": (1, (2,)), "set": {1, 2}, "frozen": frozenset({3}), "range": range(3),
        "date": datetime.date(2020, 1, 2),
        "time": datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc), "delta": datetime.timedelta(1, 2, 3),
        "decimal": decimal.Decimal("1.10"), "fraction": fractions.Fraction(1, 3), "path": pathlib.Path("/a"),
        "uuid": uuid.UUID(int=5), "counter": collections.Counter("aab"), "deque": collections.deque([1], 3),
        "default": collections.defaultdict(list, {1: [2]}), "point": Point(1, 2), "level": Level.HIGH, "type": int,
        "array": bytearray(b"ab"), "keys": {(1, 2): 3, None: 4}, "nan": float("nan"),
    }[kind]
""",
        cases("""    def test_values(self):
        self.assertEqual(task_func("int"), 10**5000)
        self.assertEqual((task_func("float"), task_func("complex"), task_func("bytes")), (-0.5, 1 + 2j, b"\\0\\xff"))
        self.assertEqual((task_func("text"), task_func("none"), task_func("tuple")), ("\\ud800é", None, (1, (2,))))
        self.assertEqual((task_func("set"), task_func("frozen"), task_func("range")), ({1, 2}, {3}, range(3)))
        self.assertEqual(task_func("time"), datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc))
        self.assertEqual((task_func("date"), task_func("delta").days), (datetime.date(2020, 1, 2), 1))
        self.assertEqual((str(task_func("decimal")), task_func("fraction") * 3), ("1.10", 1))
        self.assertEqual((task_func("path").name, task_func("uuid").int), ("a", 5))
        self.assertIsInstance(task_func("counter"), collections.Counter)
        self.assertEqual(task_func("counter").most_common(1), [("a", 2)])
        self.assertEqual((task_func("deque").maxlen, task_func("default")[9]), (3, []))
        self.assertEqual((task_func("point").y, task_func("level"), task_func("type")), (2, 3, int))
        self.assertEqual((task_func("array"), task_func("keys")), (bytearray(b"ab"), {(1, 2): 3, None: 4}))
        self.assertTrue(math.isnan(task_func("nan")))
"""),
    ),
    "arguments that are changed": (
        """def task_func(rows, seen, table):
    rows.sort()
    rows[0].append(9)
    seen.add(1)
    table["new"] = rows
    return rows
""",
        cases("""    def test_changes(self):
        first, second = [2], [1]
        rows, seen, table = [first, second], set(), {}
        self.assertIs(task_func(rows, seen, table), rows)
        self.assertEqual((rows, second, seen), ([[1, 9], [2]], [1, 9], {1}))
        self.assertIs(table["new"], rows)
        self.assertIs(rows[0], second)
    def test_a_list_that_holds_itself(self):
        rows = [[2], [1]]
        table = {"rows": rows}
        table["self"] = table
        task_func(rows, set(), table)
        self.assertIs(table["self"], table)
"""),
    ),
    "callbacks and generators": (
        """class Odd(Exception):
    pass
def task_func(function, items):
    for item in items:
        yield function(item)
def fails(number):
    raise Odd(number, "odd")
async def later(number):
    return number + 1
def adder(n):
    return lambda x: x + n
""",
        cases("""    def test_callbacks(self):
        seen = []
        result = task_func(lambda x: seen.append(x) or x + 1, iter([1, 2]))
        self.assertIsInstance(result, types.GeneratorType)
        self.assertEqual((next(result), list(result), seen), (2, [3], [1, 2]))
        with self.assertRaises(StopIteration):
            next(result)
        self.assertEqual(list(task_func(abs, [-1])), [1])
        self.assertEqual(adder(2)(3), 5)
    def test_exceptions(self):
        with self.assertRaises(Odd) as raised:
            fails(3)
        self.assertEqual(raised.exception.args, (3, "odd"))
        with self.assertRaisesRegex(ZeroDivisionError, "division"):
            list(task_func(lambda x: x / 0, [1]))
    def test_coroutines(self):
        self.assertEqual(asyncio.run(later(3)), 4)
"""),
    ),
    "a class": (
        """class Stack:
    count = 0
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        return self.items.pop()
    def index(self, item):
        return self.items.index(item)
    def __len__(self):
        return len(self.items)
    def __str__(self):
        return f"Stack of {len(self)}"
def task_func(stack):
    return stack.pop()
""",
        cases("""    def test_a_stack(self):
        stack = Stack([1])
        self.assertIsInstance(stack, Stack)
        stack.push([4]).push("x")
        self.assertEqual((len(stack), str(stack), stack.index([4])), (3, "Stack of 3", 1))
        self.assertEqual((task_func(stack), stack.pop(), stack.items), ("x", [4], [1]))
        with self.assertRaises(IndexError):
            Stack().pop()
        self.assertEqual(Stack.count, 0)
        self.assertNotEqual(stack, Stack([1]))
"""),
    ),
    "mocks, streams and files": (
        """import csv, os, subprocess, sys, time
def task_func(path):
    print("reading", path)
    with open(path) as file:
        rows = list(csv.reader(file))
    name = input("name? ")
    return rows, name, os.environ.get("CITY"), time.time()
def run(command):
    done = subprocess.run(command, capture_output=True)
    return done.returncode, done.stdout.decode()
""",
        cases("""    @patch("time.time", return_value=7)
    @patch("builtins.input", side_effect=["bob"])
    @patch("sys.stdout", new_callable=io.StringIO)
    @patch("builtins.open", new_callable=mock_open, read_data="a,b")
    def test_patches(self, opened, out, asked, clock):
        with patch.dict(os.environ, {"CITY": "Bonn"}):
            self.assertEqual(task_func("p"), ([["a", "b"]], "bob", "Bonn", 7))
        opened.assert_called_once_with("p")
        self.assertEqual(asked.mock_calls, [call("name? ")])
        self.assertEqual(out.getvalue(), "reading p\\n")
    def test_a_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "x")
            with open(path, "w") as file:
                file.write("c")
            before, sys.stdout, sys.stdin = (sys.stdout, sys.stdin), io.StringIO(), io.StringIO("joe\\n")
            try:
                rows, output = task_func(path), sys.stdout.getvalue()
            finally:
                sys.stdout, sys.stdin = before
        self.assertEqual(rows[:2], ([["c"]], "joe"))
        self.assertEqual(output, f"reading {path}\\nname? ")
    @patch("subprocess.run")
    def test_a_command(self, ran):
        ran.return_value = MagicMock(returncode=3, stdout=b"hi")
        self.assertEqual(run(["x"]), (3, "hi"))
        ran.assert_called_once_with(["x"], capture_output=True)
    def test_a_real_command(self):
        self.assertEqual(run(["echo", "hi"]), (0, "hi\\n"))
"""),
    ),
    "printed text that tests capture": (
        """import io, sys
def task_func(rows):
    print("rows", len(rows))
    for row in rows:
        print(row, end=";")
def fails(text):
    print("before")
    print(text, file=sys.stderr)
    sys.stdout.write("after")
    raise ValueError(text)
class Part:
    def write(self, text):
        pass
def in_parts(function):
    before, sys.stdout = sys.stdout, Part()
    print("unseen")
    result = function()
    sys.stdout = before
    print("seen", result)
""",
        cases("""    def test_redirected(self):
        import contextlib
        with contextlib.redirect_stdout(io.StringIO()) as out:
            task_func([1, "a"])
        self.assertEqual(out.getvalue(), "rows 2\\n1;a;")
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            with self.assertRaises(ValueError):
                fails("bad")
        self.assertEqual(out.getvalue(), "before\\nbad\\nafter")
        with contextlib.redirect_stdout(None):
            task_func([])
    def test_assigned(self):
        out = sys.stdout = io.StringIO()
        task_func([])
        sys.stdout = sys.__stdout__
        task_func([1])
        self.assertEqual(out.getvalue(), "rows 0\\n")
    def test_a_class_that_captures(self):
        class Lines(list):
            def __enter__(self):
                self.before, sys.stdout = sys.stdout, self
                return self
            def write(self, text):
                self.append(text)
            def __exit__(self, *raised):
                sys.stdout = self.before
        with Lines() as lines:
            in_parts(lambda: 3)
        self.assertEqual(lines, ["seen", " ", "3", "\\n"])
"""),
    ),
    "printed text that tests capture by a patch": (
        """import sys
def task_func():
    print("a", 1, flush=True)
def asks():
    return input("name? "), sys.stdin.read()
""",
        cases("""    @patch("sys.stdout", new_callable=io.StringIO)
    def test_a_stream(self, out):
        task_func()
        self.assertEqual(out.getvalue(), "a 1\\n")
    def test_of_an_object(self):
        with patch.object(sys, "stdout", io.StringIO()) as out, patch("sys.stdin", io.StringIO("bob\\nx\\ny")):
            self.assertEqual(asks(), ("bob", "x\\ny"))
        self.assertEqual(out.getvalue(), "name? ")
    @patch("sys.stdout")
    def test_a_mock(self, out):
        task_func()
        self.assertEqual(out.mock_calls, [*map(call.write, ["a", " ", "1", "\\n"]), call.flush()])
    @patch("sys.stdout.write")
    def test_a_method(self, write):
        task_func()
        write.assert_any_call("a")
    @patch("builtins.print")
    def test_the_function(self, printed):
        task_func()
        printed.assert_called_once_with("a", 1, flush=True)
    @patch("sys.stdin", **{"readline.side_effect": ["joe\\n"], "read.return_value": "z"})
    def test_a_mock_that_is_read(self, stdin):
        self.assertEqual(asks(), ("joe", "z"))
"""),
    ),
    "text that is printed by other acts than a call": (
        """import asyncio
def task_func(items):
    for item in items:
        print("item", item)
        yield item
async def later():
    print("begins")
    await asyncio.sleep(0)
    print("ends")
class Shop:
    def __enter__(self):
        print("enter")
        return self
    def __exit__(self, *raised):
        print("exit")
    def __str__(self):
        print("text")
        return "shop"
    @property
    def size(self):
        print("size")
        return 4
def print_all(items):
    print("first")
    for item in items:
        print(item)
""",
        cases("""    def setUp(self):
        self.before = sys.stdout
    def tearDown(self):
        sys.stdout = self.before
    def output_of(self, act):
        sys.stdout = io.StringIO()
        act()
        return sys.stdout.getvalue()
    def test_a_generator(self):
        generator = task_func([1, 2, 3])
        self.assertEqual(self.output_of(lambda: next(generator)), "item 1\\n")
        self.assertEqual(self.output_of(lambda: list(generator)), "item 2\\nitem 3\\n")
    def test_a_coroutine(self):
        self.assertEqual(self.output_of(lambda: asyncio.run(later())), "begins\\nends\\n")
    def test_an_object(self):
        shop = Shop()
        self.assertEqual(self.output_of(lambda: str(shop)), "text\\n")
        self.assertEqual(self.output_of(lambda: shop.size), "size\\n")
        self.assertEqual(self.output_of(lambda: shop.__class__), "")
        def enter():
            with shop:
                pass
        self.assertEqual(self.output_of(enter), "enter\\nexit\\n")
    def test_the_order_of_what_both_print(self):
        def items():
            print("ours")
            yield 1
        self.assertEqual(self.output_of(lambda: print_all(items())), "first\\nours\\n1\\n")
"""),
    ),
    "random numbers that tests seed": (
        """import random
import numpy as np
def task_func(n):
    return [random.random() for _ in range(n)], np.random.rand(n)
""",
        cases("""    def test_seeds(self):
        import numpy
        random.seed(3)
        numpy.random.seed(3)
        result, drawn = task_func(2)
        random.seed(3)
        numpy.random.seed(3)
        self.assertEqual(result, [random.random(), random.random()])
        numpy.testing.assert_array_equal(drawn, numpy.random.rand(2))
"""),
    ),
    "arrays and frames": (
        """import numpy as np
import pandas as pd
def task_func(frame):
    table = frame.assign(total=frame["n"] * 2)
    table.index.name = "row"
    return table
def raise_by_one(array):
    array += 1
    return array.mean()
def grouped(frame):
    return frame.groupby("name")["n"].sum()
""",
        cases("""    def test_frames(self):
        import numpy as np
        import pandas as pd
        frame = pd.DataFrame({"name": ["a", "b", "a"], "n": [1, 2, 3]})
        frame["when"] = pd.to_datetime(["2020-01-01", "2020-01-02", None])
        frame["kind"] = pd.Categorical(["u", "v", "u"])
        result = task_func(frame)
        self.assertIsInstance(result, pd.DataFrame)
        expected = frame.assign(total=[2, 4, 6])
        expected.index.name = "row"
        pd.testing.assert_frame_equal(result, expected)
        self.assertEqual(grouped(frame).to_dict(), {"a": 4, "b": 2})
        array = np.arange(3.0)
        self.assertAlmostEqual(raise_by_one(array), 2.0)
        np.testing.assert_allclose(array, [1, 2, 3])
"""),
    ),
    "tests that are functions": (
        "def task_func(x):\n    print('printed', x)\n    return [x, x]\n",
        {
            "tests": """import io
from unittest.mock import patch
from solution import task_func
LIMIT = 2
def test_a_list():
    assert task_func(1) == [1, 1]
@patch("sys.stdout", new_callable=io.StringIO)
def test_what_is_printed(out):
    assert len(task_func(3)) == LIMIT and out.getvalue() == "printed 3\\n"
""",
        },
    ),
    "iterators, and exceptions that also steer": (
        """import sys
class Countdown:
    def __init__(self, start):
        self.left = start
    def __iter__(self):
        return self
    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left
def task_func(code):
    if code is None:
        raise KeyboardInterrupt
    sys.exit(code)
""",
        cases("""    def test_a_countdown(self):
        self.assertEqual(list(Countdown(3)), [2, 1, 0])
        self.assertEqual([*zip(Countdown(2), Countdown(3))], [(1, 2), (0, 1)])
        with self.assertRaises(StopIteration):
            next(Countdown(0))
        for start in (1, 2):
            with self.subTest(start=start):
                self.assertEqual(sum(Countdown(start)), start - 1)
    def test_leaving(self):
        with self.assertRaises(SystemExit) as left:
            task_func(3)
        self.assertEqual(left.exception.code, 3)
        with self.assertRaises(KeyboardInterrupt):
            task_func(None)
"""),
    ),
    "a function named as a builtin": (
        "def sum(a, b):\n    return a + b\n",
        {"tests": "assert abs(sum(10, 15) - 25) < 1"},
    ),
    "objects of the tests": (
        "def task_func(shop):\n    shop.sold += 1\n    return [item.price for item in shop.items] + [shop.name()]\n",
        {
            "entry_point": "task_func",
            "tests": """import types
class Shop:
    def __init__(self):
        self.items, self.sold = [types.SimpleNamespace(price=3)], 0
    def name(self):
        return "shop"
shop = Shop()
assert task_func(shop) == [3, "shop"]
assert shop.sold == 1
""",
        },
    ),
}
