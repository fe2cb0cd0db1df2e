"""The codes of others in the fidelity bench do what their papers say: a peer made badly would flatter ours."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fidelity_calibrated import delta_come_gptq, input_squares
from fidelity_codes import delta_come, delta_come_widths, factors


def correlated(rows=96, columns=160, tokens=2000):
    """A delta of falling singular values, and inputs that share a few directions."""
    generator = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(rows, rows, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(columns, rows, generator=generator)).Q
    delta = u * torch.arange(1, rows + 1) ** -0.7 @ v.mT
    inputs = torch.randn(tokens, 12, generator=generator) @ torch.randn(12, columns, generator=generator)
    return delta, inputs + 0.3 * torch.randn(tokens, columns, generator=generator)


def test_gptq_makes_the_outputs_better_at_the_same_bits():
    delta, inputs = correlated()
    nearest, bits = delta_come(delta)
    calibrated, same_bits = delta_come_gptq(delta, inputs.mT @ inputs)
    assert same_bits == bits <= delta.numel()
    left, right = factors(delta, len(delta_come_widths(*delta.shape, 1.0)))

    def rounding(made):
        """What rounding alone does to the outputs: both leave out the same directions."""
        return float((inputs @ (made - left @ right).mT).square().sum())

    assert rounding(calibrated) < 0.7 * rounding(nearest)


def test_without_inputs_it_is_rounding_to_nearest():
    delta, _ = correlated()
    assert torch.equal(delta_come_gptq(delta, None)[0], delta_come(delta)[0])


@pytest.mark.parametrize("bits", [0.25, 1.0])
def test_widths_keep_their_budget_and_fall(bits):
    widths = delta_come_widths(576, 1536, bits)
    assert widths == sorted(widths, reverse=True)
    assert sum(width + 0.25 for width in widths) * (576 + 1536) <= bits * 576 * 1536


def test_inputs_of_linear_layers_are_those_that_the_decoder_gives_them():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(7, 3)

        def get_decoder(self):
            return lambda x: self.second(self.first(x))

    torch.manual_seed(0)
    model, batches = Model(), [{"x": torch.randn(2, 4, 5)} for _ in range(3)]
    seen = torch.cat([batch["x"].flatten(0, 1) for batch in batches])
    found = input_squares(model, batches)
    torch.testing.assert_close(found["first.weight"], seen.mT @ seen)
    hidden = model.first(seen).detach()
    torch.testing.assert_close(found["second.weight"], hidden.mT @ hidden)
