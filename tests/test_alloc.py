"""Kernel-owned memory: specs, alignment, strides, padding, and the field's usual outputs byte for byte."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from olq.alloc import (
    TensorSpec,
    allocate,
    attention_output,
    block_scale_spec,
    fp4_output,
    fp8_group_output,
    fp8_token_output,
    mxfp8_output,
    overwritten_output,
    write_padding_,
)
from olq.errors import LayoutError
from olq.layout import MNMajor, RowMajor, Swizzle128x4, UE8M0Words
from olq.numerics.packing import to_mn_major, to_ue8m0_words
from olq.numerics.swizzle import swizzle_128x4

# Most tests here look at memory that nobody has to write.
pytestmark = pytest.mark.unaudited(reason="shapes, strides and padding of memory that no producer fills")

DTYPES = [torch.uint8, torch.int32, torch.float32, torch.bfloat16, torch.float16]


def make(spec: TensorSpec, device: str = "cpu") -> Tensor:
    return allocate(spec, device=device, owner="test")


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory that holds 0xA5 in each byte, as recycled memory might."""
    empty = torch.empty

    def full_of_old_bytes(*args, **kwargs):
        made = empty(*args, **kwargs)
        if made.device.type != "meta":
            made.view(torch.uint8).fill_(0xA5) if made.dim() else made
        return made

    monkeypatch.setattr(torch, "empty", full_of_old_bytes)


def all_bytes(t: Tensor) -> Tensor:
    """The storage from the tensor's first element on."""
    whole = torch.tensor([], dtype=torch.uint8).set_(t.untyped_storage())
    return whole[t.storage_offset() * t.element_size() :]


# what a tensor is


@given(
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.sampled_from(DTYPES),
    st.sampled_from([16, 64, 256, 4096]),
    st.data(),
)
def test_a_tensor_has_its_specs_shape_strides_dtype_and_alignment(shape, dtype, alignment, data):
    strides, step = [0] * len(shape), 1
    for dim in data.draw(st.permutations(range(len(shape)))):
        strides[dim] = step
        step = step * max(shape[dim], 1) + data.draw(st.integers(0, 3))
    spec = TensorSpec(shape, dtype, tuple(strides), alignment)
    t = make(spec)
    assert (t.shape, t.stride(), t.dtype) == (shape, tuple(strides), dtype)
    assert t.data_ptr() % alignment == 0
    assert all_bytes(t).numel() >= spec.nbytes
    if t.numel():
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        assert spec.nbytes == (last + 1) * dtype.itemsize


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("order", [MNMajor(7, 3), RowMajor(8, 3)], ids=lambda order: order.tag)
def test_a_tensor_is_plain_whatever_mode_it_is_made_in(mode, order):
    with mode():
        t = make(TensorSpec.of(order, torch.float32))
    assert not t.is_inference()
    assert not t.requires_grad
    assert not t._is_view()
    t.add_(1)  # an inference tensor would refuse this outside inference mode


def test_a_tensor_survives_copies_and_pickling_with_its_strides():
    t = make(TensorSpec.of(MNMajor(7, 3), torch.float32, (2,)))
    t.copy_(torch.arange(42.0).view(2, 7, 3))
    for other in (copy.deepcopy(t), pickle.loads(pickle.dumps(t))):
        assert other.stride() == t.stride()
        assert torch.equal(other, t)


def test_on_meta_there_is_a_tensor_and_no_memory():
    t = make(TensorSpec.of(UE8M0Words(130, 33), torch.int32, (3,)), "meta")
    assert (t.is_meta, t.shape, t.stride()) == (True, (3, 130, 9), (9 * 132, 1, 132))


def test_leading_dimensions_repeat_one_matrix_with_its_padding():
    spec = TensorSpec.of(Swizzle128x4(5, 3), lead=(2, 3))
    assert (spec.shape, spec.stride, spec.nbytes) == ((2, 3, 128, 4), (1536, 512, 4, 1), 6 * 512)
    spec = TensorSpec.of(MNMajor(130, 32), torch.float32, (2,))
    assert (spec.stride, spec.nbytes) == ((132 * 32, 1, 132), 2 * 132 * 32 * 4)


@pytest.mark.parametrize(
    ("make_spec", "found"),
    [
        (lambda: TensorSpec((4,), torch.float8_e4m3fn), "dtype torch.float8_e4m3fn"),
        (lambda: TensorSpec((4, 4), torch.uint8, (2, 1)), "strides [2, 1] for shape [4, 4]: elements share"),
        (lambda: TensorSpec((4, 4), torch.uint8, (0, 1)), "elements share a place"),
        (lambda: TensorSpec((4, 4), torch.uint8, (-4, 1)), "strides [-4, 1]"),
        (lambda: TensorSpec((4, 4), torch.uint8, (1,)), "strides [1]"),
        (lambda: TensorSpec((4,), torch.float32, alignment=2), "alignment 2"),
        (lambda: TensorSpec((4,), torch.uint8, alignment=24), "alignment 24"),
        (lambda: TensorSpec.of(MNMajor(7, 3), torch.bfloat16), "torch.bfloat16 in mn_major order"),
        (lambda: TensorSpec.of(UE8M0Words(7, 3), torch.uint8), "torch.uint8 in ue8m0_words order"),
        (lambda: TensorSpec.of(Swizzle128x4(7, 3), torch.float32), "torch.float32 in swizzled_128x4 order"),
        (lambda: TensorSpec((7, 3), torch.float32, order=MNMajor(8, 3)), "shape [7, 3], strides None"),
        (lambda: TensorSpec((7, 3), torch.float32, (3, 1), order=MNMajor(7, 3)), "strides [3, 1]"),
        (
            lambda: TensorSpec((7, 3), torch.float32, layout="linear", order=MNMajor(7, 3)),
            "layout='linear', order.tag='mn_major'",
        ),
    ],
)
def test_a_spec_that_no_kernel_tensor_can_have_is_refused(make_spec, found):
    with pytest.raises(LayoutError) as caught:
        make_spec()
    assert found in caught.value.found


def test_the_message_says_what_to_use_in_place_of_float8():
    with pytest.raises(LayoutError) as caught:
        TensorSpec((4,), torch.float8_e4m3fn)
    assert str(caught.value) == (
        "No kernel-owned tensor can be made from this spec.\n"
        "  where:  TensorSpec, layout 'row_major'\n"
        "  found:  dtype torch.float8_e4m3fn\n"
        "  need:   uint8 for codes and scale bytes, int32, float32, bfloat16 or float16; no negative size or "
        "stride, elements apart from each other; alignment 2**n bytes, an element or more\n"
        "  remedy: store codes as uint8 and view them as float8 where a kernel reads them"
    )


# padding


ORDERS = [
    (Swizzle128x4(5, 3), torch.uint8),
    (Swizzle128x4(129, 9, extra_tiles=1), torch.uint8),
    (MNMajor(7, 3), torch.float32),
    (UE8M0Words(7, 5), torch.int32),
    (RowMajor(5, 3, 16, 8, value=1.0, spans=((0, 2), (8, 11))), torch.float32),
    (RowMajor(5, 3, 16, 8), torch.uint8),
]


@pytest.mark.usefixtures("stale")
@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (0,)])
@pytest.mark.parametrize(("order", "dtype"), ORDERS, ids=lambda value: getattr(value, "tag", None))
def test_padding_is_written_at_allocation_and_nothing_else(order, dtype, lead):
    """All padding of an order, by its own map; data keeps whatever the memory held."""
    t = make(TensorSpec.of(order, dtype, lead))
    unit = torch.uint8 if order.unit_bits == 8 else dtype
    held = all_bytes(t)[: TensorSpec.of(order, dtype, lead).nbytes].view(unit).view(-1, order.extent)
    old = torch.full((unit.itemsize,), 0xA5, dtype=torch.uint8).view(unit).item()
    expected = [order.padding_value if order.inverse(i).padding else old for i in range(order.extent)]
    for matrix in held.tolist():
        assert matrix == expected


@pytest.mark.usefixtures("stale")
def test_padding_written_over_can_be_written_again():
    spec = TensorSpec.of(MNMajor(7, 3), torch.float32)
    t = make(spec)
    all_bytes(t).fill_(0xA5)
    write_padding_(t, spec)
    assert all_bytes(t)[:96].view(torch.float32).view(3, 8)[:, 7].tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(LayoutError, match=r"strides \[3, 1\], 21 elements of storage\n  need:.*24 elements"):
        write_padding_(t.contiguous(), spec)


# the field's outputs


@pytest.mark.usefixtures("stale")
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129])
@pytest.mark.parametrize("columns", [16, 64, 80, 200])
def test_fp4_outputs_have_the_fields_shapes_and_zero_padding(rows, columns):
    codes, scale = fp4_output(rows, columns, device="cpu", owner="gemm")
    assert (codes.shape, codes.dtype) == ((rows, columns // 2), torch.uint8)
    assert (scale.shape, scale.dtype) == ((rows, -(-columns // 16)), torch.uint8)
    _, scale = fp4_output(rows, columns, scale_layout="swizzled_128x4", device="cpu", owner="gemm")
    groups = -(-columns // 16)
    words = (128 * -(-rows // 128), 4 * -(-groups // 4) // 4)
    assert scale.view(torch.int32).shape == words
    linear = torch.full((rows, groups), 0xA5, dtype=torch.uint8)
    assert torch.equal(scale, swizzle_128x4(linear))


@pytest.mark.usefixtures("stale")
def test_mxfp8_and_mxfp4_scales_have_one_byte_for_32_columns():
    codes, scale = mxfp8_output(5, 200, device="cpu", owner="gemm")
    assert (codes.shape, scale.shape) == ((5, 200), (5, 7))
    codes, scale = mxfp8_output(5, 200, scale_layout="swizzled_128x4", lead=(3,), device="cpu", owner="gemm")
    assert (codes.shape, scale.shape) == ((3, 5, 200), (3, 128, 8))
    codes, scale = fp4_output(5, 100, group=32, device="cpu", owner="gemm")
    assert (codes.shape, scale.shape) == ((5, 50), (5, 4))
    _, scale = mxfp8_output(5, 200, scale_layout="swizzled_128x4", extra_tiles=1, device="cpu", owner="gemm")
    assert scale.shape == (256, 8)
    assert not scale[128:].any()


def test_fp8_token_scales_are_a_float32_column():
    codes, scale = fp8_token_output(7, 100, device="cpu", owner="gemm")
    assert (codes.shape, codes.dtype) == ((7, 100), torch.uint8)
    assert (scale.shape, scale.stride(), scale.dtype) == ((7, 1), (1, 1), torch.float32)


@pytest.mark.usefixtures("stale")
@pytest.mark.parametrize("rows", [1, 4, 7, 130])
@pytest.mark.parametrize("columns", [100, 128, 640, 4096])
def test_fp8_group_scales_come_in_three_layouts(rows, columns):
    G, aligned = -(-columns // 128), 4 * -(-rows // 4)
    codes, scale = fp8_group_output(rows, columns, device="cpu", owner="gemm")
    assert (codes.shape, scale.shape, scale.stride()) == ((rows, columns), (rows, G), (G, 1))

    values = torch.ldexp(torch.ones(rows, G), torch.arange(rows)[:, None] % 7 - torch.arange(G) % 5)
    _, scale = fp8_group_output(rows, columns, scale_layout="mn_major", device="cpu", owner="gemm")
    assert (scale.shape, scale.stride()) == ((rows, G), (1, aligned))
    scale.copy_(values)
    assert torch.equal(all_bytes(scale), all_bytes(to_mn_major(values)))

    _, scale = fp8_group_output(rows, columns, scale_layout="ue8m0_words", device="cpu", owner="gemm")
    assert (scale.shape, scale.stride(), scale.dtype) == ((rows, -(-G // 4)), (1, aligned), torch.int32)
    # A producer that writes exponents one by one, and never a lane after the last group.
    lanes = all_bytes(scale).view(-1, aligned, 4)
    for group in range(G):
        lanes[group // 4, :rows, group % 4] = (values[:, group].view(torch.int32) >> 23).to(torch.uint8)
    assert torch.equal(all_bytes(scale), all_bytes(to_ue8m0_words(values)))


def test_a_scale_layout_nobody_knows_is_refused():
    with pytest.raises(LayoutError) as caught:
        fp8_group_output(4, 128, scale_layout="column_major", device="cpu", owner="gemm")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "There is no such scale layout.\n"
        "  where:  gemm\n"
        "  found:  'column_major'\n"
        "  need:   one of 'row_major', 'mn_major', 'ue8m0_words'\n"
        "  remedy: use the layout that the kernel which reads the scales asks for"
    )
    with pytest.raises(LayoutError, match="one of 'linear', 'swizzled_128x4'"):
        block_scale_spec(4, 8, "blocked")


@pytest.mark.usefixtures("stale")
def test_an_attention_output_is_tiled_by_its_parts():
    parts = {"decode": (0, 3), "prefill": (3, 10)}
    whole, views = attention_output(
        parts, rows=10, heads=2, head_dim=4, dtype=torch.bfloat16, padded_rows=16, device="cpu", owner="attn"
    )
    assert whole.shape == (16, 2, 4)
    assert not whole[10:].any()
    for name, (start, stop) in parts.items():
        assert views[name].data_ptr() == whole[start].data_ptr()
        views[name].fill_(start + 1)
        assert views[name].shape == (stop - start, 2, 4)
    assert whole[:, 0, 0].tolist() == [1] * 3 + [4] * 7 + [0] * 6


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"decode": (0, 3), "prefill": (4, 10)}, "leave a gap"),
        ({"decode": (0, 5), "prefill": (3, 10)}, "overlap"),
        ({"decode": (0, 3), "prefill": (3, 9)}, "leave a gap"),
        ({"decode": (0, 3), "prefill": (3, 11)}, "outside the output"),
    ],
)
def test_attention_parts_that_do_not_tile_are_refused_before_memory_is_made(parts, text):
    with pytest.raises(LayoutError, match=rf"{text}.*\n  where:  layers.3.attn"):
        attention_output(
            parts,
            rows=10,
            heads=2,
            head_dim=4,
            dtype=torch.bfloat16,
            device="cpu",
            owner="layers.3.attn",
        )


def test_an_overwritten_output_is_contiguous_and_unpadded():
    out = overwritten_output((3, 5), torch.bfloat16, device="cpu", owner="copy")
    assert (out.shape, out.stride()) == ((3, 5), (5, 1))


@pytest.mark.parametrize("layout", ["row_major", "mn_major", "ue8m0_words"])
def test_outputs_can_be_made_inside_a_full_graph(layout):
    def produce(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = fp8_group_output(
            x.shape[0], x.shape[1], scale_layout=layout, device=x.device, owner="f"
        )
        codes.copy_(x)
        scale.fill_(2)
        return codes, scale

    x = torch.arange(7 * 256).view(7, 256) % 256
    for made, expected in zip(
        torch.compile(produce, fullgraph=True, backend="aot_eager")(x), produce(x), strict=True
    ):
        assert made.stride() == expected.stride()
        assert torch.equal(made, expected)
