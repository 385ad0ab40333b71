"""Layers of engines whose loaders do what loaders do: fuse, shard, transform, bypass, reuse memory, come late."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import olq
from olq.errors import CoverageError, LayoutError, LoaderError
from olq.methods.state import find_state
from olq.reload.online import load_of
from reload.engine_layers import (
    OneWeight,
    OwnLoop,
    bytes_of,
    call,
    load,
    real_parameter,
    stored_bytes,
    weight,
    whole_bytes,
)
from reload.plans import METHODS, method_id

# Loaders that transform


class ThreeLoaders(nn.Module):
    """A quantized weight, and three vectors of equal size; the first is stored as -exp of what the checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = olq.get_method("fp8")
        self.quant_method.create_weights(self, 32, 16, dtype=torch.bfloat16, label="mixer")
        for name in ("A", "dt_bias", "D"):
            vector = nn.Parameter(torch.full((8,), float("nan")), requires_grad=False)
            vector.weight_loader = self.load_log if name == "A" else self.load_vector
            self.register_parameter(name, vector)

    @staticmethod
    def load_vector(parameter: Tensor, source: Tensor) -> None:
        parameter.copy_(source)

    @classmethod
    def load_log(cls, parameter: Tensor, source: Tensor) -> None:
        cls.load_vector(parameter, source)
        parameter.copy_(-torch.exp(parameter))


@pytest.mark.parametrize("order", list(itertools.permutations(["A", "dt_bias", "D"])), ids="-".join)
def test_a_composed_loader_is_not_counted_twice(order):
    layer = ThreeLoaders()
    olq.initialize_online_processing(layer)
    call(layer, weight(16, 32))
    for i, name in enumerate(order):
        with pytest.raises(CoverageError) as error:
            olq.finalize_layerwise_processing(layer)
        assert error.value.where == ", ".join(
            f"{n} (nothing arrived)" for n in ("A", "dt_bias", "D") if n in order[i:]
        )
        call(layer, torch.full((8,), float(i)), name=name)
    olq.finalize_layerwise_processing(layer)
    expected = {name: torch.full((8,), float(i)) for i, name in enumerate(order)}
    expected["A"] = -torch.exp(expected["A"])
    assert all(torch.equal(layer.get_parameter(name), value) for name, value in expected.items())


def test_a_quantized_weight_may_be_transformed_after_it_was_copied():
    def loader(p: Tensor, x: Tensor) -> None:
        p.copy_(x)
        p.copy_(-torch.exp(p.float()))

    layer = OneWeight(loader)
    real = real_parameter(layer)
    loader(real, weight(16, 32))
    assert stored_bytes(load(layer, (weight(16, 32),))) == whole_bytes(layer, real)


# Loaders that shard


class GateUp(nn.Module):
    """This rank's half of a fused gate_up; its loader is given whole tensors."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.quant_method = olq.get_method("fp8", granularity="block")
        self.quant_method.create_weights(
            self, 128, (64, 64), dtype=torch.bfloat16, weight_loader=self.load_shard, label="gate_up"
        )
        self.register_buffer("_expert_map", torch.zeros(128, dtype=torch.int32), persistent=False)

    def load_shard(self, parameter: Tensor, source: Tensor, shard: int) -> None:
        parameter.data.narrow(0, 64 * shard, 64).copy_(source.narrow(0, 64 * self.rank, 64))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_written_counts_not_what_was_offered(rank):
    gate, up = weight(128, 128), weight(128, 128, seed=1)
    layer = GateUp(rank)
    olq.initialize_online_processing(layer)
    call(layer, gate, 0)
    with pytest.raises(
        CoverageError, match=r"weight \(8192 of 16384 elements arrived; missing \[64:128, 0:128\]\)"
    ):
        olq.finalize_layerwise_processing(layer)
    call(layer, up, 1)
    olq.finalize_layerwise_processing(layer)
    mine = slice(64 * rank, 64 * rank + 64)
    assert stored_bytes(layer) == whole_bytes(layer, torch.cat([gate[mine], up[mine]]))


def test_a_buffer_that_no_checkpoint_holds_is_not_waited_for():
    layer = GateUp(0)
    olq.initialize_online_processing(layer)
    for shard in (0, 1):
        call(layer, weight(128, 128, seed=shard), shard)
    assert load_of(layer).weights["weight"].coverage.complete
    assert load_of(layer).meter.now == 0
    olq.finalize_layerwise_processing(layer)


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_experts_arrive_one_by_one_fused_or_together(method):
    name, params = method
    source = weight(4, 24, 40)

    def loader(p: Tensor, x: Tensor, expert: int | None = None, half: str = "") -> None:
        target = p if expert is None else p[expert]
        if half:
            target = target.narrow(-2, 0 if half == "w1" else 12, 12)
        target.copy_(x)

    calls = [(source[e, :12], e, "w1") for e in (2, 0)] + [(source[e, 12:], e, "w3") for e in (0, 2)]
    calls += [(source[1], 1), (source[3], 3)]
    arguments = {"method": name, "params": params, "parts": (12, 12), "columns": 40, "lead": (4,)}
    one_by_one = load(OneWeight(loader, **arguments), *calls)
    together = load(OneWeight(loader, **arguments), (source,))
    assert stored_bytes(one_by_one) == stored_bytes(together) == whole_bytes(together, source)


# Sources that don't stay


def test_a_buffer_may_be_overwritten_by_any_means_as_soon_as_the_loader_returns():
    parts = [weight(16, 32, seed=i) for i in range(6)]
    model = nn.ModuleList([OneWeight(lambda p, x: p.copy_(x)) for _ in parts])
    olq.initialize_online_processing(model)
    ring = torch.empty(16, 32, dtype=torch.bfloat16)
    for layer, part in zip(model, parts, strict=True):
        ring.view(torch.int16).numpy()[:] = part.view(torch.int16).numpy()
        call(layer, ring)
    olq.finalize_layerwise_processing(model)
    assert all(stored_bytes(m) == whole_bytes(m, part) for m, part in zip(model, parts, strict=True))


def ring_iterator(tensors: dict[str, Tensor]):
    """Yields views of one buffer that is overwritten behind torch's back."""
    ring = torch.empty(2048, dtype=torch.uint8)
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).flatten()
        ring.numpy()[: len(raw)] = raw.numpy()
        yield name, ring[: len(raw)].view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("own_loop", [True, False])
def test_an_iterator_may_reuse_one_buffer(own_loop):
    tensors = {f"layers.{i}.weight": weight(16, 32, seed=i) for i in range(5)} | {"norm": torch.arange(8.0)}
    model = OwnLoop(5)
    if not own_loop:
        model.load_weights = None
    olq.load(model, ring_iterator(tensors))
    for i, layer in enumerate(model.layers):
        assert stored_bytes(layer) == whole_bytes(layer, weight(16, 32, seed=i))
    assert model.norm.tolist() == list(range(8))


# Writes that go round the loader


def test_assigned_data_is_taken_and_addresses_stay():
    def assign(p: Tensor, x: Tensor) -> None:
        p.data = x

    layer = OneWeight(assign, bias="after")
    layer.bias.weight_loader = assign
    bias, address = layer.bias, layer.bias.data_ptr()
    olq.initialize_online_processing(layer)
    call(layer, weight(16), name="bias")
    call(layer, weight(16, 32))
    olq.finalize_layerwise_processing(layer)
    assert layer.bias is bias
    assert layer.bias.data_ptr() == address
    assert torch.equal(layer.bias, weight(16))
    assert stored_bytes(layer) == whole_bytes(layer, weight(16, 32))


def test_assigned_data_of_another_shape_or_outside_a_loader_is_refused():
    layer = OneWeight(None)
    olq.initialize_online_processing(layer)
    with pytest.raises(LoaderError, match="outside a loader"):
        layer.weight.data = weight(16, 32)
    with pytest.raises(LayoutError, match=r"shape \[3, 32\]"):
        layer.weight.data = weight(3, 32)
    call(layer, weight(16, 32))
    olq.finalize_layerwise_processing(layer)


class Assigning(nn.Module):
    """Its load_weights assigns data, and copies without a loader."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = OneWeight(None, bias="after")
        self.norm = nn.Parameter(torch.full((8,), float("nan")), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm.data = tensor.clone()
            else:
                self.get_parameter(name).data.copy_(tensor)


def test_a_loop_without_loaders_is_seen():
    model = Assigning()
    address = model.norm.data_ptr()
    tensors = {"norm": torch.arange(8.0), "layer.weight": weight(16, 32), "layer.bias": weight(16)}
    for _ in range(2):
        olq.load(model, iter(tensors.items()))
        assert model.norm.data_ptr() == address
        assert torch.equal(model.norm, torch.arange(8.0))
        assert torch.equal(model.layer.bias, weight(16))
        assert stored_bytes(model.layer) == whole_bytes(model.layer, weight(16, 32))


# Parameters that come late


@pytest.mark.parametrize("first", ["bias", "weight"])
@pytest.mark.parametrize("registered", ["before", "after", "late"])
def test_a_bias_arrives_exactly_whenever_it_is_registered_and_loaded(registered, first):
    layer = OneWeight(lambda p, x: p.copy_(x), bias=registered if registered != "late" else "")
    olq.initialize_online_processing(layer)
    if registered == "late":
        layer.add_bias(16)
        layer.bias.weight_loader = lambda p, x: p.data.copy_(x)
    sources = {"weight": weight(16, 32), "bias": (weight(16).float() + 147).bfloat16()}
    for name in sorted(sources, reverse=first == "weight"):
        call(layer, sources[name], name=name)
    olq.finalize_layerwise_processing(layer)
    assert layer.bias.dtype == torch.bfloat16
    assert torch.equal(layer.bias, sources["bias"])
    assert stored_bytes(layer) == whole_bytes(layer, sources["weight"])


@pytest.mark.parametrize("registered", ["before", "after"])
def test_a_bias_that_does_not_arrive_is_missed(registered):
    layer = OneWeight(None, bias=registered)
    olq.initialize_online_processing(layer)
    call(layer, weight(16, 32))
    with pytest.raises(CoverageError, match=r"bias \(nothing arrived\)"):
        olq.finalize_layerwise_processing(layer)
    call(layer, weight(16), name="bias")
    olq.finalize_layerwise_processing(layer)


# Sources on a device of no memory, and a default device of none


def test_loading_under_a_meta_default_device_leaves_nothing_on_meta():
    with torch.device("meta"):
        layer = OneWeight(lambda p, x: p[:].copy_(x.to(p.device)), method="nvfp4")
        olq.initialize_online_processing(layer)
        source = weight_on_cpu()
        call(layer, source)
        olq.finalize_layerwise_processing(layer)
    tensors = [
        *layer.parameters(),
        *layer.buffers(),
        *(v for v in vars(layer).values() if isinstance(v, Tensor)),
    ]
    assert not any(t.is_meta for t in tensors)
    assert stored_bytes(layer) == whole_bytes(layer, source)


def weight_on_cpu() -> Tensor:
    with torch.device("cpu"):
        return torch.linspace(-3, 3, 512, dtype=torch.bfloat16).view(16, 32)


def test_loading_in_inference_mode_makes_ordinary_tensors():
    layer = OneWeight(lambda p, x: p.copy_(x), bias="after")
    with torch.inference_mode():
        olq.initialize_online_processing(layer)
        call(layer, weight(16, 32))
        call(layer, weight(16), name="bias")
        olq.finalize_layerwise_processing(layer)
    assert not any(t.is_inference() for t in (*layer.parameters(), *layer.buffers()))
    assert stored_bytes(layer) == whole_bytes(layer, weight(16, 32))


@pytest.mark.parametrize("order", [(True, False), (False, True), (True, False, True)])
def test_calls_inside_and_outside_of_inference_mode_may_share_a_unit(order):
    layer = OneWeight(
        lambda p, x, r, c: p[r, c].copy_(x[r, c]), params={"granularity": "block"}, parts=(8, 8)
    )
    olq.initialize_online_processing(layer)
    cuts = [slice(i * 32 // len(order), (i + 1) * 32 // len(order)) for i in range(len(order))]
    for inference, columns in zip(order, cuts, strict=True):
        for rows in (slice(0, 8), slice(8, 16)):
            with torch.inference_mode(inference):
                call(layer, weight(16, 32), rows, columns)
    olq.finalize_layerwise_processing(layer)
    assert stored_bytes(layer) == whole_bytes(layer, weight(16, 32))


def test_a_source_that_requires_grad_is_not_kept_alive_by_it():
    layer = OneWeight(lambda p, x: p.copy_(x), bias="after")
    olq.initialize_online_processing(layer)
    source, bias = weight(16, 32).requires_grad_(), weight(16).requires_grad_()
    call(layer, source)
    call(layer, bias, name="bias")
    olq.finalize_layerwise_processing(layer)
    assert not any(p.requires_grad or p.grad_fn for p in layer.parameters())
    assert find_state(layer).live
    assert bytes_of(layer.bias) == bytes_of(bias)
