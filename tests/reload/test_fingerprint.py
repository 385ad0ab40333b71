"""A fingerprint is a function of dtype, shape and elements, and of nothing else."""

import copy
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import olq
from olq.errors import LayoutError, SourceError, StateError
from olq.reload.fingerprint import Fingerprint, digest, fingerprint
from olq.testing.memory import measure_memory
from reload.engine_layers import bytes_of
from reload.plans import METHODS, method_id
from reload.small_models import Small, fresh, live, state, tensors

MODULE = sys.modules["olq.reload.fingerprint"]  # `olq.reload` is a function
DTYPES = [
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def by_hand(tensor: torch.Tensor) -> str:
    """The rule in the module's words, once more."""
    kind = str(tensor.dtype).removeprefix("torch.")
    text = f"{kind}|{list(tensor.shape)}\0".encode() + bytes_of(
        tensor.clone(memory_format=torch.contiguous_format)
    )
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def of_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (*shape, size), dtype=torch.uint8, generator=generator).view(dtype)[..., 0]


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any dtype, as any view: cut, stepped, permuted, expanded; 0-d and empty ones among them."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    tensor = of_bits(draw(st.sampled_from(DTYPES)), *shape, seed=draw(st.integers(0, 99)))
    if shape and draw(st.booleans()):
        tensor = tensor[:: draw(st.integers(1, 3))]
    if shape and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.booleans()):
        tensor = tensor.expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


@given(views(), st.sampled_from([16, 40, 64, 8 << 20]))
def test_a_digest_is_that_of_dtype_shape_and_row_major_elements_in_chunks_of_any_size(tensor, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "_CHUNK", chunk)
        assert digest(tensor) == by_hand(tensor)


def test_shape_and_dtype_are_part_of_a_digest():
    bits = of_bits(torch.uint8, 4, 6)
    same_bytes = [
        bits,
        bits.view(6, 4),
        bits.flatten(),
        bits[None],
        bits.view(torch.int8),
        bits.view(torch.int16),
    ]
    empty = [torch.empty(0, 4), torch.empty(4, 0), torch.empty(0), torch.empty(0, dtype=torch.int32)]
    assert len({digest(t) for t in [*same_bytes, *empty]}) == 10


def test_conjugate_and_negated_views_show_their_values():
    values = torch.randn(3, dtype=torch.complex64)
    assert digest(values.conj()) == digest(values.conj().resolve_conj())
    negated = torch._neg_view(torch.arange(3.0))
    assert negated.is_neg()
    assert digest(negated) == digest(negated.resolve_neg()) == digest(-torch.arange(3.0))


@given(data=st.data(), method=st.sampled_from(METHODS))
def test_a_flipped_bit_of_any_tensor_changes_that_names_digest_and_no_other(data, method):
    model = live(olq.QuantConfig(method=method[0], params=method[1]))
    names = sorted(model.state_dict())
    name = data.draw(st.sampled_from(names))
    before = fingerprint(model)
    storage = tensors(model)[name].detach().view(torch.uint8).flatten()
    byte, bit = data.draw(st.integers(0, storage.numel() - 1)), data.draw(st.integers(0, 7))
    storage[byte] ^= 1 << bit
    after = fingerprint(model)
    assert before.differences(after).different == (name,)
    assert before != after
    assert before.total != after.total
    storage[byte] ^= 1 << bit
    assert fingerprint(model) == before


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_codes_scales_and_what_they_mean_are_named_each(method):
    print_ = fingerprint(live(olq.QuantConfig(method=method[0], params=method[1])))
    scales = {"a.weight_scale", "a.weight_scale_2"} if method[0] == "nvfp4" else {"a.weight_scale"}
    assert {name for name in print_.digests if name.startswith("a.")} == {
        "a.weight",
        "a.weight_format",
        "a.bias",
        *scales,
    }


def test_weights_that_mean_something_else_differ_in_their_tag():
    weights = state(Small())
    here, there = fresh(), fresh(olq.QuantConfig(params={"granularity": "block"}))
    olq.load(here, weights)
    olq.load(there, weights)
    assert "a.weight_format" in fingerprint(here).differences(fingerprint(there)).different


@given(st.permutations(sorted(state(Small()))), st.integers(0, 99))
def test_equal_models_are_equal_whatever_the_order_and_the_past(order, seed):
    torch.manual_seed(seed)
    weights = state(Small())
    cold, warm = fresh(), live()
    olq.load(cold, weights)
    with olq.session(warm) as s:
        for name in order:
            s.feed(name, weights[name])
    assert fingerprint(warm) == fingerprint(cold)
    assert fingerprint(warm).total == fingerprint(cold).total
    assert not fingerprint(warm).differences(fingerprint(cold))


def test_a_copy_and_a_loaded_save_have_the_models_fingerprint():
    model, other = live(), fresh()
    olq.load(other, state(model))
    assert fingerprint(copy.deepcopy(model)) == fingerprint(other) == fingerprint(model)


@pytest.mark.cuda
def test_the_device_does_not_matter():
    model = live()
    here = fingerprint(model)
    assert fingerprint(model.to("cuda")) == here


def test_the_generation_stands_beside_and_does_not_count():
    model = live()
    weights = {name: t.clone() for name, t in state(Small()).items()}
    assert fingerprint(model).generation == 1
    olq.reload(model, weights)
    first = fingerprint(model)
    olq.reload(model, weights)
    second = fingerprint(model)
    assert second.generation == first.generation + 1
    assert second == first
    assert hash(second) == hash(first)


def test_tied_parameters_stand_under_each_name_and_are_read_once(monkeypatch):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    read = []
    monkeypatch.setattr(MODULE, "digest", lambda t: read.append(t) or digest(t))
    digests = fingerprint(model).digests
    assert digests["0.weight"] == digests["1.weight"] == digest(model[0].weight)
    assert len(read) == 1


def test_views_of_one_storage_that_show_other_elements_are_no_ties():
    model = nn.Module()
    whole = torch.arange(12.0).view(3, 4)
    model.register_buffer("whole", whole)
    model.register_buffer("turned", whole.view(4, 3))
    model.register_buffer("first", whole[0])
    model.register_buffer("square", whole.view(-1)[:9].view(3, 3))
    model.register_buffer("mirrored", model.square.t())
    model.register_buffer("bits", whole.view(torch.int32))
    assert len(set(fingerprint(model).digests.values())) == 6


def test_a_module_under_two_names_has_its_tensors_under_both():
    shared = nn.Linear(4, 4)
    digests = fingerprint(nn.ModuleDict({"target": shared, "draft": shared})).digests
    assert set(digests) == {"target.weight", "target.bias", "draft.weight", "draft.bias"}
    assert list(digests) == sorted(digests)


def test_what_stands_in_no_checkpoint_is_digested_on_request_and_apart():
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.arange(4.0), persistent=False)
    model.register_buffer("count", torch.tensor(3))
    model.mirror = model.weight.detach() * 2
    plain, full = fingerprint(model), fingerprint(model, derived=True)
    assert set(plain.digests) == {"weight", "bias", "count"}
    assert not plain.derived
    assert set(full.derived) == {"table", "mirror"}
    assert full == plain
    model.mirror += 1
    later = fingerprint(model, derived=True)
    assert later == full
    assert full.differences(later).derived == ("mirror",)
    assert not plain.differences(later)
    assert full.differences(later)


def test_differences_are_names():
    one = Fingerprint({"same": "0" * 32, "other": "1" * 32, "gone": "2" * 32})
    two = Fingerprint({"same": "0" * 32, "other": "3" * 32, "new": "2" * 32})
    found = one.differences(two)
    assert (found.only_here, found.only_there, found.different) == (("gone",), ("new",), ("other",))
    assert not one.differences(one)


def test_a_fingerprint_goes_through_json_and_can_not_be_changed():
    made = fingerprint(live(), derived=True)
    again = Fingerprint.from_dict(json.loads(json.dumps(made.as_dict())))
    assert again == made
    assert (again.generation, again.derived, again.total) == (made.generation, made.derived, made.total)
    with pytest.raises(TypeError, match="frozen"):
        again.digests["a.weight"] = "0" * 32


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"version": 2}, "version 2"),
        ({"digests": {"a.weight": "12"}}, "12"),
        ({"digests": None}, "None"),
        ({"generation": "7"}, "generation '7'"),
        ({"digests": {"a.weight": "0" * 32}}, "digests whose total is"),
        ({"total": "0" * 32}, "digests whose total is"),
    ],
)
def test_what_was_changed_on_its_way_is_refused(change, found):
    data = {**fingerprint(live()).as_dict(), **change}
    with pytest.raises(SourceError, match=r"can be compared") as error:
        Fingerprint.from_dict(data)
    assert found in error.value.found
    assert "unchanged" in error.value.remedy


def test_another_process_gets_the_same_digests():
    code = (
        "import torch, olq; from olq.reload.fingerprint import fingerprint; from torch import nn\n"
        "model = nn.Sequential(nn.Linear(32, 16, bias=False).bfloat16())\n"
        "model[0].weight.data.copy_(torch.arange(512.0).view(16, 32) / 7)\n"
        "print(fingerprint(olq.prepare(model)).total)"
    )
    repo = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-W", "error", "-c", code]
    runs = {subprocess.run(command, cwd=repo, capture_output=True, check=True).stdout.decode() for _ in "ab"}
    model = nn.Sequential(nn.Linear(32, 16, bias=False).bfloat16())
    model[0].weight.data.copy_(torch.arange(512.0).view(16, 32) / 7)
    assert runs == {fingerprint(olq.prepare(model)).total + "\n"}


def test_a_model_that_is_not_live_has_none():
    model = fresh()
    with pytest.raises(StateError, match="before its weights were complete"):
        fingerprint(model)
    olq.load(model, state(Small()))
    with olq.session(model) as s:
        with pytest.raises(StateError, match="before its weights were complete") as error:
            fingerprint(model)
        s.load(state(Small()))
    assert error.value.where == "a"
    assert fingerprint(model).digests


def test_a_tensor_without_memory_or_rows_is_refused_by_name():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(StateError, match="without memory") as error:
        fingerprint(model)
    assert error.value.where == "0.weight"
    holder = nn.Module()
    holder.register_buffer("thin", torch.eye(3).to_sparse())
    with pytest.raises(LayoutError, match="Only dense") as error:
        fingerprint(holder)
    assert (error.value.where, error.value.found) == ("thin", "torch.sparse_coo")


def test_large_tensors_need_memory_for_one_chunk():
    flat = torch.zeros(6 << 20)
    turned = torch.zeros(3 << 10, 2 << 10).t()
    for tensor, most in ((flat, 1 << 16), (turned, (8 << 20) + (1 << 16))):
        trace = measure_memory(lambda tensor=tensor: digest(tensor))
        assert trace.peak_bytes <= most
