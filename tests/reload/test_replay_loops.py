"""Replay and a model's own load_weights: what it need not see again, and what it must."""

import numpy as np
import pytest
import torch
from torch import nn

import olq
from reload.engine_layers import OneWeight, stored_bytes, weight, whole_bytes
from reload.fused_model import Fused, sources
from reload.small_models import as_bytes


def test_a_name_that_a_loader_ignores_is_ignored_without_it():
    asked = []

    class Picky(Fused):
        def load_weights(self, weights) -> None:
            def wanted():
                for name, tensor in weights:
                    asked.append(name)
                    if name != "rotary":
                        yield name, tensor

            super().load_weights(wanted())

    model = Picky()
    for seed in (1, 2):
        asked.clear()
        report = olq.load(model, iter({"rotary": torch.ones(3), **sources(seed)}.items()))
        assert report.surplus == {"rotary": "the model's load_weights wrote nothing for it"}
    assert asked == []
    olq.load(model, iter({"rotary": torch.ones(4), **sources(3)}.items()))
    assert asked == ["rotary"], "another shape may be wanted"


LOOPS = {
    "counts names": lambda m, seen: None if len(seen) == 4 else pytest.fail(f"saw {seen} only"),
    "is content": lambda m, seen: None,
}


@pytest.mark.parametrize("kind", LOOPS)
def test_a_loop_that_only_copies_is_not_called_when_nothing_is_left_for_it(kind):
    class Counting(Fused):
        def load_weights(self, weights) -> None:
            seen = []
            super().load_weights((seen.append(name) or (name, tensor)) for name, tensor in weights)
            LOOPS[kind](self, seen)

    model = Counting()
    for seed in (1, 2, 3):
        olq.load(model, iter(sources(seed).items()))
    cold = Fused()
    olq.load(cold, iter(sources(3).items()))
    assert as_bytes(model) == as_bytes(cold)


@pytest.mark.parametrize("place", ["before", "after"])
def test_what_a_loop_does_beside_its_items_is_done_every_time(place):
    class Shifting(Fused):
        def load_weights(self, weights) -> None:
            if place == "before":
                self.norm.fill_(0)
            super().load_weights(weights)
            if place == "after":
                self.norm.add_(1)

    def loaded(model, seed):
        olq.load(model, iter([(n, t) for n, t in sources(seed).items() if n != "norm" or place == "after"]))
        return as_bytes(model)

    model = Shifting()
    for seed in (1, 2, 3):
        assert loaded(model, seed) == loaded(Shifting(), seed)


def test_a_loop_that_misses_replayed_names_is_told_why():
    class Strict(Fused):
        def load_weights(self, weights) -> None:
            seen = []
            super().load_weights((seen.append(name) or (name, tensor)) for name, tensor in weights)
            if "q" not in seen:
                raise KeyError("q")

    model = Strict()
    olq.load(model, iter(sources(1).items()))
    other = {**sources(2), "k": sources(2)["k"].float()}
    with pytest.raises(KeyError) as caught:
        olq.load(model, iter(other.items()))
    assert "needs replay=False" in caught.value.__notes__[0]
    olq.load(model, iter(other.items()), replay=False)


PAST_THE_DISPATCHER = {
    "tolist": lambda t: t.tolist()[0][0],
    "numpy": lambda t: t.view(torch.int16).numpy()[0, 0],
    "repr": lambda t: repr(t).count("-") - 20,
    "dlpack": lambda t: np.from_dlpack(t.view(torch.int16))[0, 0],
    "array": lambda t: np.asarray(t.view(torch.int16))[0, 0],
}


@pytest.mark.parametrize("way", PAST_THE_DISPATCHER)
def test_a_loader_that_looks_at_values_past_the_dispatcher_runs_every_time(way):
    layer = OneWeight(lambda p, t: p.copy_(t if PAST_THE_DISPATCHER[way](t) > 0 else t[:1].expand(16, 32)))
    for seed in range(4):
        values = weight(16, 32, seed=seed)
        with olq.session(layer) as session:
            session.feed("weight", values)
            assert session.commit().replayed == 0
        wanted = values if PAST_THE_DISPATCHER[way](values) > 0 else values[:1].expand(16, 32).contiguous()
        assert stored_bytes(layer) == whole_bytes(layer, wanted)


def test_a_loader_that_pairs_tensors_runs_for_both():
    class Pairing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant_method = olq.get_method("mxfp8")
            self.quant_method.create_weights(self, 32, 16, dtype=torch.bfloat16)

        def load_weights(self, weights) -> None:
            kept = {}
            for name, tensor in weights:
                kept[name] = tensor
                if len(kept) == 2:
                    self.weight[:8].copy_(kept["left"])
                    self.weight[8:].copy_(kept["right"])

    model = Pairing()
    for seed in (1, 2, 3):
        values = weight(16, 32, seed=seed)
        report = olq.load(model, iter([("left", values[:8].clone()), ("right", values[8:].clone())]))
        assert report.replayed == 0
        assert stored_bytes(model) == whole_bytes(model, values)
