"""Hooks after a load may replace what they like: addresses stay, and what can't stay is refused."""

import functools

import pytest
import torch
from torch import nn

import olq
from olq.errors import LayoutError
from olq.reload import derived
from olq.reload.attributes import find_all


def helper_places(model: nn.Module) -> dict[str, tuple]:
    """Address, shape and strides of every tensor, those in helper objects included."""
    return {
        name: (p.tensor.data_ptr(), p.tensor.shape, p.tensor.stride()) for name, p in find_all(model).items()
    }


def test_a_hook_that_replaces_tensors_leaves_them_where_they_were():
    """As engines' post-load functions do: new attributes, new helpers, new lists, partials, swapped entries."""
    module = nn.Linear(4, 4)

    def process(m: nn.Linear) -> None:
        m.packed = m.weight.t().contiguous()
        m.many = {"a": [m.weight + 1, m.weight + 2]}
        m.call = functools.partial(torch.add, other=m.weight * 5)
        m.pair = m.pair[::-1] if hasattr(m, "pair") else [torch.ones(2), torch.zeros(2)]
        m.bias = nn.Parameter(m.bias + 1)

    derived.after_load(module, process)
    derived.refresh(module)
    before, helper = helper_places(module), module.call
    with torch.no_grad():
        module.weight.mul_(2)
    derived.refresh(module)
    assert helper_places(module) == before
    assert torch.equal(module.packed, module.weight.t())
    assert torch.equal(module.many["a"][1], module.weight + 2)
    assert torch.equal(module.call.keywords["other"], module.weight * 5)
    assert module.call is not helper
    assert [t.tolist() for t in module.pair] == [[0, 0], [1, 1]]


def test_a_hook_may_not_change_a_layout_later():
    module = nn.Linear(4, 4)
    module.rows = 4

    def pack(m: nn.Linear) -> None:
        m.packed = m.weight[: m.rows].clone()

    derived.after_load(module, pack)
    derived.refresh(module)
    place = module.packed.data_ptr()
    module.rows = 2
    with pytest.raises(LayoutError, match=r"shape \[2, 4\]") as caught:
        derived.refresh(module)
    assert caught.value.where == "packed, replaced by pack()"
    assert caught.value.__notes__ == ["olq was refreshing the hook 'pack()' of a Linear"]
    assert module.packed.data_ptr() == place


def test_a_hook_that_fails_halfway_does_not_move_what_it_replaced():
    module = nn.Linear(4, 4)
    module.fails = False

    def pack(m: nn.Linear) -> None:
        m.packed = m.weight.clone()
        if m.fails:
            raise RuntimeError("out of workspace")

    derived.after_load(module, pack)
    derived.refresh(module)
    place = module.packed.data_ptr()
    module.fails = True
    with pytest.raises(RuntimeError, match="out of workspace"):
        derived.refresh(module)
    assert module.packed.data_ptr() == place
    module.fails = False
    with torch.no_grad():
        module.weight.add_(1)
    derived.refresh(module)
    assert module.packed.data_ptr() == place
    assert torch.equal(module.packed, module.weight)


def test_a_hook_may_not_turn_a_view_of_a_weight_into_a_copy():
    """The values would be written into the weight."""
    module = nn.Linear(4, 4)
    module.clones = False

    def cut(m: nn.Linear) -> None:
        m.top = (m.weight * 2)[:2] if m.clones else m.weight.detach()[:2]

    derived.after_load(module, cut)
    derived.refresh(module)
    before = module.weight.detach().clone()
    module.clones = True
    with pytest.raises(LayoutError, match="a tensor of its own where a view of a weight was"):
        derived.refresh(module)
    assert torch.equal(module.weight, before)


def test_a_hook_may_not_replace_a_tensor_in_a_tuple():
    module = nn.Linear(4, 4)
    derived.after_load(module, lambda m: setattr(m, "pair", (m.weight + 1, 2)))
    derived.refresh(module)
    with pytest.raises(LayoutError, match="keep it in a list") as caught:
        derived.refresh(module)
    assert caught.value.where == "pair[0], replaced by <lambda>()"


def test_a_hook_that_assigns_data_does_not_move_the_tensor():
    module = nn.Linear(4, 4)
    module.padded = torch.zeros(4, 6)

    def pad(m: nn.Linear) -> None:
        m.padded.data = nn.functional.pad(m.weight, (0, 2))

    derived.after_load(module, pad)
    derived.refresh(module)
    place, padded = module.padded.data_ptr(), module.padded
    with torch.no_grad():
        module.weight.add_(1)
    derived.refresh(module)
    assert module.padded is padded
    assert padded.data_ptr() == place
    assert torch.equal(padded[:, :4], module.weight)


def test_a_hook_may_not_replace_codes_by_another_layout_even_the_first_time():
    model = olq.prepare(nn.Sequential(nn.Linear(32, 16)), olq.QuantConfig(method="fp8"))

    def shuffle(m: nn.Module) -> None:
        m.weight = nn.Parameter(m.weight.view(2, 8, 32).clone(), requires_grad=False)

    derived.after_load(model[0], shuffle)
    with pytest.raises(LayoutError, match=r"shape \[2, 8, 32\]"):
        derived.refresh(model)
