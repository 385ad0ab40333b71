"""Dummy loads of quantized layers: the real path, its bytes, its memory, its shards; and reloads after them."""

import copy
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import olq
from olq.errors import ConfigError, LayoutError, StateError, UnknownNameError
from olq.numerics.random import UniformFill
from olq.reload import dummy_rules
from olq.reload.counter import CopyCounter
from olq.reload.dummy import dummy_init, dummy_init_tensor
from olq.reload.dummy_rules import Shard
from olq.reload.region import whole
from olq.testing.memory import measure_memory
from reload.plans import METHODS, RegionLayer, kernel_bytes, load_by, method_id

EACH_METHOD = pytest.mark.parametrize("method", METHODS, ids=method_id)


def make_model(method: str, params: dict[str, str], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Two linear layers, one with a bias, and a norm; ready to load."""
    with olq.meta_parameters():
        layers = nn.Sequential(
            nn.Linear(96, 80, dtype=dtype),
            nn.LayerNorm(80, dtype=dtype),
            nn.Linear(80, 24, bias=False, dtype=dtype),
        )
    return olq.prepare(layers, olq.QuantConfig(method=method, params=params))


def dummy_state(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The checkpoint that a dummy load of `make_model` stands for."""
    shapes = {"0.weight": (80, 96), "0.bias": (80,), "1.weight": (80,), "1.bias": (80,), "2.weight": (24, 80)}
    state = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    for name, tensor in state.items():
        UniformFill(-1e-3, 1e-3, 1234).fill_(tensor, name)
    return state


def other_state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randn(t.shape, generator=generator).bfloat16() for n, t in dummy_state().items()}


def places(model: nn.Module) -> dict[str, tuple[int, object, object]]:
    return {n: (p.data_ptr(), p.shape, p.stride()) for n, p in model.named_parameters()}


@EACH_METHOD
def test_a_dummy_load_has_the_bytes_of_a_load_of_its_values(method):
    loaded, dummy = make_model(*method), make_model(*method)
    olq.load(loaded, dummy_state())
    report = dummy_init(dummy)
    assert kernel_bytes(dummy) == kernel_bytes(loaded)
    assert report.tensors["0.weight"] == f"uniform between -0.001 and 0.001, quantized by {method[0]}"
    assert report.tensors["1.weight"] == "uniform between -0.001 and 0.001: floats"
    assert report.load is not None
    assert report.load.staged_peak_bytes == 0
    dummy(torch.ones(2, 96, dtype=torch.bfloat16))


@EACH_METHOD
def test_a_reload_after_a_dummy_load_equals_a_cold_load_at_the_same_addresses(method):
    cold, warm = make_model(*method), make_model(*method)
    olq.load(cold, other_state())
    dummy_init(warm)
    before = places(warm)
    olq.reload(warm, other_state())
    assert kernel_bytes(warm) == kernel_bytes(cold)
    assert places(warm) == before


@EACH_METHOD
def test_a_live_model_gets_dummy_weights_in_place(method):
    first, live = make_model(*method), make_model(*method)
    dummy_init(first)
    olq.load(live, other_state())
    before = places(live)
    dummy_init(live)
    assert kernel_bytes(live) == kernel_bytes(first)
    assert places(live) == before
    assert live.quant_generation == 2


def test_an_engines_open_layers_are_loaded_and_live_afterwards():
    layer = RegionLayer("fp8", {"granularity": "block"}, (130, 70), 100)
    olq.initialize_online_processing(layer)
    dummy_init(layer)
    source = torch.empty(200, 100, dtype=torch.bfloat16)
    UniformFill(-1e-3, 1e-3, 1234).fill_(source, "weight")
    twin = load_by(
        RegionLayer("fp8", {"granularity": "block"}, (130, 70), 100), source, [whole(source.shape)]
    )
    assert kernel_bytes(layer) == kernel_bytes(twin)
    layer.quant_method.apply(layer, torch.ones(1, 100))


def test_sources_go_through_the_counter_in_pieces_of_whole_units(monkeypatch):
    copies = []
    real = CopyCounter._copy
    monkeypatch.setattr(
        CopyCounter,
        "_copy",
        lambda self, to, source, kw: copies.append(to.shape) or real(self, to, source, kw),
    )
    monkeypatch.setattr(dummy_rules, "PIECE_ELEMENTS", 128 * 256)
    layer = RegionLayer("fp8", {"granularity": "block"}, (300, 10), 700)
    load = dummy_init(layer).load
    assert load is not None
    (weight,) = load.weights
    assert weight.direct == 310 * 700
    assert sorted(map(tuple, copies)) == sorted(
        [(rows, columns) for rows in (128, 128, 44, 10) for columns in (256, 256, 188)]
    )


@EACH_METHOD
@settings(max_examples=6)
@given(data=st.data())
def test_the_size_of_pieces_does_not_matter(method, data):
    parts = data.draw(st.sampled_from([(5,), (48, 16, 16), (130, 70, 3)]))
    columns = data.draw(st.sampled_from([1, 33, 160]))
    lead = data.draw(st.sampled_from([(), (3,)]))
    layers = []
    for elements in (1 << 18, data.draw(st.integers(1, 4000))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dummy_rules, "PIECE_ELEMENTS", elements)
            layers.append(RegionLayer(*method, parts, columns, lead))
            dummy_init(layers[-1])
    assert kernel_bytes(layers[0]) == kernel_bytes(layers[1])


@EACH_METHOD
def test_peak_memory_is_that_of_a_load_and_one_source(method):
    """The source is one piece, or the one unit that has to wait: a whole part. Fill scratch is below 2 MiB."""
    name, params = method
    rows, columns = 4096, 1024
    with olq.meta_parameters():
        model = nn.Sequential(*(nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16) for _ in range(2)))
    olq.prepare(model, olq.QuantConfig(method=name, params=params))
    unloaded = copy.deepcopy(model)
    weights = {f"{i}.weight": torch.full((rows, columns), 0.5, dtype=torch.bfloat16) for i in range(2)}
    load = measure_memory(lambda: olq.load(model, weights)).peak_bytes
    again = measure_memory(lambda: olq.load(model, weights)).peak_bytes
    whole_part = name == "nvfp4" or params.get("granularity") == "tensor"
    source = rows * columns * 2 if whole_part else 2 * dummy_rules.PIECE_ELEMENTS
    assert measure_memory(lambda: dummy_init(model)).peak_bytes <= again + source + (2 << 20)
    fresh = copy.deepcopy(unloaded)
    assert measure_memory(lambda: dummy_init(fresh)).peak_bytes <= load + source + (2 << 20)


def test_other_dtypes_bounds_and_seeds():
    model = make_model("fp8", {}, torch.float32)
    dummy_init(model, -2.0, 3.0, seed=9)
    source = torch.empty(80, 96)
    UniformFill(-2.0, 3.0, 9).fill_(source, "0.weight")
    twin = make_model("fp8", {}, torch.float32)
    olq.load(twin, {**dummy_state(torch.float32), "0.weight": source})
    assert torch.equal(model[0].weight, twin[0].weight)
    assert torch.equal(model[0].weight_scale, twin[0].weight_scale)


# Tied weights.


class Tied(nn.Module):
    """An embedding and a head that share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(32, 40, bias=False, dtype=torch.bfloat16)
        self.lm_head.weight = self.embed.weight


def test_a_quantized_head_tied_to_an_embedding_has_the_embeddings_values():
    with olq.meta_parameters():
        model = Tied()
    olq.prepare(model, olq.QuantConfig())
    report = dummy_init(model)
    assert report.tensors["lm_head.weight"] == "alias of embed.weight"
    twin = Tied()
    olq.prepare(twin, olq.QuantConfig())
    olq.load(twin, {"embed.weight": model.embed.weight.detach().clone()})
    assert kernel_bytes(model) == kernel_bytes(twin)


def test_two_quantized_layers_that_were_tied_are_filled_from_one_source():
    with olq.meta_parameters():
        model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
        model[1].weight = model[0].weight
    olq.prepare(model, olq.QuantConfig())
    assert dummy_init(model).tensors["1.weight"] == "alias of 0.weight"
    assert torch.equal(model[0].weight, model[1].weight)


# Shards.


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", [("fp8", {"granularity": "channel"}), ("mxfp8", {})], ids=method_id)
def test_ranks_get_the_rows_and_columns_of_the_unsharded_layer(ranks, method):
    shape = (64, 256)
    full = RegionLayer(*method, (64,), 256)
    dummy_init(full)
    decoded = olq.dequantize(full)
    for rank in range(ranks):
        rows, columns = shape[0] // ranks, shape[1] // ranks
        by_row = RegionLayer(*method, (rows,), 256)
        dummy_init(by_row, shards={"weight": Shard(shape, (rank * rows, 0))})
        assert torch.equal(olq.dequantize(by_row), decoded[rank * rows : (rank + 1) * rows])
        if method[0] == "mxfp8":  # blocks along a row: columns can be cut as well
            by_column = RegionLayer(*method, (64,), columns)
            dummy_init(by_column, shards={"weight": Shard(shape, (0, rank * columns))})
            assert torch.equal(olq.dequantize(by_column), decoded[:, rank * columns : (rank + 1) * columns])


def test_a_fused_layer_can_have_the_values_of_its_unfused_parts():
    fused = RegionLayer("mxfp8", {}, (8, 4), 64)
    parts = [("q_proj.weight", (32, 64), (8, 0), 0, 8), ("k_proj.weight", (16, 64), (4, 0), 8, 4)]
    dummy_init(
        fused,
        shards={"weight": [Shard(shape, at, (row, 0), (n, 64), name) for name, shape, at, row, n in parts]},
    )
    for name, shape, at, row, count in parts:
        plain = torch.empty(shape, dtype=torch.bfloat16)
        dummy_init_tensor(plain, name=name)
        twin = RegionLayer("mxfp8", {}, (count,), 64)
        load_by(twin, plain[at[0] : at[0] + count], [whole((count, 64))])
        assert torch.equal(olq.dequantize(fused)[row : row + count], olq.dequantize(twin))


@pytest.mark.parametrize(
    ("shards", "found"),
    [
        (Shard((8, 8), (5, 0)), "a box at [5, 0] of [8, 8]"),
        (Shard((8,), (0,)), "a box at [0] of [8]"),
        ([Shard((8, 8), (0, 0), extent=(2, 8))], "a box of [2, 8] at [0, 0] of [8, 8]"),
        (
            [Shard((8, 8), (0, 0), extent=(3, 8)), Shard((8, 8), (0, 0), start=(2, 0))],
            "a box of [3, 8] at [0, 0] of [8, 8]; a box from [2, 0] at [0, 0] of [8, 8]",
        ),
    ],
    ids=["outside", "other dimensions", "gap", "overlap"],
)
def test_shards_that_do_not_make_up_the_tensor_are_refused(shards, found):
    with pytest.raises(LayoutError) as caught:
        dummy_init_tensor(torch.empty(4, 8), name="w", shards=shards)
    assert str(caught.value) == (
        "These shards do not make up the tensor.\n"
        "  where:  w\n"
        f"  found:  {found}\n"
        "  need:   boxes that tile the local shape [4, 8], each inside its unsharded shape\n"
        "  remedy: give one shard for each part of a fused weight, with start and extent"
    )


def test_a_shard_of_an_unknown_name_is_refused_before_anything_is_written():
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    with pytest.raises(UnknownNameError) as caught:
        dummy_init(model, shards={"wieght": Shard((4, 4), (0, 0))})
    assert str(caught.value) == (
        "A shard belongs to no tensor of the model.\n"
        "  where:  shards of dummy_init\n"
        "  found:  'wieght'\n"
        "  need:   names of the model's 2 parameters and persistent buffers\n"
        "  remedy: use a tied parameter's first name; names are counted from the module that is passed"
    )
    assert torch.equal(model.weight, before)


# What may not happen.


def test_a_running_load_is_refused_and_goes_on():
    model = make_model("fp8", {})
    with olq.session(model) as session:
        session.feed("0.weight", dummy_state()["0.weight"])
        with pytest.raises(StateError, match="A load of this model is open already"):
            dummy_init(model)
        for name, tensor in other_state().items():
            if name != "0.weight":
                session.feed(name, tensor)


def test_an_error_leaves_a_model_that_can_be_loaded():
    model = make_model("fp8", {})
    with pytest.raises(UnknownNameError):
        dummy_init(model, shards={"none": Shard((4, 4), (0, 0))})
    with pytest.raises(StateError):
        model(torch.ones(1, 96, dtype=torch.bfloat16))
    dummy_init(model)
    model(torch.ones(1, 96, dtype=torch.bfloat16))


def test_a_rule_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError) as caught:
        dummy_init(nn.Linear(2, 2), compat="sglang")
    assert str(caught.value) == (
        "There is no such rule for dummy weights.\n"
        "  where:  compat of a dummy load\n"
        "  found:  compat='sglang'\n"
        '  need:   None, or "vllm" without shards: its values depend on the local shape\n'
        "  remedy: leave compat out for values that don't depend on device, layout and number of ranks"
    )
    with pytest.raises(ConfigError, match="compat='vllm' with shards"):
        dummy_init(nn.Linear(2, 2), compat="vllm", shards={"weight": Shard((2, 2), (0, 0))})


@pytest.mark.parametrize("compat", [None, "vllm"])
def test_the_global_random_state_is_not_touched(compat):
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    dummy_init(make_model("fp8", {}), compat=compat)
    assert torch.equal(torch.rand(3), want)


PRINT_BYTES = """
import hashlib, torch, olq
from olq.reload.dummy import dummy_init
model = torch.nn.Sequential(torch.nn.Linear(33, 7), torch.nn.Linear(7, 5))
torch.manual_seed({seed})
dummy_init(model)
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""


def test_another_process_gets_the_same_values():
    found = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", PRINT_BYTES.format(seed=seed)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    ]
    assert found[0] == found[1]
    assert len(found[0].strip()) == 64
