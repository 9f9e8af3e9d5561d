"""Balanced parts against all cuts there are."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from piper.cost.balance import balanced, largest


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e3)), min_size=1, max_size=8),
    st.integers(1, 8),
)
def test_the_largest_part_is_the_smallest_possible(costs: list[float], num: int) -> None:
    num = min(num, len(costs))
    cuts = [(0, *inner) for inner in combinations(range(1, len(costs)), num - 1)]

    def sums(starts: tuple[int, ...]) -> list[float]:
        ends = [*starts[1:], len(costs)]
        return [sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)]

    best = min(max(sums(cut)) for cut in cuts)
    tolerance = 1e-9 * (best + sum(costs))
    assert abs(largest(costs, num) - best) <= tolerance
    found = balanced(costs, num)
    assert len(found) == num
    assert found[0] == 0
    assert found == sorted(set(found))
    assert max(sums(tuple(found))) <= best + tolerance


def test_other_parts_are_balanced_too() -> None:
    assert balanced([1.0] * 12, 4) == [0, 3, 6, 9]
    assert balanced([1.0, 1.0, 1.0, 1.0, 4.0], 3) == [0, 2, 4]
