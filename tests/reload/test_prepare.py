"""prepare on real modules: what is taken over, what is kept and why, and what is left as it was."""

import copy
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import olq
from olq.errors import ConfigError, CoverageError, LayoutError, NonFiniteError, StateError
from olq.reload.linear import QuantLinear
from olq.testing.memory import measure_memory
from reload.small_models import TOKENS, Small, as_bytes, fresh, live, state, tensors


def reasons(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """Why each parameter stays in high precision."""
    return {kept.name: kept.reason for kept in olq.reload(model, weights).kept}


def test_weights_with_values_are_quantized_now_and_freed_layer_by_layer():
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False, dtype=torch.bfloat16) for _ in range(6)))
    gone = [weakref.ref(layer.weight.untyped_storage()) for layer in model]
    # The result, and one layer's workspace; the weights themselves were there before.
    trace = measure_memory(lambda: olq.prepare(model) and None)
    assert not [ref for ref in gone if ref() is not None]
    assert trace.final_bytes <= 6 * (512 * 512 + 512 * 4 + 4096)
    assert trace.peak_bytes <= trace.final_bytes + 2**21
    model(torch.ones(1, 512, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["fp8", "mxfp8", "nvfp4"])
def test_quantized_now_or_while_loading_is_the_same(method, dtype):
    config = olq.QuantConfig(method=method)
    reference = Small(dtype=dtype)
    now = olq.prepare(copy.deepcopy(reference), config)
    loaded = fresh(config, dtype=dtype)
    olq.load(loaded, state(reference))
    assert as_bytes(now) == as_bytes(loaded)
    assert now(TOKENS).dtype == dtype


def test_prepare_twice_changes_nothing():
    model = live()
    before = as_bytes(model)
    assert olq.prepare(model) is model
    assert as_bytes(model) == before
    model = olq.prepare(fresh())
    olq.load(model, state(Small()))


@pytest.mark.parametrize(
    "second", [olq.QuantConfig(method="nvfp4"), olq.QuantConfig(keep=["a"]), olq.QuantConfig(method="keep")]
)
def test_another_method_for_a_prepared_layer_is_refused(second):
    model = live()
    before = as_bytes(model)
    with pytest.raises(
        ConfigError, match=r"prepared before, with another method[\s\S]*where:  a\n[\s\S]*Fp8\("
    ):
        olq.prepare(model, second)
    assert as_bytes(model) == before


def test_a_weight_that_is_not_finite_leaves_its_layer_as_it_was():
    model = Small()
    with torch.no_grad():
        model.b.weight[3, 5] = float("inf")
    weight = model.b.weight
    with pytest.raises(NonFiniteError, match=r"b.weight\[3, 5\]"):
        olq.prepare(model)
    assert type(model.b) is nn.Linear
    assert model.b.weight is weight
    with torch.no_grad():
        weight[3, 5] = 0
    olq.prepare(model)(TOKENS)


def test_a_dtype_that_can_t_be_loaded_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64))
    with pytest.raises(LayoutError, match=r"0.weight\n.*torch.float64"):
        olq.prepare(model)
    assert type(model[0]) is nn.Linear


def test_a_bare_layer_has_no_name_for_a_rule():
    with pytest.raises(ConfigError, match=r"wrap it: nn.Sequential"):
        olq.prepare(nn.Linear(4, 4))


class Doubled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Experts(nn.Module):
    """Experts as one bare parameter, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 32))
        self.router = nn.Linear(32, 4)


def test_what_is_kept_stands_in_the_report_with_its_reason_and_its_share():
    def make() -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "attention": nn.MultiheadAttention(32, 4),
                "subclass": Doubled(8, 8),
                "normed": parametrizations.weight_norm(nn.Linear(8, 8)),
                "experts": Experts(),
                "wanted": nn.Linear(8, 8),
                "emb": nn.Embedding(5, 8),
            }
        )

    report = olq.reload(olq.prepare(make(), olq.QuantConfig(keep=["wanted"])), state(make()))
    why = {kept.name: kept.reason for kept in report.kept}
    assert why["attention.in_proj_weight"] == "MultiheadAttention is no linear layer"
    assert why["attention.out_proj.weight"] == "nn.MultiheadAttention reads this weight directly"
    assert why["subclass.weight"] == "Doubled is a subclass of nn.Linear with behaviour of its own"
    assert why["experts.gate_up_proj"] == "Experts is no linear layer: a bare parameter"
    assert why["emb.weight"] == "Embedding is no linear layer"
    assert "'wanted'" in why["wanted.weight"]
    assert why["experts.router.bias"] == "no weight of the layer's method"
    assert [weight.name for weight in report.weights] == ["experts.router.weight"]
    left, whole = report.kept_bytes, report.source_bytes
    assert whole == left + 4 * 32 * 4
    assert f"MiB of full precision left unquantized ({left / whole:.0%})" in report.table()


@pytest.mark.parametrize("training", [False, True])
def test_torchs_attention_and_encoder_layers_go_on_working(training):
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ).train(training)
    x = torch.randn(2, 3, 32)
    model = nn.Sequential(encoder, nn.Linear(32, 8))
    with torch.no_grad():
        exact = encoder(x)
        olq.prepare(model)
        assert torch.equal(encoder(x), exact)  # all of it is read by fused operators, so all of it is kept
        model(x)
    assert isinstance(model[1], QuantLinear)


def test_hooks_of_a_layer_and_gradients_of_its_input_stay():
    model, seen = nn.Sequential(nn.Linear(32, 8)), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    olq.prepare(model)
    x = torch.randn(2, 32, requires_grad=True)
    model(x).sum().backward()
    assert seen == [1]
    assert torch.equal(x.grad, olq.dequantize(model[0]).sum(0).expand(2, 32)) or torch.allclose(
        x.grad, olq.dequantize(model[0]).sum(0).expand(2, 32), rtol=1e-5
    )


class Rotary(Small):
    """With a buffer that is computed and in no checkpoint, and one that is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(1.0, 5.0), persistent=False)
        self.register_buffer("running", torch.ones(3))


def test_meta_parameters_keep_buffers_real():
    with olq.meta_parameters():
        model = Rotary()
    olq.load(olq.prepare(model), state(Rotary()))
    assert model.inv_freq.tolist() == [1, 2, 3, 4]
    assert not [name for name, t in tensors(model).items() if t.is_meta]


def test_a_buffer_that_was_lost_on_meta_is_named_before_anything_is_read():
    with torch.device("meta"):
        model = Rotary()
    olq.prepare(model)
    with pytest.raises(StateError, match="non-persistent buffer on the meta device") as caught:
        olq.load(model, state(Rotary()))
    assert caught.value.where == "inv_freq"
    model.inv_freq = torch.arange(1.0, 5.0)
    olq.load(model, state(Rotary()))
    model(TOKENS)


@pytest.mark.parametrize("load", [olq.load, lambda m, w: m.load_state_dict(w)])
def test_a_persistent_buffer_that_got_memory_has_to_arrive(load):
    with torch.device("meta"):
        model = Rotary()
    olq.prepare(model).inv_freq = torch.ones(4)
    weights = state(Rotary())
    del weights["running"]
    with pytest.raises(CoverageError, match="running"):
        load(model, weights)
    with torch.no_grad():
        model.running.fill_(2.0)
    olq.load(model, weights)  # somebody has written it
    assert model.running.tolist() == [2, 2, 2]


def test_under_inference_mode_no_inference_tensor_is_left():
    weights = state(Small())
    with torch.inference_mode():
        model = fresh()
        olq.load(model, weights)
    assert not [name for name, t in tensors(model).items() if t.is_inference()]
    olq.reload(model, weights)
    with torch.inference_mode():
        olq.reload(model, weights)
        model(TOKENS)


def test_defaults_of_the_process_do_not_change_what_is_stored():
    weights, wanted = state(Small()), fresh()
    olq.load(wanted, weights)
    model = fresh()
    torch.set_default_dtype(torch.float64)
    try:
        olq.load(model, weights, measure_error=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert as_bytes(model) == as_bytes(wanted)
    for device_load in (olq.reload, lambda m, w: m.load_state_dict(w)):
        with torch.device("meta"):
            device_load(model, weights)
        assert as_bytes(model) == as_bytes(wanted)
    thread = threading.Thread(target=olq.reload, args=(model, weights))
    thread.start()
    thread.join()
    assert as_bytes(model) == as_bytes(wanted)
