"""Programs that try to pass the tests of their task without solving it; tools/bench/sandbox.py reads them too.

The task is `twice(x)`, which is 2 * x, or x.multiply(2) where it has that method. Each program of attacks.txt is tried
against each of FORMS, and must score 0, which is not a missing score.
"""

from __future__ import annotations

from pathlib import Path

FORMS = {
    "check": {
        "entry_point": "twice",
        "test": """import math
def check(candidate):
    assert candidate(2) == 4
    assert abs(candidate(2.5) - 5.0) < 1e-6
    assert math.isclose(candidate(0.1), 0.2)
    assert candidate([1]) == [1, 1]
""",
    },
    "unittest": {
        "entry_point": "twice",
        "test": """import io, unittest
from unittest.mock import MagicMock, patch
class TestTwice(unittest.TestCase):
    def test_numbers(self):
        self.assertEqual(twice(2), 4)
        self.assertAlmostEqual(twice(2.5), 5.0)
    def test_others(self):
        self.assertTrue(twice("ab") == "abab")
        self.assertListEqual(twice([1, 2]), [1, 2, 1, 2])
        self.assertIn(6, [twice(3)])
    def test_methods(self):
        self.assertTrue(twice("a").startswith("aa"))
        self.assertFalse(set(twice([1])).difference({1}))
    @patch("sys.stdout", new_callable=io.StringIO)
    def test_nothing_is_printed(self, out):
        self.assertEqual((twice(5), out.getvalue()), (10, ""))
    @patch("time.time", return_value=3)
    def test_clock(self, clock):
        self.assertEqual(twice(4), 8)
        double = MagicMock(spec=["multiply"])
        double.multiply.return_value = 8
        self.assertEqual(twice(double), 8)
        double.multiply.assert_called_once_with(2)
""",
    },
    "asserts": {
        "tests": """assert twice(2) == 4
assert twice([3]) == [3, 3]
assert sorted(twice([2, 1])) == [1, 1, 2, 2]
"""
    },
    "loops": {
        "tests": """for result, right in zip(map(twice, [2, 2.5]), [4, 5.0]):
    assert result == right
assert all(len(result) == 2 for result in map(twice, ["a", [1]]))
"""
    },
    "functions": {
        "tests": """import pytest
from solution import twice
def test_numbers():
    for result, right in zip(map(twice, [2, 2.5]), [4, 5.0]):
        assert result == pytest.approx(right)
def test_lists():
    assert [*map(twice, ["a", [1]])] == ["aa", [1, 1]]
"""
    },
    "tasks": {
        "entry_point": "twice",
        "test": """import asyncio, unittest
class TestTwice(unittest.IsolatedAsyncioTestCase):
    async def test_tasks(self):
        async def compare(x):
            with self.subTest(x=x):
                self.assertEqual(twice(x), x + x)
        async with asyncio.TaskGroup() as group:
            for x in (2, 2.5, "a", [1]):
                group.create_task(compare(x))
""",
    },
}
RIGHT = "def twice(x):\n    return x.multiply(2) if hasattr(x, 'multiply') else 2 * x\n"
ATTACKS = {
    name: code
    for part in Path(__file__).with_name("attacks.txt").read_text().split("#### ")[1:]
    for name, _, code in [part.partition("\n")]
}
