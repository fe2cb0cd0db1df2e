"""The one-bit code: bytes computed by hand, errors against the formula, layouts and refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zen_train.delta import decode, encode, pack_bits, unpack_bits
from zen_train.delta.codec import measure
from zen_train.delta.rows import PackedRows, convert, sign_pack_rows, sign_pack_rows_torch, square_distance
from zen_train.errors import DeltaError


def pair(shape, *, seed=0, base_dtype=torch.bfloat16, tuned_dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    base = (torch.randn(shape, generator=generator) * 0.05).to(base_dtype)
    tuned = (base.float() + torch.randn(shape, generator=generator) * 1e-3).to(tuned_dtype)
    return base, tuned


def test_bits_of_a_row_are_packed_lowest_first_with_zero_padding():
    # columns 0 2 3 and 8 are positive: byte 0 = 1 + 4 + 8 = 13, byte 1 = 1 (column 8), columns 10 to 15 are padding
    row = torch.tensor([[1, 0, 1, 1, 0, 0, 0, 0, 1, 0]], dtype=torch.bool)
    assert pack_bits(row).tolist() == [[13, 1]]
    assert unpack_bits(torch.tensor([[13, 1]], dtype=torch.uint8), 10).tolist() == row.tolist()


def test_golden_tensor_has_the_bytes_computed_by_hand():
    base = torch.zeros(2, 9)
    tuned = torch.tensor(
        [[1.0, -3, 0, 2, -2, 1, 1, -1, -7], [-0.5, 0.5, 0.5, 0.5, -0.5, -0.5, 0.5, 0.5, 0.5]]
    )
    coded = encode(base, tuned)
    # row 0: + - + + - + + - | -  = 1 + 4 + 8 + 32 + 64 = 109, 0;  the exact zero counts as +
    # row 1: - + + + - - + + | +  = 2 + 4 + 8 + 64 + 128 = 206, 1
    assert coded.sign.tolist() == [[109, 0], [206, 1]]
    assert coded.alpha.tolist() == [2.0, 0.5]  # 18 / 9 and 4.5 / 9
    assert coded.zeros == pytest.approx(1 / 18)
    assert decode(coded.planes, (2, 9))[0].tolist() == [2, -2, 2, 2, -2, 2, 2, -2, -2]
    by_matrix = encode(base, tuned, scale="matrix")
    assert by_matrix.alpha.tolist() == [1.25]  # 22.5 / 18
    assert by_matrix.sign.tolist() == coded.sign.tolist()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 70),
    scale=st.sampled_from(["row", "matrix"]),
    seed=st.integers(0, 99),
)
def test_decoded_delta_is_the_scale_times_the_sign_for_any_shape(rows, columns, scale, seed):
    base, tuned = pair((rows, columns), seed=seed)
    delta = tuned.float() - base.float()
    coded = encode(base, tuned, scale=scale)
    dim = 1 if scale == "row" else (0, 1)
    alpha = delta.double().abs().mean(dim=dim, keepdim=True).float()
    assert torch.equal(decode(coded.planes, (rows, columns)), torch.where(delta >= 0, alpha, -alpha))


@pytest.mark.parametrize("scale", ["row", "matrix"])
@pytest.mark.parametrize("planes", [1, 2, 3])
def test_stated_error_is_the_error_of_the_decoded_delta(scale, planes):
    base, tuned = pair((300, 1001), base_dtype=torch.float16)
    delta = (tuned.float() - base.float()).double()
    coded = encode(base, tuned, scale=scale, planes=planes)
    left = delta - decode(coded.planes, (300, 1001)).double()
    assert coded.relative_error == pytest.approx(float(left.norm() / delta.norm()), rel=1e-5)
    assert coded.delta_square == pytest.approx(float(delta.square().sum()), rel=1e-9)
    found = measure(base, tuned, coded.planes)
    assert found == pytest.approx((coded.delta_square, coded.error_square), rel=1e-5)


def test_gaussian_delta_loses_what_the_theory_says():
    """||D - D_hat||^2 / ||D||^2 = 1 - 2/pi at one bit; 0.1175 at two, the optimum of four symmetric levels (Max 1960),
    where plane after plane leaves 0.132.
    """
    base, tuned = pair((64, 8192))
    assert encode(base, tuned).relative_error ** 2 == pytest.approx(0.3634, abs=0.004)
    assert encode(base, tuned, planes=2).relative_error ** 2 == pytest.approx(0.1175, abs=0.002)


@pytest.mark.parametrize("planes", [2, 3])
@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_a_sparse_delta_of_one_size_is_coded_without_loss(scale, planes):
    """Zero-aware: nine elements of ten are exactly zero, the others +m or -m; two signs that cancel say zero."""
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(0, 2, (40, 120), generator=generator) * 2.0 - 1.0
    delta = torch.where(torch.rand(40, 120, generator=generator) < 0.9, 0.0, sign * 0.25)
    coded = encode(torch.zeros(40, 120), delta, scale=scale, planes=planes)
    assert coded.relative_error < 1e-6
    assert torch.allclose(decode(coded.planes, (40, 120)), delta, atol=1e-6)


@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_planes_together_are_never_worse_than_one_after_the_other(scale):
    """For every row: Laplace, uniform, constant, one outlier, all zero."""
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(300, generator=generator) - 0.5
    outlier = torch.full((300,), 1e-3).index_fill_(0, torch.tensor([7]), 1.0)
    laplace = uniform.sign() * (1 - 2 * uniform.abs()).clamp_min(1e-6).log()
    delta = torch.stack([laplace, uniform, torch.ones(300), outlier, torch.zeros(300)])
    base = torch.zeros_like(delta)
    for planes in (2, 3, 4):
        first = encode(base, delta, scale=scale, planes=planes - 1)
        left = delta - decode(first.planes, delta.shape)
        then = encode(base, left, scale=scale)
        together = encode(base, delta, scale=scale, planes=planes)
        assert together.error_square <= then.error_square * (1 + 1e-5) + 1e-9
        assert measure(base, delta, together.planes)[1] == pytest.approx(
            together.error_square, rel=1e-4, abs=1e-9
        )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_pushed_scales_are_the_best_ones_for_their_weight(scale, planes, transposed):
    """By search: no other multiple of the scales of least squares gives less weighted error, in any row or matrix."""
    weight = 8.0
    shape = (64, 9) if transposed else (9, 64)
    base = torch.zeros(shape)
    tuned = torch.randn(shape, generator=torch.Generator().manual_seed(0)) ** 3
    least = encode(base, tuned, scale=scale, planes=planes, transposed=transposed)
    pushed = encode(base, tuned, scale=scale, planes=planes, transposed=transposed, along_weight=weight)
    parts = []
    for coded in (least, pushed):
        hat = decode(coded.planes, shape, transposed=transposed).double()
        hat, delta = (t.T if transposed else t for t in (hat, tuned.double()))
        groups = (hat, delta) if scale == "row" else (hat.reshape(1, -1), delta.reshape(1, -1))
        parts.append(groups)
    (hat, delta), (chosen, _) = parts
    length = delta.square().sum(1, keepdim=True)

    def weighted(code):
        along = (code * delta).sum(1, keepdim=True) / length
        across = (code - along * delta).square().sum(1, keepdim=True)
        return weight * length * (1 - along).square() + across

    multiples = torch.linspace(0.9, 8.0, 7101, dtype=torch.float64)
    best = torch.stack([weighted(c * hat) for c in multiples]).min(0).values
    torch.testing.assert_close(weighted(chosen), best, rtol=1e-4, atol=0)
    assert all(torch.equal(a.sign, b.sign) for a, b in zip(least.planes, pushed.planes, strict=True))
    assert pushed.least_square == least.error_square < pushed.error_square
    assert measure(base, tuned, pushed.planes, transposed=transposed)[1] == pytest.approx(pushed.error_square)


def test_an_exact_code_is_not_pushed_and_an_outlier_not_beyond_its_weight():
    exact = torch.tensor([[0.5, -0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0]])
    alpha = encode(torch.zeros(3, 4), exact, along_weight=8.0).alpha
    # The last row: e = 3/4, so that the mean |D| of 1 is pushed by 8 / (8 - 7 * 3/4).
    assert torch.equal(alpha, torch.tensor([0.5, 0.0, 8 / 2.75]))
    lone = torch.zeros(1, 4096).index_fill_(1, torch.tensor([7]), 4096.0)
    assert 7.9 < encode(torch.zeros(1, 4096), lone, along_weight=8.0).alpha.item() < 8.0


def test_a_bound_on_the_error_is_on_how_well_the_signs_fit():
    """An embedding at its bound is packed whatever its scales are pushed to."""
    base, tuned = pair((64, 512))
    pushed = encode(base, tuned, along_weight=8.0)
    least = (pushed.least_square / pushed.delta_square) ** 0.5
    assert least == encode(base, tuned).relative_error < 0.61 < pushed.relative_error


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_makes_no_sense_is_refused(weight):
    with pytest.raises(DeltaError, match="along_weight"):
        encode(torch.zeros(2, 8), torch.ones(2, 8), along_weight=weight)


def test_alpha_is_summed_in_float64():
    """2^24 + 1 ones: a float32 sum would stop at 2^24."""
    columns = (1 << 24) + 3
    tuned = torch.ones(1, columns)
    tuned[0, 0] = 16777216.0
    alpha = encode(torch.zeros(1, columns), tuned).alpha
    assert (
        alpha.item() == torch.tensor((16777216 + columns - 1) / columns, dtype=torch.float64).float().item()
    )


def test_transposed_storage_packs_along_the_real_input():
    """Conv1D of GPT-2 stores [in, out]; the code is that of the transposed matrix."""
    base, tuned = pair((37, 12))
    coded = encode(base, tuned, transposed=True)
    plain = encode(base.t().contiguous(), tuned.t().contiguous())
    assert coded.sign.shape == (12, 5)
    assert torch.equal(coded.sign, plain.sign)
    assert torch.equal(coded.alpha, plain.alpha)
    assert torch.equal(decode(coded.planes, (37, 12), transposed=True).t(), decode(plain.planes, (12, 37)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_a_stack_of_experts_is_coded_like_each_expert_alone(transposed, scale):
    base, tuned = pair((3, 10, 20))
    coded = encode(base, tuned, scale=scale, transposed=transposed, planes=2)
    back = decode(coded.planes, (3, 10, 20), transposed=transposed)
    for expert in range(3):
        alone = encode(base[expert], tuned[expert], scale=scale, transposed=transposed, planes=2)
        for whole, single in zip(coded.planes, alone.planes, strict=True):
            assert torch.equal(whole.sign[expert], single.sign)
            assert torch.equal(whole.alpha[expert], single.alpha)
        assert torch.equal(back[expert], decode(alone.planes, (10, 20), transposed=transposed))


def test_non_contiguous_tensors_are_coded_like_contiguous_ones():
    base, tuned = pair((40, 66))
    coded = encode(base[::2, ::3], tuned[::2, ::3])
    assert torch.equal(coded.sign, encode(base[::2, ::3].contiguous(), tuned[::2, ::3].contiguous()).sign)
    stack = tuned.view(2, 20, 66).transpose(0, 1)
    same = encode(torch.zeros(20, 2, 66), stack)
    assert torch.equal(same.sign, encode(torch.zeros(20, 2, 66), stack.contiguous()).sign)


def test_threads_do_not_change_the_code():
    base, tuned = pair((2000, 1000))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = encode(base, tuned)
        torch.set_num_threads(4)
        together = encode(base, tuned)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone.sign, together.sign)
    assert torch.equal(alone.alpha, together.alpha)
    assert alone.relative_error == together.relative_error


def test_torch_and_numpy_pack_the_same_bits():
    base, tuned = pair((33, 131))
    tuned[3, 5] = base[3, 5].float()
    ours, other = sign_pack_rows(base, tuned), sign_pack_rows_torch(base, tuned)
    assert torch.equal(ours.sign_RB, other.sign_RB)
    assert torch.equal(ours.zeros_R, other.zeros_R)
    torch.testing.assert_close(ours.abs_sum_R, other.abs_sum_R, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.square_sum_R, other.square_sum_R, rtol=1e-12, atol=0)


def test_another_sign_pack_kernel_slots_in():
    calls = []

    def kernel(base_RK: torch.Tensor, tuned_RK: torch.Tensor) -> PackedRows:
        calls.append(base_RK.shape[0])
        return sign_pack_rows_torch(base_RK, tuned_RK)

    base, tuned = pair((10, 30))
    assert torch.equal(encode(base, tuned, sign_pack=kernel).sign, encode(base, tuned).sign)
    assert sum(calls) == 10


def test_zeros_in_rows_that_did_not_move_are_not_noisy():
    base, tuned = pair((4, 8))
    tuned[0] = base[0].float()  # a whole row at rest has alpha 0: exact
    tuned[1, 0] = base[1, 0].float()  # one element at rest in a moving row gets a wrong value
    coded = encode(base, tuned)
    assert coded.alpha[0] == 0
    assert coded.zeros == pytest.approx(9 / 32)
    assert coded.noisy_zeros == pytest.approx(1 / 32)
    assert encode(base, tuned, scale="matrix").noisy_zeros == pytest.approx(9 / 32)


def test_unchanged_tensor_has_no_delta():
    base, _ = pair((5, 9))
    coded = encode(base, base.float())
    assert (coded.delta_square, coded.relative_error, coded.zeros) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["base", "tuned"])
def test_values_that_are_not_finite_are_refused(value, side):
    base, tuned = pair((6, 10))
    (base if side == "base" else tuned)[2, 3] = value
    with pytest.raises(DeltaError, match=f"the {side} tensor holds 1 NaN or infinite values of 60"):
        encode(base, tuned)


def test_other_shapes_scales_and_planes_are_refused():
    base, tuned = pair((6, 10))
    with pytest.raises(DeltaError, match=r"\[6, 10\].*\[6, 9\]"):
        encode(base, tuned[:, :9])
    with pytest.raises(DeltaError, match="'column' is unknown; allowed: row, matrix"):
        encode(base, tuned, scale="column")
    with pytest.raises(DeltaError, match="planes=0"):
        encode(base, tuned, planes=0)
    with pytest.raises(DeltaError, match="no rows and columns"):
        encode(base[0], tuned[0])


def test_planes_that_do_not_fit_or_are_damaged_are_refused():
    coded = encode(*pair((6, 10)))
    sign, alpha = coded.planes[0]
    with pytest.raises(DeltaError, match="not uint8"):
        decode(coded.planes, (6, 17))
    with pytest.raises(DeltaError, match="expected float32"):
        decode([coded.planes[0]._replace(alpha=alpha[:5])], (6, 10))
    flipped = sign.clone()
    flipped[4, 1] |= 4  # column 10 does not exist
    with pytest.raises(DeltaError, match="padding bits past column 10"):
        decode([coded.planes[0]._replace(sign=flipped)], (6, 10))
    for bad in (float("nan"), float("inf"), -1.0):
        damaged = alpha.clone()
        damaged[3] = bad
        with pytest.raises(DeltaError, match="NaN, infinity or a negative value"):
            decode([coded.planes[0]._replace(alpha=damaged)], (6, 10))
    with pytest.raises(DeltaError, match="at least one plane"):
        decode([], (6, 10))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversion_rounds_like_torch(dtype):
    values = torch.randn(70, 301, generator=torch.Generator().manual_seed(1))
    assert torch.equal(convert(values, dtype), values.to(dtype))
    assert torch.equal(convert(values.to(dtype), torch.float32), values.to(dtype).float())
    assert torch.equal(convert(values[0], dtype), values[0].to(dtype))


def test_square_distance_of_any_shape():
    for shape in ((), (5,), (0,), (3, 4), (2, 3, 4)):
        a, b = torch.full(shape, 2.0), torch.full(shape, -1.0).to(torch.bfloat16)
        assert square_distance(a, b) == pytest.approx(9.0 * a.numel())
