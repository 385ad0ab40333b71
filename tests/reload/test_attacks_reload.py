"""Odd uses of partial, shadow and replayed loads: each gives the right bytes, or an error that names what is odd."""

import pytest
import torch
from torch import Tensor

import olq
from olq.errors import CoverageError
from reload.small_models import Small, as_bytes, live, places, state


def other(**options: bool) -> dict[str, Tensor]:
    """Another checkpoint of `Small`."""
    return state(Small(**options))


def saved(model: torch.nn.Module) -> dict[str, Tensor]:
    """The state of a live model, as it is saved."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# Saved codes


@pytest.mark.parametrize("shadow", [None, "device", "host"])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_codes_of_a_saved_model_load_in_place_and_beside(shadow, tie):
    model, source = (olq.prepare(Small(tie=tie)) for _ in range(2))
    before, at = as_bytes(model), places(model)
    with olq.session(model, shadow=shadow) as session:
        session.load(saved(source))
    assert as_bytes(model) == as_bytes(source) != before
    assert places(model) == at


def test_codes_of_a_saved_model_load_into_a_scope():
    model, source = live(), live()
    before, wanted = as_bytes(model), as_bytes(source)
    with olq.session(model, scope=["a"]) as session:
        session.load({name: tensor for name, tensor in saved(source).items() if name.startswith("a.")})
    for name, found in as_bytes(model).items():
        assert found == (wanted if name.startswith("a.") else before)[name], name


def test_a_commit_that_named_what_is_missing_can_be_repeated_with_saved_codes():
    model, source = live(), live()
    weights = saved(source)
    late = weights.pop("a.bias")
    session = olq.session(model).begin()
    for name, tensor in weights.items():
        session.feed(name, tensor)
    for _ in range(2):
        with pytest.raises(CoverageError, match=r"1 of 5.*\n.*a\.bias \(nothing arrived\)"):
            session.commit()
    session.feed("a.bias", late)
    session.commit()
    assert as_bytes(model) == as_bytes(source)
