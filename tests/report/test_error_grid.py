"""Tensor names sorted into layers and modules."""

from zen_train.report import TensorRow
from zen_train.report.layers import error_grid


def row(name, error):
    return TensorRow(name=name, kind="sign", shape=(4, 4), stored_bytes=6, relative_error=error)


def test_llama_names_become_layers_and_modules():
    grid = error_grid(
        [
            row("model.layers.0.self_attn.q_proj.weight", 0.5),
            row("model.layers.10.self_attn.q_proj.weight", 0.7),
            row("model.layers.2.mlp.up_proj.weight", 0.6),
        ]
    )
    assert grid.layers == (0, 2, 10)
    assert grid.modules == ("q_proj", "up_proj")
    assert grid.cells == ((0.5, None, 0.7), (None, 0.6, None))


def test_gpt2_modules_of_the_same_name_are_kept_apart():
    grid = error_grid(
        [row("transformer.h.0.attn.c_proj.weight", 0.5), row("transformer.h.0.mlp.c_proj.weight", 0.6)]
    )
    assert grid.modules == ("attn.c_proj", "mlp.c_proj")


def test_experts_of_one_layer_are_averaged():
    grid = error_grid([row(f"model.layers.3.mlp.experts.{e}.w1.weight", 0.5 + 0.1 * e) for e in range(3)])
    assert grid.modules == ("w1",)
    assert abs(grid.cells[0][0] - 0.6) < 1e-12


def test_tensors_outside_the_layers_are_listed_and_exact_ones_left_out():
    exact = TensorRow(name="model.layers.0.norm.weight", kind="dense", shape=(4,), stored_bytes=8)
    grid = error_grid([row("model.embed_tokens.weight", 0.7), exact])
    assert grid.outside == (("model.embed_tokens", 0.7),)
    assert grid.values() == []
