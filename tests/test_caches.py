"""Every cache is bounded, drops what was used least recently, and can be emptied at any time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from interruptions import interrupted

import flashtile
from flashtile import lru
from flashtile.backends.triton import plan
from flashtile.call import memo
from flashtile.lru import Memo, memoised

PACKAGE = Path(flashtile.__file__).parent


def test_a_memo_keeps_what_was_used_last():
    table: Memo[str, int] = Memo(3)
    for number, key in enumerate("abc"):
        table[key] = number
    assert table.get("a") == 0
    table["d"] = 3
    assert [table.get(key) for key in "dac"] == [3, 0, 2]
    assert table.get("b", "gone") == "gone"


def test_a_memo_returns_the_value_that_was_set_last():
    table: Memo[str, list[int] | None] = Memo(3)
    table["a"] = []
    assert table.get("a", [0]) == []
    table["a"] = None
    assert table.get("a", [0]) is None


def test_a_memoised_function_keeps_what_was_used_last():
    seen = []

    @memoised(2)
    def double(x: int) -> int:
        seen.append(x)
        return 2 * x

    assert [double(x) for x in (1, 2, 1, 3, 1, 2)] == [2, 4, 2, 6, 2, 4]
    assert seen == [1, 2, 3, 2]
    flashtile.clear_caches()
    assert double(2) == 4
    assert seen == [1, 2, 3, 2, 2]


def set_one(table: Memo[int, int]) -> None:
    table[1] = 1


def set_three(table: Memo[int, int]) -> None:
    for key in (5, 6, 7):
        table[key] = key


@pytest.mark.parametrize(
    "other", [set_one, set_three, lambda table: table.clear()], ids=["sets", "evicts", "clears"]
)
@pytest.mark.parametrize("ours", [set_one, lambda table: table.get(1, 1)], ids=["set", "get"])
def test_another_thread_may_use_a_memo_at_any_time(ours, other):
    def make() -> Memo[int, int]:
        table: Memo[int, int] = Memo(3)
        for key in (1, 2, 3):
            table[key] = key
        return table

    for value in interrupted(make, ours, other, lru):
        assert value in (None, 1)


def test_calls_go_on_after_the_caches_are_emptied():
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    decided = memo.decisions._cell.cache_info
    out = flashtile.attention(q, k, v, causal=True)
    assert decided().currsize > 0
    flashtile.clear_caches()
    assert decided().currsize == 0
    assert torch.equal(flashtile.attention(q, k, v, causal=True), out)


def test_no_cache_is_made_elsewhere():
    """Benchmarks keep their measurements of the machine."""
    found = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\b(lru_cache|functools\.cache|import cache|OrderedDict)\b", path.read_text())
    ]
    assert [name for name in found if not name.startswith("bench")] == ["lru.py"]


def test_forced_tiles_nest_and_what_was_made_of_others_is_forgotten():
    @memoised(1)
    def forward() -> plan.Tile:
        return plan.tiles_for("sm_80", 64)[0]

    before = forward()
    one, other = plan.Tile(16, 16, 1, 1), plan.Tile(32, 16, 1, 1)
    with plan.forced_tile("forward", one):
        assert forward() == one
        with plan.forced_tile("forward", other):
            assert forward() == other
        assert forward() == one
    assert forward() == before
