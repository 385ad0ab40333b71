"""What each kind of tensor gets in a dummy load: on poisoned memory, once, however modules nest and share."""

import math

import pytest
import torch
from torch import nn

from olq.errors import LayoutError
from olq.numerics.random import UniformFill
from olq.reload.dummy import dummy_init, dummy_init_tensor
from olq.testing.memory import measure_memory

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]


@pytest.fixture
def poisoned_memory():
    """`torch.empty` gives NaN, and the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def uniform(shape: tuple[int, ...], name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    UniformFill(-1e-3, 1e-3, 1234).fill_(out, name)
    return out


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.detach().contiguous().view(torch.uint8), b.detach().contiguous().view(torch.uint8))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", FLOATS)
def test_old_values_are_never_read(dtype):
    for shape, flip in [((7, 9), False), ((9, 7), True)]:
        out = torch.full(shape, math.nan).to(dtype)
        out = out.t() if flip else out
        assert dummy_init_tensor(out, name="w") == "uniform between -0.001 and 0.001: floats"
        assert same_bytes(out, uniform((7, 9), "w", dtype))


@pytest.mark.parametrize(
    ("name", "dtype", "byte"),
    [
        ("weight_scale", torch.float8_e8m0fnu, 127),
        ("anything", torch.float8_e8m0fnu, 127),
        ("weight_scale", torch.float8_e4m3fn, 0x38),
        ("w13_weight_scale", torch.float8_e5m2, 0x3C),
        ("down_proj_scales", torch.uint8, 127),
        ("weight_scale", torch.int32, 127),
    ],
)
def test_scale_bytes_mean_one(name, dtype, byte):
    out = torch.empty(3, 4, dtype=dtype)
    assert dummy_init_tensor(out.t(), name="layer." + name).startswith("one: ")
    assert out.view(torch.uint8).unique().tolist() == [byte]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("weight_scale", (4, 1)),
        ("weight_scale_inv", (2, 2)),
        ("weight_scale_2", (1,)),
        ("k_scale", ()),
        ("input_scale", ()),
        ("norm.scale", (8,)),
        ("running_var", (8,)),
        ("temperature", ()),
    ],
)
def test_scales_variances_and_constants_are_one(name, shape):
    out = torch.empty(shape, dtype=torch.bfloat16)
    assert dummy_init_tensor(out, name=name).startswith("one: ")
    assert (out == 1).all()


@pytest.mark.parametrize("name", ["upscale.weight", "scaled", "scaler", "rescale", "scales.weight"])
def test_a_name_with_a_longer_word_is_no_scale(name):
    assert dummy_init_tensor(torch.empty(3), name=name).startswith("uniform")


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool])
def test_integer_parameters_are_zero(dtype):
    out = torch.empty(3, 4, dtype=dtype)
    assert dummy_init_tensor(out, name="qweight") == "zero: integers or packed codes"
    assert not out.any()


@pytest.mark.parametrize("compat", [None, "vllm"])
def test_packed_float4_is_zero_since_torch_can_not_cast_to_it(compat):
    raw = torch.full((3, 4), 0xFF, dtype=torch.uint8)
    assert dummy_init_tensor(raw.view(torch.float4_e2m1fn_x2), name="w", compat=compat).startswith("zero: ")
    assert not raw.any()


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
@pytest.mark.parametrize("compat", [None, "vllm"])
def test_tensors_without_elements_or_memory_are_left(shape, compat):
    assert dummy_init_tensor(torch.empty(shape), compat=compat) == "left: no elements"
    meta = torch.empty(3, 3, device="meta")
    assert dummy_init_tensor(meta, compat=compat) == "left: on the meta device"
    lazy = nn.LazyLinear(3)
    assert set(dummy_init(lazy, compat=compat).tensors.values()) == {"left: its shape is not known yet"}


def test_complex_parameters_are_pairs_of_floats():
    out = torch.empty(3, 4, dtype=torch.complex64)
    dummy_init_tensor(out, name="w")
    assert same_bytes(torch.view_as_real(out), uniform((3, 4, 2), "w"))


def test_an_expanded_dimension_is_filled_once():
    base = torch.empty(3, 1)
    dummy_init_tensor(base.expand(3, 4), name="w")
    assert same_bytes(base, uniform((3, 4), "w")[:, :1])


def test_elements_that_share_memory_are_refused():
    with pytest.raises(LayoutError) as caught:
        dummy_init_tensor(torch.empty(8).as_strided((4, 4), (1, 1)), name="w")
    assert str(caught.value) == (
        "Elements of this tensor share memory, so each can't get a value of its own.\n"
        "  where:  w\n"
        "  found:  shape [4, 4], strides [1, 1]\n"
        "  need:   elements apart from each other; an expanded dimension is fine\n"
        "  remedy: fill the tensor that it is a view of"
    )


# Models.


def test_a_large_fp8_parameter_needs_no_scratch_of_its_size():
    model = nn.Module()
    model.weight = parameter(torch.empty(16 << 20, dtype=torch.uint8).view(torch.float8_e4m3fn))
    assert measure_memory(lambda: dummy_init(model)).peak_bytes <= 4 << 20


class Leaf(nn.Module):
    """One of each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 6), math.nan))
        self.weight_scale = parameter(torch.full((4, 1), math.nan))
        self.codes = parameter(torch.full((4, 6), 255, dtype=torch.uint8))
        self.register_buffer("running_mean", torch.full((4,), math.nan))
        self.register_buffer("expert_map", torch.tensor([-1, 0, 1]))
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.5]), persistent=False)
        self.register_buffer("nothing", None)


def nest(depth: int) -> nn.Module:
    model: nn.Module = Leaf()
    for _ in range(depth):
        model = nn.Sequential(model, Leaf())
    return model


def test_a_model_is_filled_by_full_names():
    model = nest(2)
    report = dummy_init(model)
    leaf = model[0][1]
    assert same_bytes(leaf.weight, uniform((4, 6), "0.1.weight"))
    assert same_bytes(leaf.running_mean, uniform((4,), "0.1.running_mean"))
    assert (leaf.weight_scale == 1).all()
    assert not leaf.codes.any()
    assert leaf.expert_map.tolist() == [-1, 0, 1]
    assert leaf.inv_freq.tolist() == [1.0, 0.5]
    assert {name: what for name, what in report.tensors.items() if name.startswith("0.1.")} == {
        "0.1.weight": "uniform between -0.001 and 0.001: floats",
        "0.1.weight_scale": "one: a scale",
        "0.1.codes": "zero: integers or packed codes",
        "0.1.running_mean": "uniform between -0.001 and 0.001: floats",
        "0.1.expert_map": "left: an integer buffer, filled by its constructor",
        "0.1.inv_freq": "left: a buffer that no checkpoint holds",
    }
    assert report.load is None
    assert "0.1.weight_scale  one: a scale" in report.table().replace("   ", "")


@pytest.mark.parametrize("compat", [None, "vllm"])
def test_each_tensor_is_written_once_however_deep_modules_nest(compat, monkeypatch):
    written: list[int] = []
    for rule in ("Rule", "FieldRule"):
        kind = getattr(__import__("olq.reload.dummy_rules", fromlist=[rule]), rule)
        real = kind.fill_
        monkeypatch.setattr(
            kind,
            "fill_",
            lambda self, out, *args, real=real: written.append(out.data_ptr()) or real(self, out, *args),
        )
    model = nest(4)
    floats = [p for p in (*model.parameters(), *model.buffers()) if p.is_floating_point() and p.numel() != 2]
    dummy_init(model, compat=compat)
    scales = 0 if compat else sum(p.shape == (4, 1) for p in floats)
    assert len(written) == len(set(written)) == len(floats) - scales


def test_shared_modules_and_parameters_are_filled_under_their_first_name():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["c"] = model["a"]
    report = dummy_init(model)
    assert same_bytes(model["b"].weight, uniform((3, 3), "a.weight"))
    assert report.tensors["b.weight"] == report.tensors["c.weight"] == "alias of a.weight"
    assert report.tensors["c.bias"] == "alias of a.bias"


def test_parameters_that_are_views_of_one_tensor_get_its_values():
    flat = torch.empty(20)
    model = nn.Module()
    model.view = parameter(flat[4:16].view(3, 4))
    model.flat = parameter(flat)
    model.same = parameter(flat)
    model.every_second = parameter(flat[::2])
    report = dummy_init(model)
    assert same_bytes(flat, uniform((20,), "flat"))
    assert {n: w for n, w in report.tensors.items() if n != "flat"} == {
        "view": "alias of flat",
        "same": "alias of flat",
        "every_second": "alias of flat",
    }


def test_interleaved_views_are_filled_each():
    base = torch.empty(4, 10)
    model = nn.Module()
    model.left, model.right = parameter(base[:, :4]), parameter(base[:, 4:])
    dummy_init(model)
    assert same_bytes(model.left, uniform((4, 4), "left"))
    assert same_bytes(model.right, uniform((4, 6), "right"))


def test_weights_in_a_byte_arena_win_over_the_arena():
    arena = torch.full((64,), 255, dtype=torch.uint8)
    model = nn.Module()
    model.weight = parameter(arena[:48].view(torch.float32))
    model.arena = parameter(arena)
    model.last = parameter(arena[48:].view(torch.bfloat16))
    dummy_init(model)
    assert same_bytes(model.weight, uniform((12,), "weight"))
    assert same_bytes(model.last, uniform((8,), "last", torch.bfloat16))


def test_addresses_attributes_and_gradients_stay():
    model = nn.Linear(3, 3)
    model.weight.mark = "mine"  # type: ignore[attr-defined]
    before = (model.weight, model.weight.data_ptr(), model.weight.requires_grad)
    dummy_init(model)
    assert (model.weight, model.weight.data_ptr(), model.weight.requires_grad) == before
    assert model.weight.mark == "mine"  # type: ignore[attr-defined]
    model(torch.ones(1, 3)).sum().backward()
