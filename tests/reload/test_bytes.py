"""What a load leaves in memory equals an oracle that shares no code with olq: codes, scales, and each padding byte."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import kernel_format
from reload.plans import METHODS, RegionLayer, bf16_weights, load_by, method_id, row_boxes

SHAPES = [((5,), 1), ((48, 16, 16), 100), ((130, 70, 3), 33), ((128, 128), 160)]


def expected(name: str, params: dict[str, str], parts: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Kernel tensors by the oracle."""
    common = params.get("scale_sharing") == "common"
    swizzled = params.get("scale_layout") == "swizzled_128x4"
    if name == "fp8":
        parts = [np.concatenate(parts)] if common else parts
        tensors = kernel_format.fp8_weight(
            parts, params["granularity"], params.get("scale") == "power_of_two"
        )
    elif name == "mxfp8":
        tensors = kernel_format.mxfp8_weight(parts, params.get("rule", "RCEIL"), swizzled)
    else:
        tensors = kernel_format.nvfp4_weight(parts, swizzled, common)
    return dict(zip(("weight", "weight_scale", "weight_scale_2"), tensors, strict=False))


@pytest.mark.parametrize("method", METHODS, ids=method_id)
@settings(max_examples=6)
@given(data=st.data())
def test_every_kernel_byte_is_the_oracles(method, data):
    name, params = method
    parts, columns = data.draw(st.sampled_from(SHAPES))
    weight = data.draw(bf16_weights((sum(parts), columns)))
    layer = load_by(RegionLayer(name, params, parts, columns), weight, list(row_boxes(parts, columns)))
    wanted = expected(name, params, [w.float().numpy() for w in weight.split(parts)])
    stored = dict(layer.named_parameters())
    assert stored.keys() == wanted.keys()
    for tensor, want in wanted.items():
        found = stored[tensor].detach().numpy()
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found.view(np.uint8), want.view(np.uint8), err_msg=tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_source_is_rounded_to_the_parameters_dtype_first(dtype):
    weight = (torch.randn(40, 70, dtype=torch.float64) * 3).to(dtype)
    for name, params in METHODS:
        fed = load_by(RegionLayer(name, params, (24, 16), 70), weight, list(row_boxes((24, 16), 70)))
        rounded = load_by(
            RegionLayer(name, params, (24, 16), 70), weight.bfloat16(), list(row_boxes((24, 16), 70))
        )
        for (_, a), (_, b) in zip(fed.named_parameters(), rounded.named_parameters(), strict=True):
            assert torch.equal(a, b)


def test_source_precision_keep_takes_float32_as_it_comes():
    weight = torch.randn(32, 64)
    layer = load_by(
        RegionLayer("fp8", {"source_precision": "keep"}, (32,), 64), weight, [(range(32), range(64))]
    )
    codes, scales = kernel_format.fp8_weight([weight.numpy()], "channel", False)
    np.testing.assert_array_equal(layer.weight.detach().numpy(), codes)
    np.testing.assert_array_equal(layer.weight_scale.detach().numpy(), scales)
