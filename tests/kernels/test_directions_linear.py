"""Coded directions: the bank in the slots of signs, the product and the rows of a table."""

import pytest
import torch

from tests.kernels.backends import EVERYWHERE, forced
from tests.kernels.direction_cases import ROWS, build, exact_rows
from zen_train.kernels.common import DeltaBank, DirectionBank, has_room, homes, stacked_rows
from zen_train.kernels.directions_linear import dense_directions, direction_rows, directions_add_

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 2e-3}


@pytest.fixture(params=EVERYWHERE)
def backend(request, monkeypatch):
    return forced(request.param, monkeypatch)


def relative(found, truth):
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_the_product_is_that_of_the_dense_delta(backend, dtype, rows):
    bank, slot = build(rows, 72, variants=4), torch.tensor([0, 3, -1, 1, 1, 3, 0, 2])
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 72, generator=g).to(dtype), torch.randn(8, sum(rows), generator=g).to(dtype)
    truth = torch.stack(
        [
            y[t].double() + (dense_directions(bank, v, torch.float64) @ x[t].double() if v >= 0 else 0.0)
            for t, v in enumerate(slot.tolist())
        ]
    )
    found = directions_add_(y.clone(), x, bank, slot, backend=backend)
    assert relative(found, truth) <= TOLERANCE[dtype]
    assert torch.equal(found[2], y[2])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_of_a_table_are_those_of_the_merged_table(backend, dtype):
    bank = build((90,), 72, variants=3)
    ids = torch.tensor([0, 89, 41, 7, 88], dtype=torch.int32)
    slot = torch.tensor([2, 0, -1, 1, 2], dtype=torch.int32)
    base = torch.randn(5, 72, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = direction_rows(base, ids, bank, slot, backend=backend)
    assert found.dtype == dtype
    assert relative(found, exact_rows(base, ids, bank, slot)) <= TOLERANCE[dtype]
    assert torch.equal(found[2], base[2])


def test_directions_take_no_more_room_than_the_signs_in_their_place():
    """Every byte of the slot belongs to one of the parts, and none to two."""
    for rows, columns in (((64, 16, 16), 64), ((44, 44), 72), ((37,), 71)):
        bank = DeltaBank.zeros(variants=2, out_features=sum(rows), in_features=columns)
        held = DirectionBank.over(bank, rows)
        for value, part in enumerate((held.right_VRB, *held.left), 1):
            assert not part[1].any()
            part[1].fill_(value)
        used = held.right_VRB[1].numel() + sum(part[1].numel() for part in held.left)
        assert int((bank.sign_VPNB[1] > 0).sum()) == used <= bank.sign_VPNB[1].numel()
        assert not bank.sign_VPNB[0].any()
    assert stacked_rows(576, 576) * (576 + 576) == 576 * 576


def test_an_empty_slot_adds_nothing(backend):
    bank = DirectionBank.over(DeltaBank.zeros(variants=2, out_features=40, in_features=24), (40,))
    y, x = torch.randn(3, 40), torch.randn(3, 24)
    assert torch.equal(directions_add_(y.clone(), x, bank, torch.tensor([0, 1, 0]), backend=backend), y)


def test_a_filled_slot_holds_what_was_put_and_the_next_one_nothing_of_it():
    bank = build((40,), 24, variants=2)
    right, left = bank.right_VRB[0, :8].clone(), bank.left[0][0][:, :1].clone()
    bank.put(0, 0, right=right, left=left, scales=torch.full((8,), 0.5), counts=(8,))
    signs = [
        torch.where((bits.unsqueeze(-1) >> torch.arange(8)) & 1 == 1, 0.5, -0.5) for bits in (left, right)
    ]
    expected = signs[0].flatten(1) @ (2 * signs[1].flatten(1)[:, :24])
    torch.testing.assert_close(dense_directions(bank, 0), expected)


@pytest.mark.parametrize("counts", [(8, 16), (16, 8, 8), (24,)])
def test_counts_that_grow_or_do_not_fit_are_refused(counts):
    with pytest.raises(ValueError, match="allowed: not growing, 16 in all"):
        homes(counts, 16)


def test_bad_banks_are_refused_by_name():
    bank = DeltaBank.zeros(variants=1, out_features=40, in_features=24)
    with pytest.raises(ValueError, match="add up to 40"):
        DirectionBank.over(bank, (20, 21))
    with pytest.raises(ValueError, match="one plane with 40 scales"):
        DirectionBank.over(
            DeltaBank.zeros(variants=1, out_features=40, in_features=24, per_matrix=True), (40,)
        )
    assert not has_room((32, 8), 24)
    with pytest.raises(ValueError, match="8 or more each"):
        DirectionBank.over(bank, (32, 8))


def test_bad_arguments_are_refused_by_name(backend):
    bank = build((90,), 72, variants=2)
    x = torch.randn(2, 72)
    with pytest.raises(ValueError, match=r"y is .*needed: .*\(2, 90\)"):
        directions_add_(torch.zeros(2, 91), x, bank, torch.tensor([0, 0]), backend=backend)
    if backend == "cpu":
        ids, slot = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        for wrong, named in ((ids + 90, "ids"), (slot + 2, "direction_T")):
            pair = (wrong, slot) if named == "ids" else (ids, wrong)
            with pytest.raises(ValueError, match=rf"{named}\[0\] is \d+; allowed"):
                direction_rows(x, pair[0], bank, pair[1], backend=backend)
        bank.home_VR[0, 3] = bank.stacked
        with pytest.raises(ValueError, match="home of slot 0"):
            direction_rows(x, ids, bank, slot, backend=backend)


def test_a_mutation_is_seen():
    """A flipped left bit, a lost plane and a neighbour's home change the result by more than any tolerance above."""
    truth = dense_directions(build((90,), 72, variants=4), 3)
    for mutate in (
        lambda bank: bank.left[0][3, :3].bitwise_xor_(1),
        lambda bank: bank.plane_VR.zero_(),
        lambda bank: bank.home_VR.copy_(bank.home_VR.roll(1, 1)),
    ):
        bank = build((90,), 72, variants=4)
        mutate(bank)
        assert relative(dense_directions(bank, 3), truth) > 0.02
