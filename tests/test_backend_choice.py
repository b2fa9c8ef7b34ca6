"""`flashtile.backend` forces a backend from a call on or in a block, for one thread or for all."""

from __future__ import annotations

import threading

import pytest
import torch

import flashtile
from flashtile.call import dispatch


@pytest.fixture(autouse=True)
def nothing_stays_forced():
    yield
    flashtile.backend(None)


def runs_on(name):
    """Whether a call is refused with that backend's name, on a machine without a GPU."""
    q = torch.randn(1, 5, 1, 8)
    try:
        flashtile.attention(q, q, q)
    except NotImplementedError as error:
        return f"backend {name!r}" in str(error)
    return name == "cpu"


def in_another_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_call_without_with_is_effective_at_once_and_in_every_thread():
    flashtile.backend("triton")
    assert runs_on("triton")
    assert in_another_thread(lambda: runs_on("triton"))
    flashtile.backend("cpu")
    assert runs_on("cpu")
    flashtile.backend("hopper")
    flashtile.backend(None)
    assert dispatch.forced() is None
    assert runs_on("cpu")


def test_a_block_restores_also_after_an_exception():
    flashtile.backend("hopper")
    with flashtile.backend("triton"):
        assert runs_on("triton")
        with flashtile.backend("cpu"):
            assert runs_on("cpu")
        assert runs_on("triton")
        with flashtile.backend(None):
            assert runs_on("cpu")
        with pytest.raises(KeyError), flashtile.backend("cpu"):
            raise KeyError
        assert runs_on("triton")
    assert runs_on("hopper")


def test_a_block_can_be_entered_again():
    block = flashtile.backend("triton")
    assert dispatch.forced() == "triton"
    for _ in range(2):
        with block:
            assert dispatch.forced() == "triton"
            with block:
                assert dispatch.forced() == "triton"
            assert dispatch.forced() == "triton"
        assert dispatch.forced() is None


def test_a_result_that_is_kept_forces_its_thread_only_until_it_is_dropped():
    kept = flashtile.backend("triton")
    assert runs_on("triton")
    assert in_another_thread(dispatch.forced) is None
    del kept
    assert in_another_thread(dispatch.forced) == "triton"


def test_no_other_thread_sees_a_block_before_it_is_entered():
    flashtile.backend("hopper")
    with flashtile.backend("triton") as entered:
        assert entered is None
    block = flashtile.backend("triton")
    assert in_another_thread(dispatch.forced) == "hopper"
    with block:
        assert in_another_thread(dispatch.forced) == "hopper"
    del block
    assert in_another_thread(dispatch.forced) == "hopper"
    assert dispatch.forced() == "hopper"


def test_the_latest_call_counts_whatever_is_kept():
    kept = flashtile.backend("triton")
    flashtile.backend("cpu")
    assert dispatch.forced() == "cpu"
    del kept
    assert dispatch.forced() == "cpu"
    assert in_another_thread(dispatch.forced) == "cpu"


def test_calls_without_with_keep_nothing():
    for _ in range(3):
        for name in ("cpu", "triton"):
            flashtile.backend(name)
    assert not flashtile.backend._in_force.held
    assert not flashtile.backend._in_force.blocks
    assert len(flashtile.backend._in_force.everywhere) == 1


def test_a_block_is_of_its_thread():
    with flashtile.backend("triton"):
        assert in_another_thread(dispatch.forced) is None
        assert in_another_thread(lambda: runs_on("cpu"))


def test_blocks_of_two_threads_that_overlap():
    """Two blocks, of which the first ends first: neither may restore the other's backend."""
    first_inside, second_inside, first_left = (threading.Event() for _ in range(3))
    seen = []

    def first():
        with flashtile.backend("triton"):
            first_inside.set()
            second_inside.wait(60)
            seen.append(dispatch.forced())
        first_left.set()

    def second():
        first_inside.wait(60)
        with flashtile.backend("hopper"):
            second_inside.set()
            first_left.wait(60)
            seen.append(dispatch.forced())

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["triton", "hopper"]
    assert dispatch.forced() is None


def test_blocks_that_start_together_force_nothing_afterwards():
    one, other = flashtile.backend("triton"), flashtile.backend("hopper")
    one.__enter__()
    other.__enter__()
    one.__exit__()
    other.__exit__()
    assert dispatch.forced() is None


@pytest.mark.parametrize("name", ["abacus", "", 3])
def test_an_unknown_name_is_refused_at_once(name):
    with pytest.raises(ValueError, match="backend: got"):
        flashtile.backend(name)
    assert dispatch.forced() is None


@pytest.mark.slow
def test_a_compiled_function_notices():
    q = torch.randn(1, 5, 1, 8)
    compiled = torch.compile(flashtile.attention, fullgraph=True, backend="aot_eager")
    want = compiled(q, q, q)
    with pytest.raises(Exception, match="backend 'triton'"), flashtile.backend("triton"):
        compiled(q, q, q)
    flashtile.backend("triton")
    with pytest.raises(Exception, match="backend 'triton'"):
        compiled(q, q, q)
    with flashtile.backend("cpu"):
        assert torch.equal(compiled(q, q, q), want)


def test_a_block_inside_a_compiled_function():
    def function(q):
        with flashtile.backend("cpu"):
            return flashtile.attention(q, q, q)

    q = torch.randn(1, 5, 1, 8)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with flashtile.backend("triton"):
        assert torch.equal(compiled(q), function(q))
        assert dispatch.forced() == "triton"
    assert dispatch.forced() is None
