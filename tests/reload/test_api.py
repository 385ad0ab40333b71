"""Sessions, and the three calls of an engine's own loop: what is legal when, and what a failure leaves."""

import pytest
import torch
from torch import Tensor, nn

import olq
from olq.errors import ConfigError, LayoutError, LoaderError, NonFiniteError, StateError
from olq.methods.state import find_state
from reload.small_models import TOKENS, Small, as_bytes, fresh, live, places, state


def test_a_failed_reload_is_not_served_and_a_full_one_heals_it():
    model, good = live(), state(Small())
    bad = {**good, "b.weight": good["b.weight"].clone().fill_(float("inf"))}
    at = places(model)
    with pytest.raises(NonFiniteError):
        olq.reload(model, bad)
    with pytest.raises(StateError, match="called before its weights were complete"):
        model(TOKENS)
    olq.reload(model, good)
    wanted = fresh()
    olq.load(wanted, good)
    assert as_bytes(model) == as_bytes(wanted)
    assert places(model) == at


@pytest.mark.parametrize("deterministic", [False, True])  # True: torch fills `empty` with NaN
def test_five_reloads_move_nothing_and_leave_nothing(deterministic):
    checkpoints = [state(Small()), {name: -3 * t for name, t in state(Small()).items()}]
    torch.use_deterministic_algorithms(deterministic)
    try:
        model = fresh()
        olq.load(model, checkpoints[0])
        at, names = places(model), [name for name, _ in model.named_parameters()]
        for i in range(1, 6):
            report = olq.reload(model, checkpoints[i % 2])
            assert places(model) == at
            assert [name for name, _ in model.named_parameters()] == names
            assert report.generation == i + 1
            wanted = fresh()
            olq.load(wanted, checkpoints[i % 2])
            assert as_bytes(model) == as_bytes(wanted)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_session_is_used_once_and_nothing_is_served_meanwhile():
    model, weights = live(), state(Small())
    with olq.session(model) as session:
        with pytest.raises(StateError, match="called before its weights were complete"):
            model(TOKENS)
        for name, tensor in weights.items():
            session.feed(name, tensor)
        with pytest.raises(StateError, match="called before its weights were complete"):
            model(TOKENS)
        with pytest.raises(StateError, match="A load of this model is open already"):
            olq.session(model).begin()
    for call in (session.begin, session.commit, session.abort, lambda: session.feed("x", TOKENS)):
        with pytest.raises(StateError, match="found:  a session that is committed"):
            call()
    model(TOKENS)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_in_a_session_is_an_abort(error):
    model, weights = live(), state(Small())
    logits = model(TOKENS)

    def fail(*names: str) -> None:
        with olq.session(model) as session:
            for name in names:
                session.feed(name, weights[name])
            raise error

    with pytest.raises(error):
        fail()
    assert torch.equal(model(TOKENS), logits)  # nothing was written
    with pytest.raises(error):
        fail("a.weight")
    with pytest.raises(StateError):
        model(TOKENS)
    olq.reload(model, weights)
    model(TOKENS)


def test_reload_and_initialize_need_a_live_model():
    for call in (lambda m: olq.reload(m, {}), olq.initialize_layerwise_reload):
        with pytest.raises(StateError, match="needs a model that has been loaded before"):
            call(fresh())
        with pytest.raises(StateError, match=r"olq.prepare\(model, config\) first"):
            call(nn.Linear(2, 2))
    with pytest.raises(StateError, match="This layer has its weights already"):
        olq.initialize_online_processing(live())
    with pytest.raises(StateError, match="There is no open load to finish"):
        olq.finalize_layerwise_processing(live())


def test_initializing_twice_forgets_nothing():
    weight = torch.randn(16, 32).bfloat16()
    model = nn.Sequential(nn.Linear(32, 16, bias=False, dtype=torch.bfloat16))
    olq.prepare(model)
    for _ in range(2):
        olq.initialize_layerwise_reload(model)
    parameter = model[0].weight
    parameter.weight_loader(parameter, weight)
    olq.initialize_layerwise_reload(model)
    report = olq.finalize_layerwise_processing(model)
    assert report.weights[0].arrivals == 1
    assert find_state(model[0]).generation == 2


def bare_layer() -> nn.Module:
    with olq.meta_parameters():
        return olq.prepare(nn.Sequential(nn.Linear(32, 20, bias=False, dtype=torch.bfloat16)))


def given_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Memory of a kernel's own, as the plan says."""
    plan = find_state(model[0]).plans["weight"]
    return {f"0.weight{s}": torch.empty(spec.shape, dtype=spec.dtype) for s, spec in plan.tensors.items()}


def engine_load(model: nn.Module, weight: Tensor, given: dict[str, Tensor] | None = None) -> None:
    initialize = (
        olq.initialize_layerwise_reload if find_state(model[0]).live else olq.initialize_online_processing
    )
    initialize(model)
    parameter = model[0].weight
    parameter.weight_loader(parameter, weight)
    olq.finalize_layerwise_processing(model, given)


@pytest.mark.parametrize("first", [False, True])
def test_given_tensors_become_the_live_ones_and_keep_their_addresses(first):
    a, b, c = (torch.randn(20, 32).bfloat16() for _ in range(3))
    model = bare_layer()
    if not first:
        engine_load(model, a)
    given = given_tensors(model)
    engine_load(model, b, given)
    address = {name: t.data_ptr() for name, t in given.items()}
    assert {name: t.data_ptr() for name, t in model.named_parameters()} == address
    model[0].weight.is_shuffled = True  # a kernel's mark
    engine_load(model, c)
    assert {name: t.data_ptr() for name, t in model.named_parameters()} == address
    assert model[0].weight.is_shuffled
    wanted = bare_layer()
    engine_load(wanted, c)
    assert as_bytes(model) == as_bytes(wanted)
    assert all(torch.equal(t, dict(wanted.named_parameters())[name]) for name, t in given.items())


def test_a_given_tensor_that_does_not_fit_is_refused_and_the_load_goes_on():
    model, weight = bare_layer(), torch.randn(20, 32).bfloat16()
    given = given_tensors(model)
    wrong = [
        {**given, "0.weight": torch.empty(20, 32, dtype=torch.uint8)},
        {**given, "0.weight": torch.empty(32, 32, dtype=torch.float32)},
        {**given, "0.weight": torch.empty(32, 32, dtype=torch.uint8).t()},
        {**given, "0.bias": torch.empty(32)},
    ]
    olq.initialize_online_processing(model)
    model[0].weight.weight_loader(model[0].weight, weight)
    for tensors in wrong:
        with pytest.raises(LayoutError, match="A given tensor"):
            olq.finalize_layerwise_processing(model, tensors)
    olq.finalize_layerwise_processing(model, given)
    assert model[0].weight.data_ptr() == given["0.weight"].data_ptr()


def test_dequantize_says_what_it_needs():
    with pytest.raises(StateError, match="called before its weights were complete"):
        olq.dequantize(fresh().a)
    with pytest.raises(LayoutError, match="found:  quantized weights: weight"):
        olq.dequantize(live().a, "bias")
    with pytest.raises(LayoutError, match="found:  quantized weights: none"):
        olq.dequantize(nn.Linear(2, 2))
    assert olq.dequantize(live().a).dtype == torch.bfloat16


def test_a_model_that_keeps_everything_is_reloaded_like_any_other():
    """The bf16 baseline of a comparison runs through the same calls."""
    model = olq.prepare(Small(), olq.QuantConfig(method="keep"))
    at, weights = places(model), state(Small())
    report = olq.reload(model, weights)
    assert report.weights == []
    assert as_bytes(model) == as_bytes_of(weights)
    assert places(model) == at


def as_bytes_of(weights):
    """A checkpoint as bytes."""
    return {name: bytes(t.contiguous().flatten().view(torch.uint8).tolist()) for name, t in weights.items()}


@pytest.mark.parametrize("call", [olq.load, olq.reload, lambda m, w, **o: olq.session(m, **o)])
def test_an_unknown_option_is_refused_with_a_close_name(call):
    with pytest.raises(ConfigError, match=r"no such option[\s\S]*'shadw' \(did you mean 'shadow'\?\)"):
        call(live(), state(Small()), shadw="device")


def test_a_forward_says_why_it_is_not_legal():
    model = fresh()
    with pytest.raises(StateError, match="weights that were never loaded"):
        model(TOKENS)
    with olq.session(model) as session:
        with pytest.raises(StateError, match="a load that is open"):
            model(TOKENS)
        for name, tensor in state(Small()).items():
            session.feed(name, tensor)


def test_memory_that_changed_hands_outside_a_loader_is_no_arrival():
    model, weights = live(), state(Small())
    with pytest.raises(LoaderError, match=r"got other memory during a load[\s\S]*a\.bias"):
        load_without_bias_after_to_empty(model, weights)


def load_without_bias_after_to_empty(model, weights):
    """Everything but a.bias, whose memory is uninitialised by now."""
    with olq.session(model) as session:
        model.to_empty(device="cpu")
        for name, tensor in weights.items():
            if name != "a.bias":
                session.feed(name, tensor)
