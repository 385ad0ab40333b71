"""Whatever a loader writes, and however: the bytes are those of real memory, quantized as a whole, or it is refused."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import olq
from olq.errors import LoaderError, OlqError, SourceError
from olq.methods.state import find_state
from olq.reload.online import load_of
from reload.engine_layers import OneWeight, call, load, real_parameter, stored_bytes, whole_bytes
from reload.plans import METHODS, method_id
from reload.programs import Call, programs

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
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
    )
    compare(layer, data.draw(programs((*lead, sum(parts), columns))))


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS, ids=method_id)
@settings(max_examples=25)
@given(data=st.data())
def test_any_writes_from_the_host_give_the_same_bytes_on_a_gpu(method, data):
    name, params = method
    parts, columns, lead = data.draw(st.sampled_from(SHAPES))
    shape = {"parts": parts, "columns": columns, "lead": lead, "device": "cuda"}
    layer = OneWeight(lambda p, call, rest: call.run(p, rest), method=name, params=params, **shape)
    compare(layer, data.draw(programs((*lead, sum(parts), columns))))
    assert layer.weight.is_cuda


def same_as_real_memory(loader, *sources, **layer_arguments) -> OneWeight:
    """Call a loader once under the counter and once on real memory."""
    layer = OneWeight(loader, **layer_arguments)
    real = real_parameter(layer)
    loader(real, *[s.clone() for s in sources])
    load(layer, sources)
    assert stored_bytes(layer) == whole_bytes(layer, real)
    return layer


X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def assign_data(p, x):
    p.data = x


def assign_data_of_another_dtype(p, x):
    p.data = x.float().to(p.dtype)


def many_rows(p, x):
    for row in range(len(x)):
        for half in (slice(0, 20), slice(20, 32)):
            for cut in (slice(None, None, 2), slice(1, None, 2)):
                p[row, half][cut].copy_(x[row, half][cut])


def rows_backwards_after_a_read(p, x):
    p[15:].copy_(x[15:])
    p[15:].mul_(1)  # from here on there is memory of row 15 alone, which has to grow downwards
    for row in reversed(range(15)):
        p[row].copy_(x[row])


def rows_upwards_after_a_read(p, x):
    p[0].copy_(x[0])
    p[0].mul_(1)
    for row in range(1, 16):
        p[row].copy_(x[row])


def shift_bytes(p, x):
    p.copy_(x)
    p.as_strided((3, 7), (33, 1)).copy_(torch.arange(21).view(3, 7).bfloat16())  # each row starts elsewhere


def fill_from_a_tensor(p, x):
    p.copy_(x)
    p[:3].fill_(torch.tensor(2.5, dtype=torch.float64))


def random_numbers(p, x):
    torch.manual_seed(3)
    p.normal_()
    p[:4].uniform_(-1, 1)


def chunks(p, x):
    for target, source in zip(p.chunk(3), x.chunk(3), strict=True):
        target.copy_(source)


def source_is_the_parameter(p, x):
    p[:8].copy_(x[:8])
    p[8:].copy_(p[:8].detach().clone() * 2)


def out_of_two(p, x):
    torch.cat([x[:5], x[5:]], out=p.data)


def out_reads_the_parameter(p, x):
    p.copy_(x)
    torch.mul(p, 3, out=p.data)


@pytest.mark.parametrize(
    "loader",
    [
        assign_data, assign_data_of_another_dtype, many_rows, rows_backwards_after_a_read, rows_upwards_after_a_read,
        shift_bytes, fill_from_a_tensor, random_numbers, chunks, source_is_the_parameter, out_of_two,
        out_reads_the_parameter,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
@pytest.mark.parametrize("method", ["fp8", "nvfp4"])
def test_this_loader_gives_the_bytes_of_real_memory(loader, method):
    same_as_real_memory(loader, X, method=method)


def test_float32_is_kept_where_the_method_keeps_it_even_if_it_waits_in_memory():
    source = torch.randn(16, 32)

    def loader(p, x):
        p.copy_(x)
        p[3:5].copy_(x[3:5])  # overlaps in part
        p[p.new_zeros(16, 32, dtype=torch.bool)] = x[:0, 0]

    layer = load(OneWeight(loader, params={"source_precision": "keep"}), (source,))
    assert stored_bytes(layer) == whole_bytes(layer, source)


def test_only_touched_rows_get_memory_of_their_own():
    """One expert of many that is transformed in place costs one expert's memory."""
    shapes = []

    def loader(p, x, expert):
        p[expert].copy_(x)
        p[expert].mul_(2)
        shapes.append(torch.empty(0) if expert < 0 else None)

    layer = OneWeight(loader, lead=(64,), parts=(16,))
    olq.initialize_online_processing(layer)
    made = []
    original = torch.empty

    def empty(*args, **kwargs):
        result = original(*args, **kwargs)
        made.append(result.numel())
        return result

    source = X.clone()
    try:
        torch.empty = empty
        for expert in (5, 63, 0):
            call(layer, source, expert)
    finally:
        torch.empty = original
    assert max(made[3:]) <= 2 * X.numel()  # the first three are the kernel tensors
    for expert in set(range(64)) - {5, 63, 0}:
        call(layer, source, expert)
    olq.finalize_layerwise_processing(layer)
    assert stored_bytes(layer) == whole_bytes(layer, (X * 2).expand(64, -1, -1))


def test_zero_elements_are_nothing():
    def loader(p, x):
        p[0:0].copy_(x[0:0])
        p[:, 3:3].zero_()
        p.copy_(x)

    same_as_real_memory(loader, X)


@pytest.mark.parametrize("shape", [((0,), 32), ((16,), 0), ((0, 0), 0), ((8, 0, 8), 32)])
@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_weight_or_part_without_elements_is_complete_at_once(shape, method):
    name, params = method
    parts, columns = shape
    layer = OneWeight(lambda p, x: p.copy_(x), method=name, params=params, parts=parts, columns=columns)
    olq.initialize_online_processing(layer)
    if layer.weight.numel():
        call(layer, X)
    olq.finalize_layerwise_processing(layer)
    assert find_state(layer).live


# What is refused, by name


def list_index(p, x):
    p[[0, 2]] = x[:2]


def expanded(p, x):
    p[:1].expand(4, -1).copy_(x[:4])


def overlapping(p, x):
    p.as_strided((4, 32), (16, 1)).copy_(x[:4])


def reads_what_was_never_written(p, x):
    p.copy_(x + p)


def transforms_what_was_never_written(p, x):
    p[:8].copy_(x[:8])
    p.mul_(2)


def adds(p, x):
    p.copy_(x)
    p.index_put_((torch.tensor([1]),), x[:1], accumulate=True)


def other_bits(p, x):
    p.view(torch.float16).copy_(x.half())


def other_bits_smaller(p, x):
    p.view(torch.uint8).copy_(x.view(torch.uint8))


def unknown_meta(p, x):
    FOREIGN.copy_(x)


def from_meta(p, x):
    p.copy_(FOREIGN)


def numbers_made_on_the_parameters_device(p, x):
    p.copy_(torch.tensor(x.tolist(), device=p.device))


def frees_the_source(p, x):
    y = x.clone()
    p.copy_(y)
    y.untyped_storage().resize_(0)


def replaces_memory(p, x):
    p.set_(x)


FOREIGN = torch.empty(16, 32, device="meta", dtype=torch.bfloat16)
REFUSED = {
    list_index: (LoaderError, "index or from a source that is on the meta device"),
    expanded: (LoaderError, "writes onto an expanded view"),
    overlapping: (LoaderError, "whose elements overlap"),
    reads_what_was_never_written: (
        LoaderError,
        "reads or changes, by aten.add.Tensor, elements that it has not",
    ),
    transforms_what_was_never_written: (
        LoaderError,
        "reads or changes, by aten.mul_.Tensor, elements that it has",
    ),
    adds: (LoaderError, "accumulates into the parameter"),
    other_bits: (LoaderError, "uses the parameter's bits as torch.float16"),
    other_bits_smaller: (LoaderError, "uses the parameter's bits as torch.uint8"),
    unknown_meta: (LoaderError, "a copy onto a meta tensor that belongs to no tracked parameter"),
    from_meta: (LoaderError, "copies from a tensor on the meta device"),
    numbers_made_on_the_parameters_device: (LoaderError, "copies from a tensor on the meta device"),
    frees_the_source: (LoaderError, "a source whose storage was resized to nothing"),
    replaces_memory: (LoaderError, "reads or changes, by aten.set_.source_Tensor"),
}


@pytest.mark.parametrize("loader", REFUSED, ids=lambda f: f.__name__)
def test_what_can_not_be_served_is_refused_by_name_and_nothing_arrives(loader):
    current = [loader]
    layer = OneWeight(lambda p, x: current[0](p, x))
    olq.initialize_online_processing(layer)
    kind, found = REFUSED[loader]
    with pytest.raises(kind) as error:
        call(layer, X)
    assert found in error.value.found
    if loader is not unknown_meta:
        assert "layer.weight" in error.value.where
    assert "while loading 'layer.weight'" in error.value.where
    assert error.value.need
    assert error.value.remedy
    assert not load_of(layer).started
    current[0] = lambda p, x: p.copy_(x)
    call(layer, X)
    olq.finalize_layerwise_processing(layer)
    assert stored_bytes(layer) == whole_bytes(layer, X)


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool],
)
@pytest.mark.parametrize("way", ["copy", "index", "data", "feed"])
def test_a_source_that_is_no_full_precision_weight_is_refused_by_dtype(dtype, way):
    def loader(p, x):
        if way == "index":
            p[torch.arange(16)] = x
        elif way == "data":
            p.data = x
        else:
            p.copy_(x)

    layer = OneWeight(loader if way != "feed" else None)
    source = X.to(dtype)
    with pytest.raises(SourceError) as error:
        load(layer, (source,))
    assert "layer.weight" in error.value.where
    assert str(dtype) in error.value.found
    if dtype.itemsize == 1 and dtype != torch.bool:
        assert "already quantized" in error.value.found
    call(layer, X) if way == "feed" else layer.weight.weight_loader(layer.weight, X)
    olq.finalize_layerwise_processing(layer)
    assert stored_bytes(layer) == whole_bytes(layer, X)


@pytest.mark.parametrize("shape", [(15, 32), (16, 31), (2, 16, 32), (512,)])
@pytest.mark.parametrize("way", ["copy", "plain", "data", "foreach"])
def test_a_source_of_another_shape_is_refused_with_both_shapes(shape, way):
    def loader(p, x):
        if way == "data":
            p.data = x
        elif way == "foreach":
            torch._foreach_copy_([p], [x])
        else:
            p.copy_(x)

    layer = OneWeight(loader if way != "plain" else None)
    olq.initialize_online_processing(layer)
    with pytest.raises(OlqError) as error:
        call(layer, torch.randn(shape))
    assert str(list(shape)) in error.value.found
    assert "[16, 32]" in error.value.need
    call(layer, X)
    olq.finalize_layerwise_processing(layer)


def test_a_plain_copy_does_not_broadcast():
    """A loader may broadcast; where olq loads by itself, a row is no weight."""
    layer = OneWeight(None)
    olq.initialize_online_processing(layer)
    with pytest.raises(SourceError, match=re.escape("shape [32]")):
        call(layer, X[0])
    call(layer, X)
    olq.finalize_layerwise_processing(layer)
