"""`olq.activations` and its operators: every byte of the outputs, padding included, for shapes at their edges."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from numerics import cases
from olq import activations, alloc
from olq.errors import LayoutError, UnknownNameError
from oracles import activations as oracle

OPS = torch.ops.olq
GPT_OSS = {"limit": 7.0, "alpha": 1.702, "beta": 1.0}
SCALE_2 = 0.01


def scale_2_for(x):
    return torch.full(x.shape[:-2], SCALE_2, device=x.device)


def float32_of(x):
    return cases.numpy_of(x).astype(np.float32)


def want_group(y, layout, power_of_two=False):
    codes, scales = oracle.quantize_groups(y, 128, power_of_two or layout == "ue8m0_words")
    if layout == "row_major":
        return codes, scales, scales
    if layout == "mn_major":
        return codes, scales, oracle.column_storage(scales, 1.0)
    words = oracle.words(oracle.exponents(scales))
    return codes, words, oracle.column_storage(words, 0)


def want_blocks(pair, layout):
    codes, scales = pair
    if layout == "linear":
        return codes, None, scales
    return codes, None, oracle.swizzled_storage(scales)


def want_token(x):
    codes, scales = cases.fp8.quantize(float32_of(x), (1, 0))
    return codes, scales[: x.shape[0]], scales[: x.shape[0]]


FUNCTIONS = {"fp8 token": (activations.quantize_fp8_token, want_token)}
for _layout in ("row_major", "mn_major", "ue8m0_words"):
    FUNCTIONS[f"fp8 group, {_layout}"] = (
        lambda x, o=_layout: activations.quantize_fp8_group(x, scale_layout=o),
        lambda x, o=_layout: want_group(float32_of(x), o),
    )
    FUNCTIONS[f"silu, {_layout}"] = (
        lambda x, o=_layout: activations.silu_mul_quantize_fp8(
            torch.cat((x, x.flip(-1)), -1), scale_layout=o, through=torch.bfloat16, **GPT_OSS
        ),
        lambda x, o=_layout: want_group(
            oracle.silu_mul(float32_of(x), float32_of(x.flip(-1)), **GPT_OSS, through="bfloat16"), o, True
        ),
    )
for _layout in ("linear", "swizzled_128x4"):
    FUNCTIONS[f"mxfp8, {_layout}"] = (
        lambda x, o=_layout: activations.quantize_mxfp8(x, scale_layout=o),
        lambda x, o=_layout: want_blocks(cases.mxfp8.quantize(float32_of(x)), o),
    )
    FUNCTIONS[f"nvfp4, {_layout}"] = (
        lambda x, o=_layout: activations.quantize_nvfp4(x, scale_2_for(x), scale_layout=o),
        lambda x, o=_layout: want_blocks(cases.nvfp4.quantize(float32_of(x), np.float32(SCALE_2)), o),
    )
EACH = pytest.mark.parametrize("name", FUNCTIONS)


def storage(t):
    """The whole storage of a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()).cpu().numpy()


def assert_every_byte(name, x):
    run, want = FUNCTIONS[name]
    got = alloc.run_audited(lambda: run(x))
    codes, scale, whole = want(x)
    cases.assert_bytes_equal(got.codes, codes, f"{name}, codes")
    if scale is not None:
        cases.assert_bytes_equal(got.scale, scale, f"{name}, scale")
    cases.assert_bytes_equal(storage(got.scale), whole.reshape(-1), f"{name}, storage of the scale")
    cases.assert_bytes_equal(storage(got.codes), codes.reshape(-1), f"{name}, storage of the codes")


def activation(rows, columns, dtype=torch.bfloat16):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 5000 + columns))
    return (x * torch.logspace(-3, 2, max(columns, 1))[:columns]).to(dtype)


@EACH
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129])
def test_rows_at_their_edges(name, rows):
    assert_every_byte(name, activation(rows, 40))


@EACH
@pytest.mark.parametrize("columns", [0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 513, 4096])
def test_columns_at_their_edges(name, columns):
    assert_every_byte(name, activation(3, columns))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types(name, dtype):
    assert_every_byte(name, activation(5, 200, dtype))


@EACH
@settings(max_examples=15)
@given(data=st.data(), columns=st.sampled_from([7, 33, 130]))
def test_any_bits(name, data, columns):
    assert_every_byte(name, data.draw(cases.weights(3, columns)))


@EACH
def test_rows_need_not_be_contiguous(name):
    wide = activation(9, 300)
    for x in (wide[::2, 10:150], wide.t()[5:60:3], wide[:1].expand(4, 300)):
        got, want = FUNCTIONS[name][0](x), FUNCTIONS[name][0](x.contiguous())
        cases.assert_bytes_equal(got.codes, want.codes, "codes")
        cases.assert_bytes_equal(got.scale, want.scale, "scale")
        assert got.codes.is_contiguous()
        assert got.scale.stride() == want.scale.stride()


@EACH
def test_leading_dimensions_are_matrices_of_their_own(name):
    x = activation(15, 150).view(3, 5, 150)
    whole = alloc.run_audited(lambda: FUNCTIONS[name][0](x))
    for i in range(3):
        one = FUNCTIONS[name][0](x[i])
        cases.assert_bytes_equal(whole.codes[i], one.codes, "codes")
        cases.assert_bytes_equal(whole.scale[i], one.scale, "scale")
        assert whole.scale[i].stride() == one.scale.stride()


@EACH
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_data_is_an_error_and_poison_stays_in_its_group(name, value):
    x = torch.ones(3, 300)
    x[1, 200] = x[1, 99] = value  # columns 99 and 200 of 300 are each other's mirror image
    assert_every_byte(name, x)


# -- interleaving, and the operators that write into storage of the caller ------------------------------------


@pytest.mark.parametrize("layout", ["row_major", "mn_major", "ue8m0_words"])
def test_interleaved_columns_are_the_same_values_in_another_place(layout):
    halves = activation(7, 400)
    mixed = torch.stack((halves[:, :200], halves[:, 200:]), -1).view(7, 400)
    a = activations.silu_mul_quantize_fp8(halves, scale_layout=layout)
    b = activations.silu_mul_quantize_fp8(mixed, scale_layout=layout, interleaved=True)
    cases.assert_bytes_equal(a.codes, b.codes, "codes")
    cases.assert_bytes_equal(a.scale, b.scale, "scale")


@pytest.mark.parametrize("layout", ["row_major", "mn_major", "ue8m0_words"])
def test_into_storage_of_the_caller_gives_the_same_bytes(layout):
    x, gate, up = activation(7, 200), activation(7, 200), activation(8, 200)[1:]

    def fused():
        out = alloc.fp8_group_output(7, 200, scale_layout=layout, device="cpu", owner="test")
        OPS.silu_mul_quantize_fp8_(gate, up, *out)
        return out

    def words():
        out = alloc.fp8_group_output(7, 200, scale_layout="ue8m0_words", device="cpu", owner="test")
        OPS.quantize_fp8_words_(x, *out)
        return out

    for mine, theirs in (
        (fused, activations.silu_mul_quantize_fp8(torch.cat((gate, up), 1), scale_layout=layout)),
        (words, activations.quantize_fp8_group(x, scale_layout="ue8m0_words")),
    ):
        for got, want in zip(alloc.run_audited(mine), theirs, strict=True):
            cases.assert_bytes_equal(storage(got), storage(want), layout)


# -- torch.compile, fakes, grad ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # torch 2.11's compiler, of itself
@EACH
def test_one_graph_for_any_number_of_rows(name):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS[name][0], fullgraph=True, backend=counter)
    for rows in (5, 128, 130, 127):
        x = activation(rows, 300)
        torch._dynamo.mark_dynamic(x, 0)  # a graph for one number of rows only would be an error
        for got, want in zip(compiled(x), FUNCTIONS[name][0](x), strict=True):
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
            cases.assert_bytes_equal(storage(got), storage(want), f"{name}, {rows} rows")
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
@EACH
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_one_graph_for_fixed_shapes(name, rows):
    torch.compiler.reset()
    x = activation(rows, 200)
    compiled = torch.compile(FUNCTIONS[name][0], fullgraph=True, backend="eager", dynamic=False)
    for got, want in zip(compiled(x), FUNCTIONS[name][0](x), strict=True):
        cases.assert_bytes_equal(storage(got), storage(want), name)


def calls():
    x, up = activation(5, 200), activation(6, 200)[1:]
    batch = activation(10, 200).view(2, 5, 200)
    u8, s2 = torch.uint8, torch.tensor(SCALE_2)
    return {
        "quantize_fp8_token": [(x, False), (batch, True)],
        "quantize_fp8_group": [(x, "row_major"), (batch, "mn_major", 64, True), (batch, "ue8m0_words")],
        "quantize_mxfp8": [(x, "linear"), (batch, "swizzled_128x4", "EVEN")],
        "quantize_nvfp4": [(x, s2, "linear"), (batch, s2.expand(2).clone(), "swizzled_128x4")],
        "silu_mul_quantize_fp8": [
            (x, up),
            (batch, batch, "mn_major", 64, False, 7.0, 1.702, 1.0, torch.bfloat16),
        ],
        "quantize_fp8_words_": [(x, torch.zeros(5, 200, dtype=u8), torch.zeros(5, 1, dtype=torch.int32))],
        "silu_mul_quantize_fp8_": [
            (x, up, torch.zeros(5, 200, dtype=u8), torch.zeros(5, 1, dtype=torch.int32)),
            (x, up, torch.zeros(5, 200, dtype=u8), torch.zeros(5, 2), 128, False, 7.0, 1.702, 1.0),
        ],
    }


CALLS = [pytest.param(n, args, id=f"{n} {i}") for n, many in calls().items() for i, args in enumerate(many)]


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_opcheck(name, args):
    torch.library.opcheck(getattr(OPS, name).default, args)


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_fakes_have_the_form_of_the_real_thing(name, args):
    real = getattr(OPS, name)(*args)
    on_meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    fake = getattr(OPS, name)(*on_meta)
    for a, b in zip(real or (), fake or (), strict=True):
        assert b.is_meta
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@EACH
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_outputs_are_plain_tensors_without_grad(name, mode):
    x = activation(3, 200, torch.float32).requires_grad_()
    with mode():
        out = FUNCTIONS[name][0](x)
    for t in out:
        assert not t.requires_grad
        assert not t.is_inference()
        assert t._base is None
        assert t.data_ptr() % 16 == 0


# -- what is refused ------------------------------------------------------------------------------------------

X = torch.zeros(3, 40)
MISFITS = {
    "an unknown layout of groups": (
        lambda: activations.quantize_fp8_group(X, scale_layout="linear"),
        r"quantize_fp8_group can't take this scale_layout.\n"
        r"  where:  torch.ops.olq.quantize_fp8_group, argument 'scale_layout'\n"
        r"  found:  'linear'\n"
        r"  need:   one of row_major, mn_major, ue8m0_words\n",
    ),
    "an unknown layout of blocks": (
        lambda: activations.quantize_mxfp8(X, scale_layout="row_major"),
        r"found:  'row_major'\n  need:   one of linear, swizzled_128x4",
    ),
    "a group of nothing": (
        lambda: activations.quantize_fp8_group(X, group=0),
        r"argument 'group'\n  found:  0\n  need:   1 to 4096 columns",
    ),
    "integers": (
        lambda: activations.quantize_fp8_token(X.to(torch.int32)),
        r"found:  torch.int32\n  need:   torch.float32 or torch.bfloat16",
    ),
    "a vector": (
        lambda: activations.quantize_mxfp8(X[0]),
        r"found:  1 dimensions\n  need:   \[\*lead, n, k\]",
    ),
    "a scale for each row": (
        lambda: activations.quantize_nvfp4(X, torch.ones(3)),
        r"argument 'scale_2'\n  found:  shape \(3,\)\n  need:   shape \(\)",
    ),
    "a scale elsewhere": (
        lambda: activations.quantize_nvfp4(X, torch.ones((), device="meta")),
        r"argument 'scale_2'\n  found:  meta\n  need:   cpu, where 'x' is",
    ),
    "columns that have no halves": (
        lambda: activations.silu_mul_quantize_fp8(X[:, :39]),
        r"Gate and up have as many columns as each other.\n"
        r"  where:  silu_mul_quantize_fp8, argument 'gate_up'\n"
        r"  found:  shape \(3, 39\)\n"
        r"  need:   \[\*lead, M, 2 H\]\n",
    ),
    "a limit of nothing": (
        lambda: activations.silu_mul_quantize_fp8(X, limit=0.0),
        r"argument 'limit'\n  found:  0.0\n  need:   None, or a positive finite number",
    ),
    "an infinite alpha": (
        lambda: activations.silu_mul_quantize_fp8(X, alpha=math.inf),
        r"argument 'alpha'\n  found:  inf\n  need:   a finite number",
    ),
    "a NaN beta": (
        lambda: activations.silu_mul_quantize_fp8(X, beta=math.nan),
        r"argument 'beta'\n  found:  nan",
    ),
    "gate and up of two shapes": (
        lambda: OPS.silu_mul_quantize_fp8(X, X[:2]),
        r"argument 'up'\n  found:  shape \(2, 40\)\n  need:   shape \(3, 40\)",
    ),
    "words of another width": (
        lambda: OPS.quantize_fp8_words_(X, X.to(torch.uint8), torch.zeros(3, 2, dtype=torch.int32)),
        r"argument 'words'\n  found:  shape \(3, 2\)\n  need:   shape \(3, 1\)",
    ),
    "words as bytes": (
        lambda: OPS.silu_mul_quantize_fp8_(X, X, X.to(torch.uint8), torch.zeros(3, 1, dtype=torch.uint8)),
        r"argument 'scale'\n  found:  torch.uint8\n  need:   torch.int32 or torch.float32",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_misfit_is_refused_with_the_facts(misfit):
    call, text = MISFITS[misfit]
    with pytest.raises(LayoutError, match=text) as caught:
        call()
    assert str(caught.value).count("\n") == 4


def test_an_unknown_rule_is_refused():
    with pytest.raises(UnknownNameError, match=r"'ceil'[\s\S]*need:   one of RCEIL"):
        activations.quantize_mxfp8(X, rule="ceil")


@pytest.mark.cuda
@EACH
def test_cuda_gives_the_bytes_of_the_cpu(name):
    for rows, columns in ((0, 40), (1, 129), (127, 512), (129, 4096)):
        x = activation(rows, columns)
        for got, want in zip(FUNCTIONS[name][0](x.cuda()), FUNCTIONS[name][0](x), strict=True):
            assert got.stride() == want.stride()
            cases.assert_bytes_equal(got, want, f"{name}, {rows} x {columns}")
