"""The stance of `torch.compile` while a score function is traced, and after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo import eval_frame

from flashtile.score_mod.trace import compiled_functions_run_eagerly


@pytest.fixture(autouse=True)
def stance() -> Iterator[object]:
    """The stance before a test, which is set again after it."""
    before = eval_frame._stance
    yield before
    eval_frame._stance = before


def test_the_last_one_resets_the_stance(stance: object) -> None:
    with compiled_functions_run_eagerly():
        with compiled_functions_run_eagerly():
            assert eval_frame._stance.stance == "force_eager"
        assert eval_frame._stance.stance == "force_eager"
    assert eval_frame._stance is stance


def test_a_stance_of_the_user_stays() -> None:
    with compiled_functions_run_eagerly():
        torch.compiler.set_stance("fail_on_recompile")
    assert eval_frame._stance.stance == "fail_on_recompile"


def test_a_thread_that_may_not_change_the_stance_resets_it(
    stance: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch refuses in a thread that runs compiled code, which need not be the first one."""
    here = threading.current_thread()
    set_stance = eval_frame._set_stance
    with compiled_functions_run_eagerly():

        def refused(new: object) -> object:
            if threading.current_thread() is here:
                raise RuntimeError("attempted to set_stance in a torch.compile region")
            return set_stance(new)

        monkeypatch.setattr("torch._dynamo.decorators._set_stance", refused)
    assert eval_frame._stance is stance
