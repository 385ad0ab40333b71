"""Every built-in method with every combination of its parameters passes the public conformance suite."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import olq
from olq.errors import ConfigError
from olq.methods.base import QuantMethod
from olq.testing import MethodConformance

#: Values of the parameters that change bytes or layouts; `source_precision` and `nonfinite` have classes of their own.
GRID: dict[str, dict[str, list[str]]] = {
    "fp8": {"granularity": ["tensor", "channel", "block"], "scale": ["float32", "power_of_two"]},
    "mxfp8": {"rule": ["RCEIL", "FLOOR", "CEIL", "EVEN"], "scale_layout": ["linear", "swizzled_128x4"]},
    "nvfp4": {"scale_sharing": ["part", "common"], "scale_layout": ["linear", "swizzled_128x4"]},
}
CASES = [
    (name, dict(zip(grid, values, strict=True)))
    for name, grid in GRID.items()
    for values in product(*grid.values())
]
CASES += [("fp8", {"granularity": "tensor", "scale_sharing": "common"})]
CASES += [(name, {"nonfinite": "saturate", "source_precision": "parameter"}) for name in GRID]


class Fp8Claims(MethodConformance):
    """E4M3 has a step of 32 before 448; a power-of-two scale is up to twice as coarse; float32 rounds too."""

    def error_bound(self, block_amax: Tensor, part_amax: Tensor) -> Tensor:
        coarse = 2.0 if self.method.params.model_dump()["scale"] == "power_of_two" else 1.0
        return block_amax * (coarse * 16 / 448 + 2.0**-20) + 2.0**-126


def suite(method: QuantMethod) -> type:
    base: Any = Fp8Claims if method.name == "fp8" else MethodConformance
    return type("Suite", (base,), {"method": method, "__module__": __name__})


for _name, _params in CASES:
    _title = "".join(part.title().replace("_", "") for part in (_name, *_params.values()))
    globals()[f"Test{_title}"] = suite(olq.get_method(_name, **_params))


def test_the_grid_knows_every_method_and_every_value():
    for name in set(olq.method_names()) - {"keep", "sign_int8"}:
        params = type(olq.get_method(name)).Params
        fields = params.model_fields
        for field, values in GRID[name].items():
            assert set(values) == set(fields[field].annotation.__args__)
        others = {"scale_sharing", "nonfinite", "source_precision"}
        assert set(fields) <= {*GRID[name], *others, *params.forward_fields}


@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("params", [{"granulrity": "block"}, {"nonfinite": "ignore"}, {"nonfinite": 1}])
def test_a_wrong_parameter_is_named_with_what_is_allowed(name, params):
    with pytest.raises(ConfigError) as caught:
        olq.get_method(name, **params)
    (parameter, value), *_ = params.items()
    assert caught.value.where == f"method {name!r}: {parameter}"
    assert repr(value) in caught.value.found
    allowed = "'error' or 'saturate'" if parameter == "nonfinite" else "'nonfinite'"
    assert allowed in caught.value.need


def test_keep_has_no_kernel_format():
    keep = olq.get_method("keep")
    layer = torch.nn.Module()
    keep.create_weights(layer, 6, (2, 3), dtype=torch.float16)
    assert layer.weight.shape == (5, 6)
    assert not layer.weight.is_meta
    with pytest.raises(olq.errors.LayoutError, match="has no kernel format"):
        keep.plan(olq.methods.Geometry((), (5,), 6), torch.float16)
