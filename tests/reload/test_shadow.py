"""Shadow loads: the old model serves until the commit and after any error; the commit keeps every address."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import olq
from olq.errors import ConfigError, CoverageError, NonFiniteError, StateError
from olq.testing.memory import measure_memory
from reload.engine_layers import bytes_of
from reload.plans import METHODS, method_id
from reload.small_models import TOKENS, Small, as_bytes, live, places, state

SHADOWS = pytest.mark.parametrize("shadow", ["device", "host"])


def other() -> dict[str, torch.Tensor]:
    """Another checkpoint of `Small`."""
    return state(Small())


@SHADOWS
@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_shadow_load_equals_a_cold_one_at_the_old_addresses(method, shadow):
    name, params = method
    config, weights = olq.QuantConfig(method=name, params=params), other()
    model = live(config)
    at = places(model)
    olq.reload(model, weights, shadow=shadow)
    wanted = live(config)
    olq.load(wanted, weights)
    assert as_bytes(model) == as_bytes(wanted)
    assert places(model) == at


@SHADOWS
@settings(max_examples=15)
@given(data=st.data())
def test_the_old_model_serves_bit_for_bit_until_the_commit(shadow, data):
    weights = other()
    order = data.draw(st.permutations(sorted(weights)))
    stop = data.draw(st.integers(0, len(order)))
    model = live()
    before, logits = as_bytes(model), model(TOKENS)
    session = olq.session(model, shadow=shadow).begin()
    for name in order[:stop]:
        session.feed(name, weights[name])
        assert torch.equal(model(TOKENS), logits)
    if stop == len(order):
        session.commit()
        assert not torch.equal(model(TOKENS), logits)
        return
    session.abort()
    assert torch.equal(model(TOKENS), logits)
    assert as_bytes(model) == before


@SHADOWS
def test_an_error_in_the_middle_leaves_the_old_model_and_the_next_load_works(shadow):
    model, weights = live(), other()
    before, logits, at = as_bytes(model), model(TOKENS), places(model)
    bad = {**weights, "b.weight": torch.full((32, 48), float("nan"), dtype=torch.bfloat16)}
    with pytest.raises(NonFiniteError, match=r"b\.weight"):
        olq.reload(model, bad, shadow=shadow)
    assert as_bytes(model) == before
    assert torch.equal(model(TOKENS), logits)
    with pytest.raises(CoverageError, match=r"lacks 1 of the 5"):
        olq.reload(model, {n: w for n, w in weights.items() if n != "a.bias"}, shadow=shadow)
    assert torch.equal(model(TOKENS), logits)
    olq.reload(model, weights, shadow=shadow)
    assert places(model) == at


def test_a_derived_tensor_that_always_fails_does_not_take_the_old_model_out_of_service():
    """Out of memory, say: the old bytes are put back, not computed."""
    model, fail = live(), [False]

    def mirror(module: nn.Module) -> torch.Tensor:
        if fail[0]:
            raise MemoryError
        return olq.dequantize(module, dtype=torch.float32)

    olq.derive(model.a, "mirror", mirror)
    olq.reload(model, state(Small()))
    before, logits = as_bytes(model), model(TOKENS)
    fail[0] = True
    with pytest.raises(MemoryError):
        olq.reload(model, other(), shadow="device")
    assert as_bytes(model) == before
    assert torch.equal(model(TOKENS), logits)


def test_a_hook_that_fails_on_the_old_weights_too_is_not_served_around():
    model, fail = live(), [False]

    def hook(module: nn.Module) -> None:
        if fail[0]:
            raise ZeroDivisionError

    olq.after_load(model.b, hook)
    olq.reload(model, state(Small()))
    fail[0] = True
    with pytest.raises(ZeroDivisionError):
        olq.reload(model, other(), shadow="device")
    with pytest.raises(StateError, match="old weights whose hooks fail on them too: ZeroDivisionError"):
        model(TOKENS)
    fail[0] = False
    olq.reload(model, other())
    model(TOKENS)


@SHADOWS
def test_a_derived_tensor_that_fails_takes_the_commit_back(shadow):
    model, weights = live(), other()
    calls = []

    def mirror(module: nn.Module) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("no")
        return olq.dequantize(module, dtype=torch.float32)

    olq.derive(model.a, "mirror", mirror)
    olq.reload(model, state(Small()))
    before, logits, at = as_bytes(model), model(TOKENS), places(model)
    generation = model.quant_generation, model.a.quant_state.generation
    with pytest.raises(ZeroDivisionError):
        olq.reload(model, weights, shadow=shadow)
    assert as_bytes(model) == before
    assert places(model) == at
    assert (model.quant_generation, model.a.quant_state.generation) == generation
    assert torch.equal(model(TOKENS), logits)
    olq.reload(model, weights, shadow=shadow)
    assert torch.equal(model.a.mirror, olq.dequantize(model.a, dtype=torch.float32))
    assert places(model) == at


def test_in_place_a_derived_tensor_that_fails_leaves_a_model_that_cant_be_called():
    model, weights = live(), other()
    fail = [False]

    def mirror(module: nn.Module) -> torch.Tensor:
        if fail[0]:
            raise ZeroDivisionError("no")
        return olq.dequantize(module, dtype=torch.float32)

    olq.derive(model.a, "mirror", mirror)
    olq.reload(model, state(Small()))
    fail[0] = True
    with pytest.raises(ZeroDivisionError):
        olq.reload(model, weights)
    with pytest.raises(StateError, match=r"derived tensors could not be refreshed: ZeroDivisionError: no"):
        model(TOKENS)
    fail[0] = False
    olq.reload(model, weights)
    wanted = live()
    olq.load(wanted, weights)
    assert {n: b for n, b in as_bytes(model).items() if n != "a.mirror"} == as_bytes(wanted)


class Norms(nn.Module):
    """A quantized layer between parameters whose loader transforms in place and reads back."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = olq.get_method("fp8")
        self.quant_method.create_weights(self, 16, 16, dtype=torch.bfloat16)
        flat = torch.zeros(64, dtype=torch.bfloat16)
        self.one = nn.Parameter(flat[:16], requires_grad=False)
        self.two = nn.Parameter(flat[32:48].view(4, 4), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def load_weights(self, weights) -> None:
        """`one` is stored plus one, `two` transposed, in steps that read what they have written."""
        for name, tensor in weights:
            if name == "weight":
                self.weight.copy_(tensor)
            elif name == "one":
                self.one.data.copy_(tensor)
                self.one.data.add_(1)
            elif name == "two":
                for i in range(4):
                    self.two.data[:, i].copy_(tensor[i])
                self.two.data.mul_(self.two.data.abs().max().item())
            else:
                self.steps.fill_(tensor)


def sources(seed: int) -> dict[str, torch.Tensor]:
    """What `Norms` loads."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(16, 16, generator=draw).bfloat16(),
        "one": torch.randn(16, generator=draw).bfloat16(),
        "two": torch.randn(4, 4, generator=draw).bfloat16(),
        "steps": torch.tensor(seed),
    }


@SHADOWS
def test_loaders_that_transform_parameters_in_place_work_on_the_shadow(shadow):
    model, wanted = Norms(), Norms()
    olq.load(model, sources(1).items())
    before, at = as_bytes(model), places(model)
    with olq.session(model, shadow=shadow) as session:
        session.load(sources(2).items())
        served = {n: bytes_of(getattr(model, n)) for n in ("one", "two", "steps")}
        assert served == {n: before[n] for n in served}
    olq.load(wanted, sources(2).items())
    assert as_bytes(model) == as_bytes(wanted)
    assert places(model) == at


def test_a_shadow_needs_a_model_that_can_be_called():
    with olq.meta_parameters():
        cold = Small()
    olq.prepare(cold)
    with pytest.raises(StateError, match="A shadow load needs a model that can be called"):
        olq.load(cold, other(), shadow="device")
    with pytest.raises(ConfigError, match=r"shadow\n.*'gpu'\n.*None or 'device' or 'host'"):
        olq.session(live(), shadow="gpu")


def test_a_move_during_a_shadow_load_is_refused():
    model = live()
    session = olq.session(model, shadow="device").begin()
    with pytest.raises(StateError, match="can't be moved or cast while a shadow load"):
        model.to(torch.float16)
    session.abort()
    model.to(torch.float16)


def test_a_shadow_costs_one_more_set_of_kernel_tensors_and_gives_it_back():
    model = olq.prepare(
        nn.Sequential(*(nn.Linear(512, 512, bias=False, dtype=torch.bfloat16) for _ in range(12)))
    )
    weights = {f"{i}.weight": torch.randn(512, 512).bfloat16() for i in range(12)}
    olq.reload(model, weights)
    bytes_ = sum(p.numel() * p.element_size() for p in model.parameters())
    in_place = measure_memory(lambda: olq.reload(model, weights)).peak_bytes
    trace = measure_memory(lambda: olq.reload(model, weights, shadow="device"))
    assert bytes_ <= trace.peak_bytes <= bytes_ + in_place + (64 << 10)
    assert in_place < bytes_


def test_changes_are_counted_on_request_and_equal_a_comparison():
    weights = other()
    for shadow in (None, "device"):
        model = live()
        before = {n: t.clone() for n, t in model.state_dict().items()}
        report = olq.reload(model, weights, shadow=shadow, measure_changes=True)
        for one in report.weights:
            assert one.changed_code_bytes == int((before[one.name] != model.state_dict()[one.name]).sum())
            scales = one.name + "_scale"
            assert one.changed_scales == int((before[scales] != model.state_dict()[scales]).sum())
            assert one.changed_code_bytes
        assert "code bytes changed" in report.table()
        again = olq.reload(model, weights, shadow=shadow, measure_changes=True)
        assert [(w.changed_code_bytes, w.changed_scales) for w in again.weights] == [(0, 0)] * 3
    assert olq.reload(live(), weights).weights[0].changed_code_bytes is None


def test_hooks_see_the_old_weights_again_when_a_commit_is_taken_back():
    model = live()
    olq.after_load(model.a, lambda m: setattr(m, "largest", float(m.weight_scale.max())))
    fail = [False]

    def check(module: nn.Module) -> None:
        if fail.pop():
            raise ZeroDivisionError
        fail.append(False)

    olq.after_load(model.b, check, last=True)
    olq.reload(model, state(Small()))
    largest = model.a.largest
    fail[:] = [False, True]
    with pytest.raises(ZeroDivisionError):
        olq.reload(model, {n: w * 4 for n, w in other().items()}, shadow="device")
    assert model.a.largest == largest == float(model.a.weight_scale.max())
    model(TOKENS)


def test_nobody_has_to_load_a_derived_parameter():
    model = live()
    model.a.mirror = nn.Parameter(torch.empty(48, 32), requires_grad=False)
    model.b.register_buffer("late", torch.empty(3, device="meta"), persistent=False)
    olq.derive(model.a, "mirror", lambda m: olq.dequantize(m, dtype=torch.float32))
    olq.derive(model.b, "late", lambda m: m.weight_scale[:3].flatten().clone())
    olq.reload(model, other())
    assert torch.equal(model.a.mirror, olq.dequantize(model.a, dtype=torch.float32))
    assert torch.equal(model.b.late, model.b.weight_scale[:3].flatten())
