"""What torch does to whole models: moves, casts, copies. Before a load, during it, and on a live model."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import olq
from olq.errors import LayoutError, StateError
from reload.small_models import TOKENS, Small, as_bytes, fresh, live, places, state

CASTS = {
    "half": (nn.Module.half, torch.float16),
    "bfloat16": (nn.Module.bfloat16, torch.bfloat16),
    "float": (nn.Module.float, torch.float32),
}


def saved_by_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_by_torch,
}
HARMLESS = {
    **COPIES,
    "to cpu": lambda model: model.to("cpu"),
    "share_memory": nn.Module.share_memory,
    "no grad": lambda model: model.requires_grad_(False),
    "train": nn.Module.train,
    "zero_grad": lambda model: (model.zero_grad(), model)[1],
    "apply": lambda model: model.apply(lambda module: None),
}


def quantized(model: nn.Module) -> dict[str, bytes]:
    """Bytes of kernel tensors and tags."""
    wanted = ("a.weight", "b.weight", "head.weight")
    return {name: data for name, data in as_bytes(model).items() if name.startswith(wanted)}


@pytest.mark.parametrize(("cast", "dtype"), CASTS.values(), ids=CASTS)
def test_a_cast_before_the_load_is_a_cast_of_the_load_format(cast, dtype):
    weights = state(Small(dtype=torch.float32))
    model, wanted = cast(fresh(dtype=torch.float32)), fresh(dtype=dtype)
    assert model.a.weight.dtype == dtype
    assert model.a.weight.is_meta
    for each in (model, wanted):
        olq.load(each, weights)
    assert as_bytes(model) == as_bytes(wanted)
    assert model(TOKENS).dtype == dtype


@pytest.mark.parametrize("cast", [*(cast for cast, _ in CASTS.values()), nn.Module.double])
def test_a_cast_leaves_kernel_tensors_alone(cast):
    model, weights = live(), state(Small())
    before = quantized(model)
    kernel = {name: place for name, place in places(model).items() if name in before}
    cast(model)
    assert quantized(model) == before
    assert model(TOKENS).dtype == model.a.bias.dtype
    olq.reload(model, weights)
    wanted = live()
    olq.reload(wanted, weights)
    assert quantized(model) == quantized(wanted)
    assert {name: place for name, place in places(model).items() if name in before} == kernel


def test_a_load_format_that_no_method_takes_is_refused():
    with pytest.raises(LayoutError, match=r"a cast of the load format to torch.float64"):
        fresh().double()


def test_a_cast_while_weights_are_loaded_is_refused():
    model = fresh()
    with olq.session(model) as session:
        with pytest.raises(StateError, match=r"a cast from torch.bfloat16 to torch.float16 in an open load"):
            model.half()
        session.abort()


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_what_changes_nothing_before_the_load_changes_nothing(change):
    weights = state(Small())
    model, wanted = change(fresh()), fresh()
    olq.load(model, weights)
    olq.load(wanted, weights)
    assert as_bytes(model) == as_bytes(wanted)


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_what_changes_nothing_on_a_live_model_changes_nothing(change):
    model, weights = live(), state(Small())
    before, logits = as_bytes(model), model(TOKENS)
    model = change(model)
    assert as_bytes(model) == before
    assert torch.equal(model(TOKENS), logits)
    at = places(model)
    olq.reload(model, weights)
    wanted = live()
    olq.reload(wanted, weights)
    assert as_bytes(model) == as_bytes(wanted)
    assert places(model) == at


def test_to_empty_keeps_kernel_tensors_and_their_tags():
    model = live()
    before = quantized(model)
    assert quantized(model.to_empty(device="cpu")) == before
    loaded = fresh().to_empty(device="cpu")
    olq.load(loaded, state(Small()))
    loaded(TOKENS)


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_a_half_loaded_model_cant_be_copied(make_copy):
    model, weights = fresh(), state(Small())
    with olq.session(model) as session:
        session.feed("a.weight", weights.pop("a.weight"))
        with pytest.raises(StateError, match="can't be copied or pickled while its weights are arriving"):
            make_copy(model)
        for name, tensor in weights.items():
            session.feed(name, tensor)
    model(TOKENS)


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_a_copy_is_independent(make_copy):
    model, weights = live(), state(Small())
    before = as_bytes(model)
    twin = make_copy(model)
    olq.reload(twin, weights)
    assert as_bytes(model) == before
    assert as_bytes(twin) != before
    assert not {p[0] for p in places(model).values()} & {p[0] for p in places(twin).values()}


class Marked(nn.Parameter):
    """An engine's parameter class."""


class Engine(nn.Module):
    """A layer whose parameter has a class and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = olq.get_method("mxfp8")
        self.quant_method.create_weights(
            self, 32, (16, 8), dtype=torch.bfloat16, weight_loader=self.load_shard
        )
        self.weight.__class__ = Marked
        self.weight.shard_ids = ["q", "k"]
        self.table = torch.arange(3.0)

    def load_shard(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        self.loaded = getattr(self, "loaded", 0) + 1
        parameter.copy_(tensor)


@pytest.mark.parametrize("make_copy", [lambda model: model, *COPIES.values()], ids=["itself", *COPIES])
@pytest.mark.parametrize("loaded", [False, True])
def test_parameters_keep_class_attributes_and_loader(make_copy, loaded):
    weight = torch.randn(24, 32).bfloat16()
    model = Engine()
    if loaded:
        olq.load(model, {"weight": weight})
    model = make_copy(model)
    for round_ in range(3):
        with olq.session(model, replay=False) as session:
            parameter = dict(model.named_parameters())["weight"]
            assert isinstance(parameter, Marked)
            assert parameter.shard_ids == ["q", "k"]
            session.feed("weight", weight * round_)
    assert model.loaded == 3 + loaded
    wanted = Engine()
    olq.load(wanted, {"weight": weight * 2})
    assert as_bytes(model) == as_bytes(wanted)
