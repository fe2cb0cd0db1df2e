"""The decoder's operators as PyTorch has them registered, the functions around them, and the benchmark script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.decoder_cases import Case, Chunk, build
from zen_train.kernels.cpu import load, path_name
from zen_train.kernels.decoder import decoder_stack, prepare_blocks, top_scores, use_huge_pages
from zen_train.kernels.decoder.cpu_plan import layer_tensors, plan_of, shape_numbers

CASE = Case(
    name="library",
    chunks=(
        Chunk(start=2, count=3, slots=(1,)),
        Chunk(start=5, count=1),
        Chunk(start=1, count=2, directions=4),
    ),
)
needs_compiler = pytest.mark.skipif(not load(), reason="no C++ compiler here")


@needs_compiler
def test_opcheck_of_the_operators():
    inputs = build(CASE, torch.float32)
    stack, batch = prepare_blocks(inputs.blocks, shape=inputs.shape), inputs.batch
    pool = inputs.kv.kv.nan_to_num()
    step = (
        batch.position_T,
        batch.sequence_T,
        batch.plane_PT,
        batch.direction_T,
        batch.vector_T,
        batch.page_table_SJ,
        inputs.rotary.cos,
        inputs.rotary.sin,
    )
    ops = torch.ops.zen_train
    arguments = (inputs.hidden, pool, layer_tensors(stack), *step, *shape_numbers(stack.shape), -1)
    torch.library.opcheck(ops.cpu_decoder_.default, arguments)
    block = inputs.blocks[0]
    bank = block.gate_up_bank
    directions = block.gate_up_directions.tensors()
    head = (inputs.hidden, block.gate_up_NK, bank.sign_VPNB, bank.row_scale_VPN, batch.plane_PT)
    torch.library.opcheck(ops.cpu_head.default, (*head, directions, batch.direction_T, -1))
    table = block.o_directions
    rows = (inputs.hidden, batch.position_T % table.out_features, batch.direction_T, table.tensors(), -1)
    torch.library.opcheck(ops.cpu_direction_rows.default, rows)
    torch.library.opcheck(ops.cpu_top.default, (inputs.hidden, -1))


@needs_compiler
def test_the_operator_with_a_list_gives_the_result_of_the_plan():
    inputs = build(CASE, torch.float32)
    stack, batch = prepare_blocks(inputs.blocks, shape=inputs.shape), inputs.batch
    hidden, pool = inputs.hidden.clone(), inputs.pool()
    torch.ops.zen_train.cpu_decoder_(
        hidden,
        pool.kv,
        layer_tensors(stack),
        batch.position_T,
        batch.sequence_T,
        batch.plane_PT,
        batch.direction_T,
        batch.vector_T,
        batch.page_table_SJ,
        inputs.rotary.cos,
        inputs.rotary.sin,
        *shape_numbers(stack.shape),
        -1,
    )
    other = inputs.pool()
    result = decoder_stack(
        inputs.hidden, stack, shape=inputs.shape, batch=batch, kv=other, rotary=inputs.rotary, backend="cpu"
    )
    assert torch.equal(result, hidden)
    assert torch.equal(pool.kv.nan_to_num(), other.kv.nan_to_num())


@needs_compiler
def test_the_plan_is_made_once_and_lives_with_the_stack():
    inputs = build(CASE, torch.float32)
    stack = prepare_blocks(inputs.blocks, shape=inputs.shape)
    assert plan_of(stack) is plan_of(stack)
    assert prepare_blocks(inputs.blocks, shape=inputs.shape).plans == []


@pytest.mark.parametrize("count", [1, 5, 64, 1000, 49152])
def test_top_scores_are_those_of_torch(count):
    g = torch.Generator().manual_seed(count)
    scores = torch.randint(-9, 9, (6, count), generator=g).float()  # many equal values: the first counts
    scores[1] = -torch.inf
    scores[2, count // 2] = torch.inf
    value, place = top_scores(scores)
    assert torch.equal(value, scores.amax(dim=1))
    assert torch.equal(place, torch.stack([(row == row.max()).nonzero()[0, 0] for row in scores]))


def test_a_nan_among_the_scores_shows():
    scores = torch.randn(3, 500)
    scores[1, 77] = torch.nan
    value, place = top_scores(scores)
    assert torch.isnan(value).tolist() == [False, True, False]
    assert 0 <= int(place[1]) < 500


def test_huge_pages_change_no_value():
    tensor = torch.arange(3 << 20)
    small = torch.arange(10)
    use_huge_pages(tensor, small, torch.empty(0))
    assert torch.equal(tensor, torch.arange(3 << 20))
    assert torch.equal(small, torch.arange(10))


@needs_compiler
@pytest.mark.slow
def test_the_benchmark_prints_figures_with_bounds():
    run = subprocess.run(
        [sys.executable, "scripts/bench_decoder.py", "--seconds", "0.1", "--cases", "decode1"],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = {line["case"]: line for line in map(json.loads, run.stdout.splitlines())}
    path = path_name()  # the benchmark's process has the same environment
    assert lines[f"{path}: decode1 variants"]["bound"] == pytest.approx(1 / 150)
    calls = ("own base", "torch linears", "directions", "over own base")
    assert {f"{path}: decode1 {call}" for call in calls} <= set(lines)
