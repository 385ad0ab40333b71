"""What hangs on weights: refreshed in place, in order, once, after a first load and after a reload alike."""

import copy
import functools
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import olq
from olq.errors import LayoutError
from olq.reload import derived
from olq.reload.attributes import find_all
from olq.reload.tree import Tree
from reload.small_models import as_bytes, places

HEADS, NOPE, VALUE, RANK = 2, 16, 32, 64


class Norm(nn.Module):
    """Multiplies by `weight + 1`, which a buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(RANK, dtype=torch.bfloat16))
        self.register_buffer("w1", torch.zeros(RANK, dtype=torch.bfloat16), persistent=False)
        derived.derive(self, "w1", Norm.plus_one)

    def plus_one(self) -> Tensor:
        return self.weight + 1


class Router(nn.Linear):
    """Stays in high precision; its kernel reads a float32 mirror, a plain attribute."""

    def __init__(self) -> None:
        super().__init__(RANK, 4, bias=False, dtype=torch.bfloat16)
        self.mirror = torch.empty(4, RANK)
        derived.derive(self, "mirror", Router.in_float32)

    def in_float32(self) -> Tensor:
        return self.weight.float()


class Kernel:
    """A helper object: one tensor of its own, one view."""

    def __init__(self, scale: Tensor, codes: Tensor) -> None:
        self.scale, self.codes, self.constants = scale.clone(), codes[:2], [scale.new_tensor([0.5]), "text"]


class Attention(nn.Module):
    """Absorbs `kv_b` into two stacks of matrices, and has a helper that captured a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.w_uk = self.w_uv = None
        self.kv_b = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False, dtype=torch.bfloat16)
        self.register_buffer("inv_freq", torch.tensor([0.0188, 3.0]), persistent=False)
        derived.after_load(self, Attention.build_kernel, reads=[(self, "w_uv")], last=True)
        derived.derive(
            self, "w_uv", functools.partial(Attention.absorbed, keys=False), reads=[self.kv_b], last=True
        )
        derived.derive(
            self, "w_uk", functools.partial(Attention.absorbed, keys=True), reads=[self.kv_b], last=True
        )

    def absorbed(self, keys: bool) -> Tensor:
        w = olq.dequantize(self.kv_b).view(HEADS, NOPE + VALUE, RANK)
        return w[:, :NOPE] if keys else w[:, NOPE:].transpose(1, 2)

    def build_kernel(self) -> None:
        self.kernel = Kernel(scale_of(self.kv_b), self.kv_b.weight)
        self.kernel_scale = float(self.kernel.scale.flatten()[0])


class Model(nn.Module):
    """All of it, and a product of the scales of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm, self.router = Norm(), Router()
        self.gate, self.up = (nn.Linear(RANK, 32, bias=False, dtype=torch.bfloat16) for _ in range(2))
        derived.derive(self, "alpha", Model.product, reads=[self.gate, self.up])

    def product(self) -> Tensor:
        return scale_of(self.gate) * scale_of(self.up)


def scale_of(layer: nn.Module) -> Tensor:
    """One number that a kernel would take: the global scale if there is one, else the first."""
    scales = layer.weight_scale_2 if hasattr(layer, "weight_scale_2") else layer.weight_scale
    return scales.flatten()[0].float()


def prepared(method: str) -> Model:
    with olq.meta_parameters():
        model = Model()
    return olq.prepare(model, olq.QuantConfig(method=method, keep=["router"]))


def checkpoint(seed: int, scale: float) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(p.shape, generator=g) * scale).bfloat16() for name, p in Model().named_parameters()
    }


A, B = checkpoint(1, 1.0), checkpoint(2, 37.0)


def load(model: Model, weights: dict[str, Tensor]) -> derived.Refreshed:
    olq.load(model, weights)
    return derived.refresh(model)


def helper_bytes(model: nn.Module) -> dict[str, bytes]:
    """Every tensor of a model, those in helper objects included, as bytes."""
    return {
        name: bytes(place.tensor.detach().contiguous().flatten().view(torch.uint8).tolist())
        for name, place in find_all(model).items()
    }


def helper_places(model: nn.Module) -> dict[str, tuple]:
    return {
        name: (p.tensor.data_ptr(), p.tensor.shape, p.tensor.stride(), p.tensor.dtype)
        for name, p in find_all(model).items()
    }


@pytest.fixture
def filled() -> Iterator[None]:
    """`torch.empty` gives NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("method", ["fp8", "mxfp8", "nvfp4"])
@pytest.mark.usefixtures("filled")
def test_a_reload_gives_the_bytes_of_a_first_load_at_the_old_addresses(method: str):
    cold, warm = prepared(method), prepared(method)
    order = load(warm, A)
    before = helper_places(warm)
    assert {"attention.w_uk", "norm.w1", "router.mirror", "alpha", "attention.kernel.scale"} < before.keys()
    aliases = {name: place.tensor.detach() for name, place in find_all(warm).items()}
    assert load(warm, B) == order == load(cold, B)
    assert helper_places(warm) == before
    assert helper_bytes(warm) == helper_bytes(cold)
    assert warm.attention.kernel_scale == cold.attention.kernel_scale
    for name, place in find_all(warm).items():
        assert torch.equal(aliases[name], place.tensor), name


def test_each_kind_has_the_values_of_the_new_weights():
    model = prepared("nvfp4")
    for weights in (A, B):
        load(model, weights)
        w = olq.dequantize(model.attention.kv_b).view(HEADS, NOPE + VALUE, RANK)
        assert torch.equal(model.attention.w_uk, w[:, :NOPE])
        assert torch.equal(model.attention.w_uv, w[:, NOPE:].transpose(1, 2))
        assert torch.equal(model.norm.w1, weights["norm.weight"] + 1)
        assert torch.equal(model.router.mirror, weights["router.weight"].float())
        assert torch.equal(model.alpha, model.gate.weight_scale_2[0] * model.up.weight_scale_2[0])
        assert torch.equal(model.attention.kernel.scale, model.attention.kv_b.weight_scale_2[0])
        assert torch.equal(model.attention.inv_freq, torch.tensor([0.0188, 3.0]))
        assert "alpha" not in model.state_dict()


def test_ten_loads_of_the_same_weights_change_nothing():
    model = prepared("fp8")
    load(model, A)
    state = helper_bytes(model), helper_places(model)
    for _ in range(10):
        load(model, A)
    assert (helper_bytes(model), helper_places(model)) == state


def test_attention_runs_last_and_what_reads_after_what_is_read():
    assert load(prepared("fp8"), A).refreshed == (
        "alpha",
        "norm.w1",
        "router.mirror",
        "attention.w_uv",
        "attention.build_kernel()",
        "attention.w_uk",
    )


def test_without_after_load_a_captured_copy_is_stale_and_a_captured_view_is_not():
    model = olq.prepare(Model(), olq.QuantConfig(method="fp8"))
    model.attention.quant_derived.clear()
    helper = Kernel(scale_of(model.gate), model.gate.weight)
    load(model, B)
    assert helper.scale != scale_of(model.gate)
    assert torch.equal(helper.codes, model.gate.weight[:2])


def test_a_view_over_a_childs_weight_sees_what_is_loaded():
    model = olq.prepare(Model(), olq.QuantConfig(method="fp8"))
    model.views = [model.norm.weight.detach()[4:], model.gate.weight.detach()[1:3]]
    load(model, B)
    assert torch.equal(model.views[0], B["norm.weight"][4:])
    assert torch.equal(model.views[1], model.gate.weight[1:3])
    assert derived.undeclared(Tree(model)) == {}


def test_what_stands_on_the_meta_device_becomes_a_buffer_with_memory_of_its_own():
    for register in ("register_buffer", "__setattr__"):
        module = nn.Linear(4, 2)
        getattr(module, register)("copy", torch.empty(2, 4, device="meta"))
        derived.derive(module, "copy", lambda m: m.weight.t())
        derived.refresh(module)
        assert module.copy.shape == (4, 2)
        assert "copy" in module._buffers
        assert "copy" not in module.state_dict()
        assert module.copy.untyped_storage().data_ptr() != module.weight.untyped_storage().data_ptr()
        assert not module.copy.requires_grad


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.float64, torch.bool, torch.float8_e4m3fn, torch.bfloat16]
)
def test_a_buffer_that_is_made_takes_any_dtype(dtype: torch.dtype):
    module = nn.Linear(4, 2)
    derived.derive(module, "copy", lambda m: (m.weight * 10).to(dtype).expand(3, 2, 4))
    derived.refresh(module)
    assert torch.equal(module.copy[2].float(), (module.weight * 10).to(dtype).float())


def test_a_parameter_that_is_derived_stays_the_same_object():
    module = nn.Linear(4, 4)
    module.twin = nn.Parameter(torch.zeros(4, 4))
    derived.derive(module, "twin", lambda m: m.weight * 2)
    twin, place = module.twin, module.twin.data_ptr()
    derived.refresh(module)
    assert module.twin is twin
    assert twin.data_ptr() == place
    assert twin.requires_grad
    assert torch.equal(twin, module.weight * 2)


def test_it_works_under_inference_mode_and_makes_ordinary_tensors():
    with torch.inference_mode():
        module = nn.Linear(4, 4)
        module.mirror = torch.empty(4, 4)
        derived.derive(module, "mirror", lambda m: m.weight * 2)
        derived.derive(module, "made", lambda m: m.weight + 1)
        derived.derive(module, "wide", lambda m: m.weight.double())
        derived.refresh(module)
    derived.refresh(module)
    assert torch.equal(module.mirror, module.weight * 2)
    assert not module.made.is_inference()
    assert not module.wide.is_inference()


def test_what_the_function_assigns_does_not_move_the_tensor():
    module = nn.Linear(4, 4)

    def absorb(m: nn.Linear) -> Tensor:
        m.absorbed = m.weight * 3
        return m.absorbed

    derived.derive(module, "absorbed", absorb)
    derived.refresh(module)
    place = module.absorbed.data_ptr()
    with torch.no_grad():
        module.weight.add_(1)
    derived.refresh(module)
    assert module.absorbed.data_ptr() == place
    assert torch.equal(module.absorbed, module.weight * 3)


def test_a_tensor_in_the_memory_of_a_weight_is_never_written():
    module = nn.Linear(4, 4)
    module.mirror = module.weight.detach().float()  # no copy: it is float32 already
    derived.derive(module, "mirror", lambda m: m.weight.float())
    derived.refresh(module)  # the same memory: nothing to do
    module.shifted = module.weight.detach()
    derived.derive(module, "shifted", lambda m: m.weight + 1)
    before = module.weight.detach().clone()
    with pytest.raises(LayoutError, match="in the memory of a weight") as caught:
        derived.refresh(module)
    assert caught.value.where == "shifted of a Linear"
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (lambda m: m.weight[:2] + 1, "torch.float32, shape [2, 4], strides [4, 1], on cpu"),
        (lambda m: (m.weight + 1).double(), "torch.float64, shape [4, 4], strides [4, 1], on cpu"),
        (lambda m: m.weight.to("meta"), "torch.float32, shape [4, 4], strides [4, 1], on meta"),
        (lambda m: 3.0, "a float"),
    ],
)
def test_another_layout_in_a_later_load_is_refused(second, found: str):
    module = nn.Sequential(nn.Linear(4, 4))
    derived.derive(module[0], "copy", lambda m: m.weight + 1)
    derived.refresh(module)
    place = module[0].copy.data_ptr()
    module[0].quant_derived[0].run = second
    with pytest.raises(LayoutError) as caught:
        derived.refresh(module)
    assert caught.value.where == "0.copy of a Linear"
    assert caught.value.found == found
    assert module[0].copy.data_ptr() == place


def test_a_tensor_whose_elements_share_a_place_is_refused():
    module = nn.Linear(4, 4)
    module.scale = torch.ones(1).expand(4)
    derived.derive(module, "scale", lambda m: m.weight[0] * 2)
    with pytest.raises(LayoutError, match="elements with a place each") as caught:
        derived.refresh(module)
    assert caught.value.found == "torch.float32, shape [4], strides [0], on cpu"


def test_strides_of_the_live_tensor_stay_whatever_the_function_returns():
    module = nn.Linear(4, 2)
    derived.derive(module, "t", lambda m: m.weight.t())
    derived.refresh(module)
    assert module.t.stride() == (1, 4)
    module.quant_derived[0].run = lambda m: m.weight.t().contiguous() + 1
    derived.refresh(module)
    assert module.t.stride() == (1, 4)
    assert torch.equal(module.t, module.weight.t() + 1)


def test_an_error_names_what_was_refreshed():
    module = nn.Sequential(nn.Linear(4, 4))
    derived.derive(module[0], "copy", lambda m: m.weight @ torch.ones(5))
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        derived.refresh(module)
    assert caught.value.__notes__ == ["olq was refreshing the derived tensor '0.copy' of a Linear"]


def test_a_tied_weight_counts_as_changed_in_both_modules():
    model = nn.ModuleDict({"emb": nn.Embedding(4, 4), "head": nn.Linear(4, 4, bias=False)})
    model.head.weight = model.emb.weight
    derived.derive(model.head, "mirror", lambda m: m.weight * 2)
    derived.refresh(model)
    with torch.no_grad():
        model.emb.weight.add_(1)
    assert derived.refresh(model, {model.emb}).refreshed == ("head.mirror",)
    assert torch.equal(model.head.mirror, model.emb.weight * 2)


def test_what_never_ran_runs_in_a_partial_refresh():
    module = nn.Linear(4, 4)
    derived.derive(module, "copy", lambda m: m.weight + 1)
    assert derived.refresh(module, set()) == derived.Refreshed(("copy",), ())
    assert derived.refresh(module, set()) == derived.Refreshed((), ("copy",))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), "save"])
def test_a_copy_of_a_model_refreshes_itself_and_not_the_original(way):
    model = prepared("nvfp4")
    order = load(model, A)
    if way == "save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = way(model)
    assert twin.quant_derived[0].reads == (twin.gate, twin.up)
    before, cold = as_bytes(model), prepared("nvfp4")
    at = places(twin)
    assert load(twin, B) == order
    load(cold, B)
    assert as_bytes(twin) == as_bytes(cold)
    assert places(twin) == at
    assert as_bytes(model) == before
