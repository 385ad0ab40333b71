"""Around a commit: a way back for what is derived, and who is told."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import olq
from olq.reload import derived
from olq.report import Report
from reload.small_models import as_bytes, live, places, state


class Holder:
    """A helper that captured a scale."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale.clone()


def engine() -> nn.Module:
    """A live model with a derived buffer, a plain attribute, and a hook that builds a helper."""
    model = live()
    model.mirror = torch.empty(50, 32)
    derived.derive(model, "mirror", lambda m: m.emb.weight.float())
    derived.derive(model.a, "t", lambda m: olq.dequantize(m).t())
    derived.after_load(model.b, lambda m: setattr(m, "kernel", Holder(m.weight_scale)))
    return model


def doubled(model: nn.Module) -> dict[str, Tensor]:
    full = {"emb.weight": model.emb.weight, "a.bias": model.a.bias}
    full |= {f"{n}.weight": olq.dequantize(getattr(model, n)) for n in ("a", "b", "head")}
    return {name: t.detach() * 2 for name, t in full.items()}


def test_a_snapshot_puts_bytes_back_at_their_addresses():
    model = engine()
    derived.refresh(model)
    before, at, scale = as_bytes(model), places(model), model.b.kernel.scale
    bytes_of_scale, place = scale.clone(), scale.data_ptr()
    taken = derived.snapshot(model)
    assert taken.nbytes == sum(t.numel() * t.element_size() for t in (model.mirror, model.a.t, scale))
    weights = doubled(model)
    olq.reload(model, weights)
    derived.refresh(model)
    model.mirror = torch.zeros(50, 32)  # somebody moves it on top
    assert as_bytes(model)["a.t"] != before["a.t"]
    assert not torch.equal(model.b.kernel.scale, bytes_of_scale)
    taken.restore()
    assert places(model)["a.t"] == at["a.t"]
    assert model.mirror.data_ptr() == at[".mirror"][0]
    assert {n: as_bytes(model)[n] for n in ("a.t", ".mirror")} == {n: before[n] for n in ("a.t", ".mirror")}
    assert model.b.kernel.scale.data_ptr() == place
    assert torch.equal(model.b.kernel.scale, bytes_of_scale)


def test_a_snapshot_of_a_model_without_derived_tensors_removes_what_came_after_it():
    model = engine()
    del model.mirror
    taken = derived.snapshot(model)
    derived.refresh(model)
    taken.restore()
    assert "t" not in model.a._buffers
    assert not hasattr(model, "mirror")
    assert not hasattr(model.a, "t")
    again = derived.refresh(model, set())
    assert again.refreshed == ("mirror", "a.t", "b.<lambda>()")  # as if it had never run
    assert "a.t" not in state(model)


def test_a_snapshot_is_not_changed_by_what_it_restored():
    module = nn.Linear(2, 2)
    derived.derive(module, "copy", lambda m: m.weight * 1)
    derived.refresh(module)
    taken, first = derived.snapshot(module), module.copy.clone()
    for _ in range(2):
        with torch.no_grad():
            module.weight.add_(1)
        derived.refresh(module)
        assert not torch.equal(module.copy, first)
        taken.restore()
        assert torch.equal(module.copy, first)


def test_views_of_weights_are_not_part_of_a_snapshot():
    model = nn.Sequential(nn.Linear(2, 2))
    derived.after_load(model[0], lambda m: setattr(m, "view", m.weight.detach()[:1]))
    derived.refresh(model)
    taken = derived.snapshot(model)
    assert taken.nbytes == 0
    with torch.no_grad():
        model[0].weight.fill_(7)
    taken.restore()
    assert model[0].weight.eq(7).all()


REPORT: Any = object()


def test_callbacks_run_in_the_order_of_registration_with_model_and_report():
    model, calls = nn.Linear(2, 2), []
    handles = [derived.on_commit(model, lambda m, r, i=i: calls.append((i, m, r))) for i in range(3)]
    derived.run_callbacks(model, REPORT)
    assert calls == [(i, model, REPORT) for i in range(3)]
    handles[1].remove()
    handles[1].remove()
    calls.clear()
    derived.run_callbacks(model, REPORT)
    assert [i for i, _, _ in calls] == [0, 2]
    derived.run_callbacks(nn.Linear(2, 2), REPORT)  # a model that has none


def test_one_function_registered_twice_runs_twice():
    model, calls = nn.Linear(2, 2), []

    def call(_: nn.Module, report: Report) -> None:
        calls.append(report)

    first, _ = derived.on_commit(model, call), derived.on_commit(model, call)
    derived.run_callbacks(model, REPORT)
    first.remove()
    derived.run_callbacks(model, REPORT)
    assert len(calls) == 3


def test_an_error_of_a_callback_comes_after_all_have_run_and_says_that_the_model_is_live():
    model, calls = nn.Linear(2, 2), []

    def fail(_: nn.Module, report: Report) -> None:
        raise OSError("the metrics server is gone")

    def fail_too(_: nn.Module, report: Report) -> None:
        raise ValueError("and this")

    for callback in (fail, lambda m, r: calls.append(r), fail_too, lambda m, r: calls.append(r)):
        derived.on_commit(model, callback)
    with pytest.raises(OSError, match="metrics server") as caught:
        derived.run_callbacks(model, REPORT)
    assert len(calls) == 2
    assert caught.value.__notes__ == [
        "raised by an on_commit callback of olq: the commit HAS happened and the model is live; all callbacks have run",
        "another callback raised ValueError: and this",
    ]


def test_a_callback_may_remove_itself_while_it_runs():
    model, calls = nn.Linear(2, 2), []
    handle = derived.on_commit(model, lambda m, r: (calls.append(1), handle.remove()))
    derived.on_commit(model, lambda m, r: calls.append(2))
    derived.run_callbacks(model, REPORT)
    derived.run_callbacks(model, REPORT)
    assert calls == [1, 2, 2]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_has_no_callbacks(way):
    model, calls = nn.Sequential(nn.Linear(2, 2)), []
    derived.on_commit(model, lambda m, r: calls.append(r))  # could not be pickled
    twin = way(model)
    derived.run_callbacks(twin, REPORT)
    assert calls == []
    derived.on_commit(twin, lambda m, r: calls.append("twin"))
    derived.run_callbacks(model, REPORT)
    assert calls == [REPORT]
