"""Running estimates: a line that fades, and the ends of recent values."""

from __future__ import annotations

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.online_fit import FadingLine, RecentValues


def test_a_line_is_found_again():
    line = FadingLine(1.0)
    assert line.predict(3) is None
    line.observe(5, 2.0)
    assert line.predict(100) == 2.0
    for x in range(10):
        line.observe(x, 1 + 0.2 * x)
    assert line.predict(50) == pytest.approx(11.0, rel=0.05)
    falling = FadingLine(1.0)
    for x in range(10):
        falling.observe(x, 10.0 - x)
    assert falling.predict(100) == pytest.approx(5.5), "a longer sequence never predicts less time"


def test_a_line_follows_the_load():
    line = FadingLine(0.5)
    for x in range(20):
        line.observe(x, 1.0)
    for x in range(20):
        line.observe(x, 3.0)
    assert line.predict(10) == pytest.approx(3.0, abs=0.01)


def test_a_line_through_the_origin_is_steady():
    points = [(100, 5.0), (90, 6.0)]
    steady, free = FadingLine(through_origin=1.0), FadingLine()
    for x, y in points:
        steady.observe(x, y)
        free.observe(x, y)
    assert free.predict(10) > 5.0
    assert steady.predict(10) == pytest.approx(0.6, abs=0.3)
    assert steady.predict(200) == pytest.approx(11.5, abs=0.5)


def test_a_line_through_the_origin_has_the_height_of_its_points():
    line = FadingLine(1.0, through_origin=1.0)
    for _ in range(20):
        line.observe(100, 5.0)
    assert line.predict(100) == pytest.approx(5.0)
    for _ in range(20):
        line.observe(100, 7.0)
    assert line.predict(100) == pytest.approx(6.0)


def test_a_line_drawn_a_little_follows_points_that_differ():
    line = FadingLine(1.0, through_origin=0.02)
    line.observe(100, 5.0)
    assert line.predict(20) == pytest.approx(1.0)
    for x in range(10, 200, 10):
        line.observe(x, 3.0 + 0.02 * x)
    assert line.predict(400) == pytest.approx(11.0, rel=0.1)


@pytest.mark.parametrize("options", [{"keep": 0.0}, {"keep": 1.1}, {"through_origin": -0.1}, {"through_origin": 2.0}])
def test_wrong_weights_are_named(options):
    (name,) = options
    with pytest.raises(InvalidInputError, match=f"{name} is"):
        FadingLine(**options)


def recent(values, size=64):
    found = RecentValues(size)
    for value in values:
        found.add(value)
    return found


def test_ends_of_values():
    assert recent([]).upper(0.95) is None
    assert recent([]).lower(0.95) is None
    assert recent(range(20)).upper(0.95) == 19
    assert recent(range(21)).upper(0.95) == 19
    assert recent(range(20)).lower(0.95) == 0
    assert recent(range(21)).lower(0.95) == 1
    assert recent([7.0]).upper(0.95) == recent([7.0]).lower(0.95) == 7.0


@pytest.mark.parametrize("count", [1, 10, 40, 64])
def test_few_values_lie_beyond_the_ends(count):
    values = [float((7 * n) % 61) for n in range(count)]
    upper, lower = recent(values).upper(0.9), recent(values).lower(0.9)
    assert sum(value > upper for value in values) <= 0.1 * count
    assert sum(value < lower for value in values) <= 0.1 * count


def test_old_values_are_forgotten():
    assert recent([100.0] * 5 + [1.0] * 8, size=8).upper(0.95) == 1.0
