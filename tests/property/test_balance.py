"""Balanced parts against all cuts there are."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from piper.cost.balance import balanced, balanced_together, largest, largest_group


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


@given(st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=12), st.permutations(range(4)))
def test_groups_are_no_worse_than_those_of_balanced_parts(
    costs: list[float], order: list[int]
) -> None:
    together = [order[:2], order[2:]]
    found = balanced_together(costs, 4, together)
    assert found[0] == 0 and found == sorted(set(found)) and found[-1] < len(costs)
    before = largest_group(costs, balanced(costs, 4), together)
    assert largest_group(costs, found, together) <= before * (1 + 1e-8)


def test_parts_of_a_group_make_room_for_each_other() -> None:
    """A stage with a heavy head: the other one on its device is smaller."""
    costs, together = [1.0] * 15 + [4.0], [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert largest_group(costs, balanced(costs, 8), together) == 7.0
    assert largest_group(costs, balanced_together(costs, 8, together), together) == 5.0
