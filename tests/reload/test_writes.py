"""Whatever a loader writes, and however: the bytes are those of real memory, quantized as a whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reload.engine_layers import OneWeight, load, real_parameter, stored_bytes, whole_bytes
from reload.plans import METHODS, method_id
from reload.programs import KINDS, Call, Step, programs

SHAPES = [((24, 9), 40, ()), ((7,), 33, ()), ((12, 5), 16, (3,))]


def compare(layer: OneWeight, program: list[Call]) -> None:
    """Run a program on real memory and through the layer's wrapped loader."""
    real = real_parameter(layer)
    rests = [call.run(real) for call in program]
    load(layer, *zip(program, rests, strict=True))
    assert stored_bytes(layer) == whole_bytes(layer, real)


@pytest.mark.parametrize("method", METHODS, ids=method_id)
@settings(max_examples=25)
@given(data=st.data())
def test_any_writes_give_the_bytes_of_real_memory(method, data):
    name, params = method
    parts, columns, lead = data.draw(st.sampled_from(SHAPES))
    layer = OneWeight(
        lambda p, call, rest: call.run(p, rest),
        method=name,
        params=params,
        parts=parts,
        columns=columns,
        lead=lead,
    )
    compare(layer, data.draw(programs((*lead, sum(parts), columns))))
