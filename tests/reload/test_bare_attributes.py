"""Tensors that hang on modules without being declared are found and named; what is taken care of is not."""

import functools
import types
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import olq
from olq.reload import derived
from olq.reload.tree import Tree
from reload.small_models import Small, live

BARE = (
    "a bare tensor attribute that no load writes: declare it with olq.derive if it is computed from weights"
)


class Helper:
    """A plain object, as kernels keep them."""

    def __init__(self, **fields: object) -> None:
        vars(self).update(fields)

    def call(self) -> None:
        """A bound method keeps its object alive."""


def names(model: nn.Module) -> set[str]:
    return set(derived.undeclared(Tree(model)))


def test_a_bare_tensor_is_reported_with_a_reason():
    model = live()
    model.a.mirror = torch.ones(3)
    assert derived.undeclared(Tree(model)) == {"a.mirror": BARE}


def test_tensors_are_found_in_containers_and_one_level_of_helpers():
    model = nn.Module()
    model.scales = [torch.ones(1), (torch.ones(2), {"k": torch.ones(3)})]
    model.kernel = Helper(scale=torch.ones(4), more=[torch.ones(5)], inner=Helper(scale=torch.ones(6)))
    model.kernels = {0: Helper(scale=torch.ones(7))}
    model.call = functools.partial(print, torch.ones(8), perm=torch.ones(9))
    model.method = Helper(workspace=torch.ones(10)).call
    found = derived.undeclared(Tree(model))
    assert {name: reason.split(" that ")[0] for name, reason in found.items()} == {
        "scales[0]": "a bare tensor attribute",
        "scales[1][0]": "a bare tensor attribute",
        "scales[1][1]['k']": "a bare tensor attribute",
        "kernel.scale": "a tensor in a helper object (Helper)",
        "kernel.more[0]": "a tensor in a helper object (Helper)",
        "kernels[0].scale": "a tensor in a helper object (Helper)",
        "call.args[0]": "a tensor in a helper object (functools.partial)",
        "call.perm": "a tensor in a helper object (functools.partial)",
        "method.__self__.workspace": "a tensor in a helper object (Helper)",
    }


def test_a_parameter_that_is_not_registered_is_told_from_a_tensor():
    model = nn.Module()
    model.experts = [nn.Parameter(torch.ones(2))]
    assert "nn.ParameterList" in derived.undeclared(Tree(model))["experts[0]"]


def test_a_tensor_on_the_meta_device_has_a_stronger_reason():
    model = nn.Module()
    model.table = torch.ones(2, device="meta")
    assert derived.undeclared(Tree(model))["table"].startswith(
        "a tensor on the meta device: it has no values"
    )


def test_what_is_declared_or_shows_a_weight_is_not_reported():
    model = live()
    model.mirror = model.emb.weight.detach().float()
    derived.derive(model, "mirror", lambda m: m.emb.weight.float())
    model.parts = [
        model.mirror[:2],
        model.emb.weight.detach()[1:],
        model.a.weight.detach()[:1],
        model.a.weight,
    ]
    model.load_format = list(model.a.quant_state.load_parameters.values())
    model.register_buffer("inv_freq", torch.ones(2), persistent=False)
    model.freq = model.inv_freq.view(2, 1)
    model.empty = torch.empty(0)
    model.vocabulary, model.words = {str(i): i for i in range(20_000)}, ["word"] * 20_000
    assert names(model) == set()


def test_codes_that_are_not_installed_during_a_load_are_known_too():
    model = live()
    model.view = model.a.weight.detach()[:1]
    olq.initialize_layerwise_reload(model)
    assert names(model) == set()


def test_what_a_hook_was_seen_to_write_is_taken_care_of_and_nothing_else_in_its_module():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].scale, model[0].other, model[0].workspace = torch.ones(1), torch.ones(1), torch.ones(3)

    def hook(m: nn.Linear) -> None:
        m.kernel = Helper(scale=m.weight.amax() * 2)
        m.scale = m.weight.amin().view(1)  # a new tensor
        m.workspace.zero_()  # in place

    derived.after_load(model[0], hook)
    assert names(model) == {"0.scale", "0.other", "0.workspace"}
    derived.refresh(model)
    assert names(model) == {"0.other"}


def test_a_hook_of_a_parent_takes_care_of_its_children():
    model = nn.Sequential(nn.Linear(4, 4))

    def hook(m: nn.Sequential) -> None:
        m[0].packed = m[0].weight * 2

    derived.after_load(model, hook)
    derived.refresh(model)
    place = model[0].packed.data_ptr()
    assert names(model) == set()
    derived.refresh(model)
    assert model[0].packed.data_ptr() == place


def test_one_tensor_under_many_names_is_reported_once():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    shared = Helper(workspace=torch.ones(3))
    for layer in model:
        layer.kernel = shared
    (item,) = derived.undeclared(Tree(model)).items()
    assert item[0] == "0.kernel.workspace"
    assert item[1].endswith("(the same tensor hangs in 3 other places)")


def test_the_search_enters_no_other_module_and_no_circle():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].parent_ = [model]  # not registered
    model.around = around = []
    around.append(around)
    model.helper = Helper(module=model[0], me=None, kind=Helper, package=types, function=live)
    model.helper.me = model.helper
    held = Helper(t=torch.ones(2))
    model.weak = weakref.proxy(held)
    del held  # a proxy whose object is gone raises whatever is asked of it
    model[0].found = torch.ones(1)
    assert names(model) == {"0.found"}


def test_where_the_search_stops_is_said():
    model = nn.Module()
    model.deep = [[[[[torch.ones(1)]]]]]
    model.long = [[i, "x"] for i in range(20_000)]
    model.long.append(torch.ones(1))
    found = derived.undeclared(Tree(model))
    assert found["deep[0][0][0][0]"].startswith("more nested or longer than is searched")
    assert any(name.startswith("long[9") for name in found)
    assert len(found) < 20_100


def test_what_torch_and_olq_keep_on_modules_is_no_business_of_engines():
    model = live()
    model.register_forward_hook(functools.partial(print, torch.ones(1)))
    derived.on_commit(model, functools.partial(print, torch.ones(1)))
    derived.after_load(model, functools.partial(print, torch.ones(1)))
    assert names(model) == set()


def test_sparse_tensors_are_reported_and_break_nothing():
    model = nn.Module()
    model.mask = torch.eye(3).to_sparse()
    derived.after_load(model, lambda m: None)
    for _ in range(2):
        derived.refresh(model)
    assert names(model) == {"mask"}


TREES = st.recursive(
    st.sampled_from(["tensor", 1, "word", None]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)


def grow(tree: object, depth: int = 0) -> tuple[object, int]:
    """The tree with real tensors, and how many hang in at most four containers."""
    if tree == "tensor":
        return torch.ones(1), int(depth <= 4)
    if isinstance(tree, list):
        parts = [grow(item, depth + 1) for item in tree]
        return [part for part, _ in parts], sum(count for _, count in parts)
    if isinstance(tree, dict):
        grown = {key: grow(item, depth + 1) for key, item in tree.items()}
        return {key: part for key, (part, _) in grown.items()}, sum(count for _, count in grown.values())
    return tree, 0


@given(TREES)
def test_every_tensor_in_nested_containers_is_found(tree: object):
    model = nn.Module()
    model.tree, count = grow(tree)
    found = [reason for reason in derived.undeclared(Tree(model)).values() if reason == BARE]
    assert len(found) == count


@pytest.mark.parametrize("method", ["fp8", "mxfp8", "nvfp4"])
def test_buffers_that_nobody_loads_are_kept_bit_for_bit(method: str):
    model = live(olq.QuantConfig(method=method))
    model.register_buffer("root_size", torch.tensor(0.0188), persistent=False)
    model.register_buffer("map", torch.arange(128, dtype=torch.int32), persistent=False)
    before: list[Tensor] = [model.root_size.clone(), model.map.clone()]
    place = model.root_size.data_ptr()
    other = {name: t * 3 for name, t in live_state().items()}
    olq.reload(model, other)
    derived.refresh(model)
    assert model.root_size.data_ptr() == place
    assert torch.equal(model.root_size, before[0])
    assert torch.equal(model.map, before[1])
    assert names(model) == set()


def live_state() -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in Small().named_parameters()}
