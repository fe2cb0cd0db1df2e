"""Wrong arguments of the decoder are a ValueError that names the thing, before anything is read or written."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.decoder_cases import Case, Chunk, build
from zen_train.kernels.common import DeltaBank
from zen_train.kernels.cpu import load
from zen_train.kernels.decoder import KvPool, Rotary, decoder_stack, head_logits, prepare_blocks, rms_norm

CASE = Case(
    name="bad-input",
    chunks=(
        Chunk(start=3, count=1, slots=(1,)),
        Chunk(start=0, count=4),
        Chunk(start=17, count=1, slots=(2,)),
    ),
)
BACKENDS = ["reference", "torch", *(["cpu"] if load() else [])]


def call(backend, inputs, **changes):
    changed = replace(inputs, **changes)
    before = changed.kv.kv.clone()
    with pytest.raises(ValueError, match=r".") as caught:  # the words are for the caller to check
        decoder_stack(
            changed.hidden,
            changed.blocks,
            shape=changed.shape,
            batch=changed.batch,
            kv=changed.kv,
            rotary=changed.rotary,
            backend=backend,
        )
    assert torch.equal(before.nan_to_num(), changed.kv.kv.nan_to_num())
    return str(caught.value)


def put(tensor, place, value):
    changed = tensor.clone()
    changed[place] = value
    return changed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("position_T", 5, 32),
        ("position_T", 5, -1),
        ("position_T", 5, 2**31 - 1),
        ("sequence_T", 0, 4),
        ("sequence_T", 0, -1),
        ("vector_T", 5, 3),
        ("vector_T", 5, -1),
        ("plane_PT", (0, 5), 15),
        ("plane_PT", (0, 5), -2),
        ("page_table_SJ", (2, 1), 6),
        ("page_table_SJ", (2, 1), -2),
    ],
)
def test_an_index_out_of_range_is_refused(backend, name, place, value):
    inputs = build(CASE, torch.float32)
    batch = replace(inputs.batch, **{name: put(getattr(inputs.batch, name), place, value)})
    where = ", ".join(str(i) for i in (place if isinstance(place, tuple) else (place,)))
    assert f"{name}[{where}] is {value}; allowed: " in call(backend, inputs, batch=batch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_position_beyond_the_rotation_tables_is_refused(backend):
    inputs = build(CASE, torch.float32)
    short = Rotary(cos=inputs.rotary.cos[:17], sin=inputs.rotary.sin[:17])
    assert "position_T[5] is 17; allowed: 0 to 16" in call(backend, inputs, rotary=short)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_without_a_page_is_refused(backend):
    inputs = build(CASE, torch.float32)
    batch = replace(inputs.batch, page_table_SJ=put(inputs.batch.page_table_SJ, (2, 0), -1))
    assert "page_table_SJ[2, 0] is -1" in call(backend, inputs, batch=batch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_of_a_sequence_must_be_neighbours_in_order(backend):
    inputs = build(CASE, torch.float32)
    batch = inputs.batch
    swapped = replace(batch, position_T=put(batch.position_T, 2, 5))
    assert "position_T[2] is 5 after 0 of the same sequence" in call(backend, inputs, batch=swapped)
    apart = replace(batch, sequence_T=put(batch.sequence_T, 5, 0))
    assert "sequence_T[5] is 0 again after other sequences" in call(backend, inputs, batch=apart)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: {"hidden": inputs.hidden[:, :-1]},
        lambda inputs: {"hidden": inputs.hidden[:-1]},
        lambda inputs: {"hidden": inputs.hidden.double()},
        lambda inputs: {"hidden": inputs.hidden.bfloat16()},
        lambda inputs: {"hidden": inputs.hidden[0]},
        lambda inputs: {"kv": KvPool(kv=inputs.kv.kv[:1])},
        lambda inputs: {"kv": KvPool(kv=inputs.kv.kv[:, :1])},
        lambda inputs: {"kv": KvPool(kv=inputs.kv.kv[:, :, :0])},
        lambda inputs: {"kv": KvPool(kv=inputs.kv.kv[..., 0])},
        lambda inputs: {"kv": KvPool(kv=inputs.kv.kv.bfloat16())},
        lambda inputs: {"rotary": Rotary(cos=inputs.rotary.cos[:, :-1], sin=inputs.rotary.sin)},
        lambda inputs: {"rotary": Rotary(cos=inputs.rotary.cos, sin=inputs.rotary.sin[:-1])},
        lambda inputs: {"rotary": Rotary(cos=inputs.rotary.cos.double(), sin=inputs.rotary.sin.double())},
        lambda inputs: {"batch": replace(inputs.batch, position_T=inputs.batch.position_T.long())},
        lambda inputs: {"batch": replace(inputs.batch, vector_T=inputs.batch.vector_T[:-1])},
        lambda inputs: {"batch": replace(inputs.batch, plane_PT=inputs.batch.plane_PT[0])},
        lambda inputs: {"batch": replace(inputs.batch, plane_PT=inputs.batch.plane_PT[:, :-1])},
        lambda inputs: {"batch": replace(inputs.batch, page_table_SJ=inputs.batch.page_table_SJ[0])},
        lambda inputs: {"blocks": []},
        lambda inputs: {"shape": replace(inputs.shape, kv_heads=3)},
        lambda inputs: {"shape": replace(inputs.shape, head_dim=15)},
        lambda inputs: {"shape": replace(inputs.shape, window_tokens=0)},
        lambda inputs: {"shape": replace(inputs.shape, norm_eps=0.0)},
    ],
)
def test_a_shape_or_dtype_that_does_not_fit_is_refused(backend, change):
    inputs = build(CASE, torch.float32)
    call(backend, inputs, **change(inputs))


@pytest.mark.parametrize(
    "name", ["qkv_NK", "o_NK", "gate_up_NK", "down_NK", "attention_norm_MD", "mlp_norm_MD"]
)
def test_a_block_unlike_the_others_is_refused_by_number_and_name(name):
    inputs = build(CASE, torch.float32)
    blocks = [inputs.blocks[0], replace(inputs.blocks[1], **{name: getattr(inputs.blocks[1], name)[:-1]})]
    with pytest.raises(ValueError, match=rf"blocks\[1\].{name} is torch.float32 of shape"):
        prepare_blocks(blocks, shape=inputs.shape)


def test_a_bank_with_other_slots_or_planes_is_refused():
    inputs = build(CASE, torch.float32)
    for wrong in ({"variants": 14}, {"planes": 2}):
        bank = DeltaBank.zeros(**{"variants": 15, "out_features": 64, "in_features": 64, **wrong})
        with pytest.raises(ValueError, match=r"blocks\[0\].o_bank has \(slots, planes, N, K\)"):
            prepare_blocks([replace(inputs.blocks[0], o_bank=bank)], shape=inputs.shape)


def test_a_bias_in_one_block_only_is_refused():
    inputs = build(CASE, torch.float32)
    blocks = [inputs.blocks[0], replace(inputs.blocks[1], q_norm_ME=torch.ones(3, 16))]
    with pytest.raises(ValueError, match=r"blocks\[1\].q_norm_ME is given or None unlike blocks\[0\]"):
        prepare_blocks(blocks, shape=inputs.shape)


def test_blocks_prepared_for_another_shape_are_refused():
    inputs = build(CASE, torch.float32)
    stack = prepare_blocks(inputs.blocks, shape=inputs.shape)
    message = call("torch", inputs, blocks=stack, shape=replace(inputs.shape, window_tokens=4))
    assert "the prepared blocks were checked for" in message


def test_triton_is_refused_for_cpu_tensors_outside_its_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    inputs = build(CASE, torch.float32)
    assert "it needs a CUDA device, or TRITON_INTERPRET=1" in call("triton", inputs)


def test_an_unknown_backend_is_refused():
    inputs = build(CASE, torch.float32)
    assert "backend is 'gpu'; allowed: auto, cpu, torch, triton, reference" in call("gpu", inputs)


@pytest.mark.skipif(not load(), reason="no C++ compiler here")
@pytest.mark.parametrize("part", [{"with_columns": True}, {"rank": 2}])
def test_parts_that_the_cpu_kernel_lacks_are_refused_by_name_and_served_by_auto(part):
    inputs = build(CASE, torch.float32)
    bank = DeltaBank.zeros(variants=15, out_features=64, in_features=64, **part)
    blocks = [replace(inputs.blocks[0], o_bank=bank), inputs.blocks[1]]
    assert "low-rank factors or column scales. Use backend='torch'" in call("cpu", inputs, blocks=blocks)
    run = {"shape": inputs.shape, "batch": inputs.batch, "rotary": inputs.rotary}
    auto = decoder_stack(inputs.hidden.clone(), blocks, kv=inputs.pool(), **run)
    assert torch.equal(
        auto, decoder_stack(inputs.hidden.clone(), blocks, kv=inputs.pool(), backend="torch", **run)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_head_refuses_a_slot_out_of_range(backend):
    bank = DeltaBank.zeros(variants=2, out_features=10, in_features=8)
    plane = torch.tensor([[0, 2]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"is 2; allowed: -1( \(base\))? to 1"):
        head_logits(torch.zeros(2, 8), torch.zeros(10, 8), bank, plane, backend=backend)


def test_final_norm_refuses_a_width_that_does_not_fit():
    with pytest.raises(ValueError, match=r"weight_MD is torch.float32 \(3, 7\)"):
        rms_norm(torch.zeros(2, 8), torch.ones(3, 7), torch.zeros(2, dtype=torch.int32), 1e-5)
