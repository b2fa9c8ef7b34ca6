"""`cross_entropy_loss` and the options that `CrossEntropyLoss` passes on: precomputed log-sum-exps,
in-place gradients, a vocabulary sharded over processes."""

from __future__ import annotations

import inspect

import processes
import pytest
import torch
import torch.nn.functional as F

from flashtile.losses import token_losses
from flashtile.losses.cross_entropy import CrossEntropyLoss, linear_cross_entropy
from flashtile.losses.token_losses import cross_entropy_loss

pytestmark = pytest.mark.slow

TOKENS, VOCAB = 13, 10
EVERYTHING = {"label_smoothing": 0.2, "logit_scale": 0.7, "lse_square_scale": 0.05}


def inputs(dtype=torch.float64):
    logits = torch.randn(TOKENS, VOCAB).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,))
    labels[::4] = -100
    return logits, labels


def by_pytorch(logits, labels, smoothing=0.0, scale=1.0, z=0.0):
    """The same losses from PyTorch's functions."""
    x = logits * scale
    losses = F.cross_entropy(x, labels, reduction="none", label_smoothing=smoothing)
    z_losses = z * x.logsumexp(-1).square() * (labels != -100)
    return losses + z_losses, z_losses


@pytest.mark.parametrize("label", [VOCAB, -1])
@pytest.mark.parametrize("check", [None, "1"])
def test_labels_out_of_range(label, check, monkeypatch):
    monkeypatch.delenv("FLASHTILE_CHECK", raising=False)
    if check is not None:
        monkeypatch.setenv("FLASHTILE_CHECK", check)
    logits, labels = inputs()
    labels[5] = label
    message = rf"labels: got {label}, want \[0, {VOCAB}\) or ignore_index=-100"
    with pytest.raises(IndexError, match=message):
        cross_entropy_loss(logits, labels)
    with pytest.raises(IndexError, match=message.replace("labels", "target")):
        linear_cross_entropy(logits, torch.eye(VOCAB, dtype=logits.dtype), labels)
    labels[labels == -100] = label
    assert cross_entropy_loss(logits, labels, ignore_index=label)[0][5] == 0


def test_labels_out_of_range_of_several_processes_are_not_silent_without_the_check(monkeypatch):
    """On a GPU no value is read, and none of the processes has such a label."""
    monkeypatch.setenv("FLASHTILE_CHECK", "0")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(token_losses, "_over_processes", lambda lse, score, group: (lse, score))
    logits, labels = inputs()
    labels[5] = 2 * VOCAB
    losses, _ = cross_entropy_loss(logits, labels, process_group="two")
    assert losses.isnan().nonzero().flatten().tolist() == [5]


def test_positions_are_those_of_flash_attn():
    wanted = "logits labels precomputed_lse label_smoothing logit_scale lse_square_scale "
    wanted += "ignore_index inplace_backward process_group"
    assert list(inspect.signature(cross_entropy_loss).parameters) == wanted.split()
    wanted = "ignore_index reduction label_smoothing logit_scale lse_square_scale "
    wanted += "inplace_backward process_group return_z_loss"
    assert list(inspect.signature(CrossEntropyLoss).parameters) == wanted.split()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("knows_lse", [False, True])
@pytest.mark.parametrize("smoothing_scale_z", [(0.0, 1.0, 0.0), (0.2, 0.7, 0.05)])
def test_losses_and_gradients(smoothing_scale_z, knows_lse, in_place, monkeypatch, seed):
    monkeypatch.setattr(token_losses, "CHUNK", 3 * VOCAB)  # several chunks, the last one short
    logits, labels = inputs()
    lse = logits.detach().logsumexp(-1) if knows_lse else None
    wanted = by_pytorch(logits, labels, *smoothing_scale_z)
    weights = torch.randn(TOKENS, dtype=torch.float64)
    (wanted_gradient,) = torch.autograd.grad(wanted[0] @ weights, logits)

    given = logits.detach().clone().requires_grad_()
    got = cross_entropy_loss(given, labels, lse, *smoothing_scale_z, inplace_backward=in_place)
    torch.testing.assert_close(got, wanted)
    assert not got[1].requires_grad
    (gradient,) = torch.autograd.grad(got[0] @ weights, given)
    torch.testing.assert_close(gradient, wanted_gradient)
    assert (gradient.data_ptr() == given.data_ptr()) == in_place
    assert torch.equal(given, logits) != in_place


def test_a_known_lse_is_used(seed):
    logits, labels = inputs()
    loss = CrossEntropyLoss(reduction="none", ignore_index=-1)
    target = labels.clamp(min=0).view(1, -1)
    lse = torch.zeros(1, TOKENS)
    got = loss(logits[None], target, precomputed_lse=lse)
    torch.testing.assert_close(got, -logits[None].gather(-1, target[..., None]).squeeze(-1))


def test_second_derivative(seed):
    logits, labels = inputs()
    assert torch.autograd.gradgradcheck(
        lambda x: cross_entropy_loss(x, labels, None, 0.1, 0.7, 0.05)[0],
        logits,
    )


def test_gradients_of_each_sample(seed):
    logits, labels = inputs()
    loss = CrossEntropyLoss(label_smoothing=0.1, ignore_index=-1)
    labels = labels.clamp(min=0)
    each = torch.func.vmap(torch.func.grad(loss))(logits.detach()[:, None], labels[:, None])
    wanted = torch.autograd.grad(loss(logits, labels) * TOKENS, logits)[0]
    torch.testing.assert_close(each.squeeze(1), wanted)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"logits": torch.zeros(2, TOKENS, VOCAB)}, "logits: got"),
        ({"logits": torch.zeros(TOKENS, VOCAB).long()}, "logits: got"),
        ({"labels": torch.zeros(3).long()}, r"labels: got shape \(3,\), want \(13,\)"),
        ({"precomputed_lse": torch.zeros(3)}, r"precomputed_lse: got shape \(3,\)"),
    ],
)
def test_wrong_shapes_are_named(change, why):
    logits, labels = inputs()
    with pytest.raises(ValueError, match=why):
        cross_entropy_loss(**{"logits": logits, "labels": labels, **change})


def one_of_two(rank, folder):
    """Write the losses and gradients of this process's half of the vocabulary."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    torch.manual_seed(5)
    logits, labels = inputs()
    group = torch.distributed.group.WORLD
    half = logits.detach().chunk(2, dim=-1)[rank].clone().requires_grad_()
    loss, z_loss = CrossEntropyLoss(**EVERYTHING, process_group=group, return_z_loss=True)(
        half, labels
    )
    (gradient,) = torch.autograd.grad(loss, half)
    labels[1] = VOCAB
    try:
        cross_entropy_loss(half, labels, process_group=group)
        error = ""
    except IndexError as raised:
        error = str(raised)
    torch.save((loss.detach(), z_loss, gradient, error), folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")
def test_two_processes_share_the_vocabulary(tmp_path):
    ranks = [
        processes.SERVER.Process(target=one_of_two, args=(rank, tmp_path), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
    torch.manual_seed(5)
    logits, labels = inputs()
    losses, z_losses = by_pytorch(logits, labels, 0.2, 0.7, 0.05)
    count = (labels != -100).sum()
    (gradient,) = torch.autograd.grad(losses.sum() / count, logits)
    for rank, half in enumerate(gradient.chunk(2, dim=-1)):
        got_loss, got_z, got_gradient, error = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(got_loss, (losses.sum() / count).detach())
        torch.testing.assert_close(got_z, (z_losses.sum() / count).detach())
        torch.testing.assert_close(got_gradient, half)
        assert f"want [0, {VOCAB})" in error


def test_chunks_of_hidden_states_want_the_whole_vocabulary():
    loss = CrossEntropyLoss(process_group=object())
    with pytest.raises(ValueError, match="process_group"):
        linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3).long(), loss)


def test_a_target_elsewhere_reads_no_logit_here():
    """Not even one of -inf, as of a token that a model never says."""
    logits = torch.tensor([[-torch.inf, 1.0, 2.0]]).expand(2, 3)
    nowhere = torch.zeros(2, dtype=torch.int64), torch.tensor([False, False])
    _, score = token_losses._Statistics.apply(logits, *nowhere, None, 1.0, 1.0, 0.0, False)
    assert torch.equal(score, torch.zeros(2))
