"""What `create_weights` registers, and what it refuses."""

import pytest
import torch
from torch import nn

import olq


def test_a_second_weight_with_another_method_is_refused():
    layer = nn.Module()
    olq.get_method("fp8").create_weights(layer, 32, 16, dtype=torch.bfloat16, label="layer", name="up")
    olq.get_method("fp8").create_weights(layer, 32, 16, dtype=torch.bfloat16, label="layer", name="gate")
    with pytest.raises(olq.errors.LayoutError, match=r"one method for all[\s\S]*layer\.down[\s\S]*Mxfp8"):
        olq.get_method("mxfp8").create_weights(
            layer, 32, 16, dtype=torch.bfloat16, label="layer", name="down"
        )
    assert set(dict(layer.named_parameters())) == {"up", "gate"}


def test_a_preset_of_none_is_no_method():
    layer = nn.Module()
    layer.quant_method = None
    method = olq.get_method("nvfp4")
    method.create_weights(layer, 32, 16, dtype=torch.bfloat16)
    assert layer.quant_method is method


def test_the_reason_reaches_the_report():
    layer = nn.Module()
    olq.get_method("fp8").create_weights(layer, 32, 16, dtype=torch.bfloat16, reason="because")
    olq.initialize_online_processing(layer)
    layer.weight.weight_loader(layer.weight, torch.randn(16, 32, dtype=torch.bfloat16))
    assert olq.finalize_layerwise_processing(layer).weights[0].reason == "because"
