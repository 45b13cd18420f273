"""What tests/mutants.py plants, and to which tests it gives a fault."""

from __future__ import annotations

import ast

from mutants import Covering, faults_of

TEXT = b'''
"""Words 1 > 2."""
LIMIT: int = 3

@remembered(5)
def f(x: int = 4, *, on=True) -> g(1):
    if x < LIMIT and not on:
        raise ValueError(f"x is {x + 1}")
    x += g(x, -x, x)
    g("\xc3\xa4", 1)
    return [y for y in h(x, x) if y is not None] + [0.0, 3.0]

z = zip(min(x, y), strict=True)
'''
PLANTED = {
    (3, "4"), (6, "5"), (6, "False"),
    (7, "(x < LIMIT or not on)"), (7, "(x <= LIMIT)"), (7, "(on)"), (7, "(not (x < LIMIT and (not on)))"),
    (8, "pass"), (9, "pass"), (9, "g(-x, x, x)"), (9, "(x)"), (10, "pass"), (10, "g(1, '\u00e4')"), (10, "2"),
    (11, "(y is None)"), (11, "1.0"), (11, "4.5"), (11, "([y for y in h(x, x) if y is not None] - [0.0, 3.0])"),
}  # fmt: skip


def test_faults_of_a_text():
    """Not in messages, decorators and types; each leaves a text that Python reads and that is another one."""
    faults = list(faults_of("f.py", TEXT, set(range(1, 20))))
    assert {(x.line, x.new) for x in faults} == PLANTED and len(faults) == len(PLANTED)
    whole = ast.dump(ast.parse(TEXT))
    planted = {ast.dump(ast.parse(x.plant(TEXT))) for x in faults}
    assert len(planted) == len(faults) and whole not in planted
    assert [x.new for x in faults_of("f.py", TEXT, {8})] == ["pass"]
    assert str(faults[0]) == "f.py:3: 3  ->  4"


def test_tests_of_a_line():
    """The quickest first, up to some seconds; for a line that no test runs, those of the file, or all."""
    tests = Covering({("a.py", 1): {"slow", "quick"}, ("a.py", 2): {"other"}, ("b.py", 1): {"far"}})
    tests.seconds.update(slow=5.0, quick=1.0, other=2.0)
    assert tests.of("a.py", 1, 60) == ["quick", "slow"] and tests.of("a.py", 1, 5) == ["quick"]
    assert tests.of("a.py", 1, 0.5) == ["quick"] and tests.of("a.py", 7, 4) == ["quick", "other"]
    assert tests.of("c.py", 1, 60) == ["quick", "other", "slow"]


def test_fixtures_that_tests_share():
    """What runs in a fixture is tested by every test of its file."""
    tests = Covering({("a.py", 1): {"t.py::first"}, ("a.py", 2): {"t.py::first"}}, {("a.py", 1): {"t.py"}})
    tests.seconds.update({"t.py::first": 1.0, "t.py::next": 2.0, "u.py::other": 1.0})
    assert tests.of("a.py", 1, 60) == ["t.py::first", "t.py::next"] and tests.of("a.py", 2, 60) == ["t.py::first"]
