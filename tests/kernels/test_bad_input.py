"""Wrong arguments are a ValueError that names the thing, the value got and the values allowed."""

import pytest
import torch

from tests.kernels.cases import Case, build
from zen_train.kernels.bitdelta_embedding import bitdelta_embedding
from zen_train.kernels.bitdelta_linear import DeltaBank, bitdelta_add_, bitdelta_linear
from zen_train.kernels.cpu import PATHS, load
from zen_train.kernels.sign_pack import sign_pack

CASE = Case(m=4, n=10, k=20, mix="uniform", variants=3)
BACKENDS = ["reference", "cpu"] if load() else ["reference"]


def call(backend="reference", **changes):
    inputs = build(CASE, torch.float32)
    arguments = {
        "x": inputs.x,
        "weight": inputs.weight,
        "bank": inputs.bank,
        "variant": inputs.variant,
        "bias": None,
    }
    arguments.update(changes)
    return bitdelta_linear(
        arguments["x"],
        arguments["weight"],
        arguments["bank"],
        arguments["variant"],
        bias_N=arguments["bias"],
        backend=backend,
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(4, 20, dtype=torch.float64)}, "x is torch.float64; allowed: bfloat16"),
        ({"x": torch.zeros(4, 21)}, r"x has shape \(4, 21\)"),
        ({"weight": torch.zeros(10, 20, dtype=torch.bfloat16)}, "weight_NK is torch.bfloat16"),
        ({"weight": torch.zeros(11, 20)}, r"weight_NK is torch.float32 \(11, 20\)"),
        ({"bias": torch.zeros(9)}, r"bias_N is torch.float32 \(9,\)"),
        ({"variant": torch.zeros(4)}, "variant is torch.float32; allowed: int32, int64"),
        ({"variant": torch.zeros(5, dtype=torch.int64)}, r"variant has shape \(5,\)"),
        ({"x": torch.zeros(4, 20, device="meta")}, "is on cpu; needed: meta"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        call(**change)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", [-2, 3, 1 << 40, -(1 << 40)])
def test_a_variant_out_of_range_is_refused_and_never_read(backend, index):
    variant = torch.tensor([0, 1, index, 2])
    with pytest.raises(ValueError, match=rf"variant\[2\] is {index}; allowed: -1 \(base\) to 2"):
        call(backend, variant=variant)
    inputs = build(CASE, torch.float32)
    y = torch.ones(4, 10)
    with pytest.raises(ValueError, match=r"variant\[2\]"):
        bitdelta_add_(y, inputs.x, inputs.bank, variant, backend=backend)
    assert torch.equal(y, torch.ones(4, 10))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_scale_that_is_not_finite_is_refused(backend, value):
    inputs = build(CASE, torch.float32)
    inputs.bank.row_scale_VPN[1, 0, 4] = value
    with pytest.raises(ValueError, match=r"row_scale.*NaN or an infinity"):
        call(backend, bank=inputs.bank, variant=torch.tensor([1, 1, 0, -1]))
    with pytest.raises(ValueError, match="row_scale_VPN of slot 1"):
        inputs.bank.check_values()


def test_a_packed_width_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="4 bytes a row; needed for in_features=20: 3"):
        DeltaBank(
            in_features=20,
            sign_VPNB=torch.zeros(1, 1, 10, 4, dtype=torch.uint8),
            row_scale_VPN=torch.zeros(1, 1, 10),
        )


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend is 'gpu'; allowed: auto, reference, cpu, triton"):
        call("gpu")


def test_triton_on_cpu_tensors_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        call("triton")


@pytest.mark.skipif(len(BACKENDS) == 1, reason="no C++ compiler here")
def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("ZEN_TRAIN_CPU_PATH", "sse9")
    with pytest.raises(ValueError, match="ZEN_TRAIN_CPU_PATH is 'sse9'"):
        call("cpu")


def test_an_instruction_set_that_the_processor_lacks_is_named(monkeypatch):
    if not load() or torch.ops.zen_train.cpu_best_path() == len(PATHS) - 1:
        pytest.skip("this processor runs them all")
    monkeypatch.setenv("ZEN_TRAIN_CPU_PATH", PATHS[-1])
    with pytest.raises(ValueError, match=f"is '{PATHS[-1]}'; this processor runs plain"):
        call("cpu")


def test_a_slot_is_filled_whole_or_not_at_all():
    bank = DeltaBank.zeros(variants=2, out_features=4, in_features=9)
    sign = torch.ones(1, 4, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="slot is 2; allowed: 0 to 1"):
        bank.put(2, sign_PNB=sign, row_scale_PN=torch.ones(1, 4))
    with pytest.raises(ValueError, match="row_scale_VPN holds a NaN"):
        bank.put(0, sign_PNB=sign, row_scale_PN=torch.full((1, 4), float("nan")))
    with pytest.raises(ValueError, match="the bank has none"):
        bank.put(0, sign_PNB=sign, row_scale_PN=torch.ones(1, 4), col_scale_PK=torch.ones(1, 9))
    assert bank.sign_VPNB.count_nonzero() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_sign_pack_refuses_values_that_are_not_finite(backend):
    w1 = torch.zeros(3, 30)
    w1[1, 29] = float("inf")
    with pytest.raises(ValueError, match="row 1 of w1 - w0 holds a NaN or an infinity"):
        sign_pack(w1, torch.zeros(3, 30), backend=backend)


def test_sign_pack_refuses_two_shapes():
    with pytest.raises(ValueError, match=r"w0_NK is torch.float32 \(3, 8\)"):
        sign_pack(torch.zeros(3, 9), torch.zeros(3, 8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_embedding_refuses_an_id_out_of_range(backend):
    bank = DeltaBank.zeros(variants=1, out_features=5, in_features=8)
    with pytest.raises(ValueError, match=r"ids\[1\] is 5; allowed: 0 to 4"):
        bitdelta_embedding(
            torch.tensor([0, 5]), torch.zeros(5, 8), bank, torch.tensor([0, 0]), backend=backend
        )
