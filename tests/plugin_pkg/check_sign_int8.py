"""The plugin's own tests: olq's conformance suite, and what its parameter means.

Named so that it is not collected with olq's tests; `test_entry_points.py` runs it where the plugin is
installed.
"""

import pytest
import torch

import olq
from olq.testing import MethodConformance


class TestSignInt8(MethodConformance):
    method = olq.get_method("sign_int8")

    def error_bound(self, block_amax: torch.Tensor, part_amax: torch.Tensor) -> torch.Tensor:
        """Half a step of the row, three float32 roundings, and half of the least scale."""
        return block_amax * (0.5 / self.method.params.levels + 3 * 2.0**-24) + 2.0**-127


class TestFourBits(TestSignInt8):
    method = olq.get_method("sign_int8", levels=7)


def test_more_levels_than_a_byte_has_are_refused():
    with pytest.raises(olq.errors.ConfigError, match="method 'sign_int8'"):
        olq.get_method("sign_int8", levels=128)


def test_a_prepared_model_uses_the_method_for_the_layers_of_a_rule():
    model = torch.nn.Sequential(torch.nn.Linear(100, 12), torch.nn.Linear(12, 5)).to(torch.bfloat16)
    weight = model[1].weight.detach().clone()
    olq.prepare(model, olq.QuantConfig(method="keep", rules=[olq.Rule(match="1", method="sign_int8")]))
    assert model[1].weight.dtype == torch.uint8
    assert (olq.dequantize(model[1]) - weight).abs().max() <= weight.abs().max() / 127
