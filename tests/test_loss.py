"""The chunked head loss equals cross entropy on full logits, value and gradients."""

import pytest
import torch
from torch import nn

from zen_train import loss
from zen_train.loss import IGNORE, head_nll, logits_nll, shifted


def both_ways(tokens: int, hidden: int, vocabulary: int, *, bias: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    head = nn.Linear(hidden, vocabulary, bias=bias).to(dtype)
    x_ND = torch.randn(tokens, hidden, dtype=dtype)
    label_N = torch.randint(0, vocabulary, (tokens,))
    ours_x, reference_x = x_ND.clone().requires_grad_(), x_ND.clone().requires_grad_()
    (3.0 * head_nll(ours_x, head, label_N)).backward()
    ours = [ours_x.grad, *(parameter.grad.clone() for parameter in head.parameters())]
    head.zero_grad()
    (3.0 * nn.functional.cross_entropy(head(reference_x), label_N, reduction="sum")).backward()
    return ours, [reference_x.grad, *(parameter.grad for parameter in head.parameters())]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("tokens", [1, 7, 13], ids=lambda n: f"N{n}")
def test_gradients_equal_those_of_full_logits(monkeypatch, tokens, bias):
    monkeypatch.setattr(loss, "_CHUNK_LOGITS", 4 * 33)
    monkeypatch.setattr(loss, "_CPU_ROWS", 3)
    ours, reference = both_ways(tokens, 8, 33, bias=bias, dtype=torch.float64)
    for mine, theirs in zip(ours, reference, strict=True):
        # float64 throughout except the float32 softmax: its rounding bounds the error.
        assert (mine - theirs).norm() <= 1e-6 * theirs.norm()


def test_value_equals_that_of_full_logits():
    torch.manual_seed(0)
    head, hidden_BTD = nn.Linear(8, 33, bias=False), torch.randn(2, 6, 8)
    labels_BT = torch.randint(0, 33, (2, 6))
    labels_BT[0, :3] = IGNORE
    label_BT = shifted(labels_BT)
    kept = label_BT != IGNORE
    ours = head_nll(hidden_BTD[kept], head, label_BT[kept])
    assert torch.allclose(ours, logits_nll(head(hidden_BTD), labels_BT), rtol=1e-6)


def test_without_gradients_the_value_is_the_same():
    torch.manual_seed(0)
    head, hidden_ND, label_N = nn.Linear(8, 33), torch.randn(5, 8, requires_grad=True), torch.arange(5)
    with torch.no_grad():
        quiet = head_nll(hidden_ND, head, label_N)
    assert torch.equal(quiet, head_nll(hidden_ND, head, label_N))


def test_no_labelled_token_is_a_loss_of_zero():
    head = nn.Linear(8, 33)
    hidden_ND = torch.randn(0, 8, requires_grad=True)
    nll = head_nll(hidden_ND, head, torch.zeros(0, dtype=torch.long))
    nll.backward()
    assert nll.item() == 0.0
    assert head.weight.grad.abs().sum() == 0.0


def test_the_last_position_of_a_row_predicts_nothing():
    assert shifted(torch.tensor([[5, 6, 7]])).tolist() == [[6, 7, IGNORE]]


def test_under_autocast_the_head_computes_in_bf16():
    torch.manual_seed(0)
    head, hidden_ND, label_N = (
        nn.Linear(64, 500, bias=False),
        torch.randn(64, 64),
        torch.randint(0, 500, (64,)),
    )
    exact = head_nll(hidden_ND, head, label_N)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = head_nll(hidden_ND, head, label_N)
    assert rounded != exact
    assert abs(rounded - exact) <= 0.005 * exact
