"""The conformance suite: what every method owes, as tests that a method runs by naming itself.

    from olq.testing import MethodConformance

    class TestInt8(MethodConformance):
        method = olq.get_method("int8")

It needs pytest and hypothesis (`pip install "olq[testing]"`). Weights are drawn from seeds; shapes are awkward on
purpose: one element, columns that fill no block, parts that end inside a block, no rows at all.
"""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from olq.alloc import allocate, run_audited
from olq.errors import ConfigError, CoverageError, LayoutError, NonFiniteError, SourceError
from olq.methods.base import Geometry, QuantMethod, WeightPlan, plan_of
from olq.reload.api import dequantize, initialize_layerwise_reload, load
from olq.reload.region import whole
from olq.testing.layers import RegionLayer, kernel_bytes, load_by
from olq.testing.strategies import bf16_weights, partitions

#: (parts, columns) of the weights that are tried.
SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((1,), 1),
    ((5,), 100),
    ((48, 16, 16), 33),
    ((130, 3), 160),
    ((129,), 257),
    ((17, 0, 2), 31),
    ((0,), 64),
)
_SHAPE = st.sampled_from(SHAPES)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# A suite is inherited: the same property runs for several classes, which hypothesis would call an accident.
_drawn = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


class MethodConformance:
    """Subclass it, name your method, and let pytest collect the subclass.

    Attributes:
        method: the method with the parameters that are to be checked.
    """

    method: ClassVar[QuantMethod]

    def error_bound(self, block_amax: Tensor, part_amax: Tensor) -> Tensor:
        """The largest error that this method claims for an element, to be overridden by a tighter one.

        Args:
            block_amax: float32, largest magnitude of the elements that share the element's scale.
            part_amax: float32, the same of the part of the weight.
        """
        return block_amax / 4 + part_amax * 2.0**-18

    # What is stored

    @pytest.mark.parametrize(("parts", "columns"), SHAPES)
    @pytest.mark.parametrize("lead", [(), (2,)])
    def test_the_plan_agrees_with_itself(
        self, parts: tuple[int, ...], columns: int, lead: tuple[int, ...]
    ) -> None:
        """A plan is a function of shape and dtype; units are whole blocks; parts lie in order and do not overlap."""
        plan = self._plan(parts, columns, lead)
        _check(plan == self._plan(parts, columns, lead), "two plans of one weight differ")
        _check(plan.geometry.shape == (*lead, sum(parts), columns), f"the plan is of {plan.geometry.shape}")
        _check(len(plan.kernel_starts) == len(plan.geometry.parts), "a part lacks its first kernel row")
        end = 0
        for start, rows in zip(plan.kernel_starts, plan.geometry.parts, strict=True):
            _check(start >= end, f"parts overlap: {plan.kernel_starts} for rows {plan.geometry.parts}")
            end = start + rows
        for unit, block in zip(plan.unit, plan.block, strict=True):
            _check(not unit or (block > 0 and unit % block == 0), f"unit {plan.unit}, block {plan.block}")
        _check("" in plan.tensors, 'no codes: plan.tensors lacks ""')
        for suffix, spec in plan.tensors.items():
            made = allocate(spec, device="meta", owner=suffix)
            _check((tuple(made.shape), made.dtype) == (spec.shape, spec.dtype), f"{suffix!r} is not its spec")
        _check(plan.kernel_bytes == sum(s.nbytes for s in plan.tensors.values()), "kernel_bytes is no sum")

    def test_the_tag_says_what_the_bytes_mean(self) -> None:
        """Canonical JSON that differs where bytes would be read differently."""
        tag = self._plan((8, 8), 64).tag
        facts = json.loads(tag)
        _check(
            json.dumps(facts, sort_keys=True, separators=(",", ":")) == tag, "the tag is no canonical JSON"
        )
        _check(facts.get("method") == self.method.name, "the tag does not name the method")
        others = [self._plan((8, 8), 48), self._plan((8, 12), 64), self._plan((8, 8), 64, (2,))]
        _check(tag not in {plan.tag for plan in others}, "weights of different shapes have one tag")

    def test_parameters_are_checked_and_make_the_method_again(self) -> None:
        """Unknown keys are refused; equal parameters are equal methods."""
        kind = type(self.method)
        with pytest.raises(ConfigError):
            kind(**{"no_such_parameter": 1})
        twin = kind(**self.method.params.model_dump(mode="json"))
        _check(
            twin == self.method and hash(twin) == hash(self.method), "parameters do not make an equal method"
        )
        _check(repr(twin) == repr(self.method), "equal methods look different")

    @pytest.mark.parametrize(("parts", "columns"), SHAPES)
    @pytest.mark.parametrize("lead", [(), (2,)])
    def test_every_byte_is_written_and_follows_from_the_weight(
        self, parts: tuple[int, ...], columns: int, lead: tuple[int, ...]
    ) -> None:
        """Loaded on memory with two poisons: equal bytes, padding included, and none read before it is written."""
        weight = self._weight((*lead, sum(parts), columns))

        def run() -> dict[str, Tensor]:
            layer = load_by(RegionLayer(self.method, parts, columns, lead), weight, [whole(weight.shape)])
            return {**self._tensors(layer), "decoded": dequantize(layer, dtype=torch.float32)}

        run_audited(run)

    # How it gets there

    @_drawn
    @given(data=st.data())
    def test_order_and_cut_do_not_matter(self, data: st.DataObject) -> None:
        """Any partition into arrivals, in any order, gives the bytes of one arrival."""
        parts, columns = data.draw(_SHAPE)
        lead = data.draw(st.sampled_from([(), (2,)]))
        weight = data.draw(bf16_weights((*lead, sum(parts), columns)))
        cut = data.draw(partitions(tuple(weight.shape)))
        pieces = load_by(RegionLayer(self.method, parts, columns, lead), weight, cut)
        self._same(pieces, self._load(weight, parts), "pieces, and the whole")

    @_drawn
    @given(data=st.data())
    def test_a_reload_is_a_fresh_load_at_the_same_addresses(self, data: st.DataObject) -> None:
        """No byte of the old weights is left, and no tensor has moved."""
        parts, columns = data.draw(_SHAPE)
        old, new = (data.draw(bf16_weights((sum(parts), columns))) for _ in range(2))
        layer = self._load(old, parts)
        before = {
            name: (t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in self._tensors(layer).items()
        }
        initialize_layerwise_reload(layer)
        load_by(layer, new, data.draw(partitions(tuple(new.shape))))
        after = {
            name: (t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in self._tensors(layer).items()
        }
        _check(after == before, "a reload moved or changed a tensor")
        self._same(layer, self._load(new, parts), "a reload, and a fresh load")

    @_drawn
    @given(data=st.data())
    def test_parts_are_stored_as_if_each_were_alone(self, data: st.DataObject) -> None:
        """A fused weight decodes to what its parts decode to, unless the plan makes one part of them."""
        parts, columns = data.draw(_SHAPE)
        if self._plan(parts, columns).geometry.parts != parts:
            return
        weight = data.draw(bf16_weights((sum(parts), columns)))
        alone = [_decoded(self._load(w, (len(w),))) for w in weight.split(parts)]
        _equal(_decoded(self._load(weight, parts)), torch.cat(alone), "fused, and alone")

    def test_each_matrix_of_an_expert_weight_is_stored_as_if_it_were_alone(self) -> None:
        """Leading dimensions repeat the method."""
        weight = self._weight((2, 3, 21, 70))
        experts = _decoded(self._load(weight, (16, 5)))
        for i in range(2):
            for j in range(3):
                _equal(experts[i, j], _decoded(self._load(weight[i, j], (16, 5))), f"expert {i}, {j}")

    @pytest.mark.parametrize("dtype", _DTYPES)
    def test_a_source_of_any_strides_and_dtype_gives_the_bytes_of_its_plain_copy(
        self, dtype: torch.dtype
    ) -> None:
        """Transposed, strided and expanded sources; sources of another dtype are rounded to the parameter's first."""
        parts, box = (24, 16), whole((40, 70))
        values = self._weight((40, 70)).to(dtype)
        spread = torch.full((80, 140), float("nan"), dtype=dtype)
        spread[::2, ::2] = values
        row = values[:1].expand(40, 70)
        for source in (values.t().contiguous().t(), spread[::2, ::2], row, values.double()):
            plain = source.to(dtype).contiguous()
            layer = RegionLayer(self.method, parts, 70, dtype=dtype)
            load(layer, {"weight": source})
            wanted = load_by(RegionLayer(self.method, parts, 70, dtype=dtype), plain, [box])
            self._same(layer, wanted, f"strides {source.stride()}, {source.dtype}, and a plain copy")

    # What it means

    @_drawn
    @given(data=st.data())
    def test_the_error_is_what_the_method_claims(self, data: st.DataObject) -> None:
        """No element is further off than `error_bound`; zeros stay zeros."""
        parts, columns = data.draw(_SHAPE)
        weight = data.draw(bf16_weights((sum(parts), columns)))
        layer = self._load(weight, parts)
        found, plan = _decoded(layer), plan_of(layer)
        exact = weight.float()
        bound = self.error_bound(*_amax(exact, plan))
        _check(
            bool(((found - exact).abs() <= bound).all()), "an element is further off than the method claims"
        )
        _check(bool((found[exact == 0] == 0).all()), "a zero is not stored as a zero")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_decoding_rounds_the_float32_values(self, dtype: torch.dtype) -> None:
        """Another dtype is float32, rounded once."""
        layer = self._load(self._weight((37, 100)), (37,))
        _equal(
            dequantize(layer, dtype=dtype), _decoded(layer).to(dtype), f"{dtype}, and float32 rounded to it"
        )

    @pytest.mark.parametrize("dtype", _DTYPES)
    def test_apply_is_linear_with_the_decoded_weight(self, dtype: torch.dtype) -> None:
        """Exactly: rows of the identity pick single columns, and zeros leave the bias."""
        layer, bias = self._load(self._weight((40, 70)), (24, 0, 16)), torch.randn(40).to(dtype)
        weight = dequantize(layer, dtype=dtype)
        eye = torch.eye(70, dtype=dtype).view(7, 10, 70)
        picked = self.method.apply(layer, eye)
        _check(
            picked.shape == (7, 10, 40) and picked.dtype == dtype,
            f"apply gives {picked.dtype} {picked.shape}",
        )
        _check(bool((picked.view(70, 40).t() == weight).all()), "apply is not x @ W.T")
        biased = self.method.apply(layer, torch.zeros(3, 70, dtype=dtype), bias)
        _check(bool((biased == bias).all()), "apply does not add the bias")

    # What it refuses

    @pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
    def test_a_value_that_is_not_finite_is_named_or_saturated(self, value: float) -> None:
        """An error with the coordinate; or values that are no NaN, where the method's `nonfinite` is "saturate"."""
        weight = self._weight((40, 70))
        weight[29, 41] = value
        if getattr(self.method.params, "nonfinite", "error") == "saturate":
            # The largest finite value may round to one that float32 does not have; its sign is what counts.
            stored = _decoded(self._load(weight, (24, 16)))[29, 41]
            _check(bool(stored.sign() == torch.tensor(value).nan_to_num().sign()), f"{value} became {stored}")
            return
        with pytest.raises(NonFiniteError) as caught:
            load(RegionLayer(self.method, (24, 16), 70), {"weight": weight})
        _check("weight[29, 41]" in caught.value.where, f"the error names {caught.value.where!r}")

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.int64, torch.bool])
    def test_what_is_no_weight_is_refused(self, dtype: torch.dtype) -> None:
        """Codes and integers are never taken for values; uint8 without a tag is no saved layer either."""
        with pytest.raises((SourceError, LayoutError, CoverageError)):
            load(RegionLayer(self.method, (8,), 32), {"weight": torch.zeros(8, 32, dtype=dtype)})

    # What is kept

    @pytest.mark.parametrize(("parts", "columns"), SHAPES)
    def test_a_saved_layer_loads_without_being_quantized(self, parts: tuple[int, ...], columns: int) -> None:
        """`state_dict` holds plain tensors; a layer of the same method takes them, one of another shape does not."""
        layer = self._load(self._weight((sum(parts), columns)), parts)
        state = layer.state_dict()
        _check(all(type(t) is Tensor for t in state.values()), "a state dict holds more than plain tensors")
        fresh = RegionLayer(_without_quantizer(self.method), parts, columns)
        load(fresh, state)
        self._same(fresh, layer, "a saved layer, and the layer")
        with pytest.raises(LayoutError):
            load(RegionLayer(self.method, (*parts, 3), columns), state)

    def _plan(self, parts: Sequence[int], columns: int, lead: Sequence[int] = ()) -> WeightPlan:
        return self.method.plan(Geometry(tuple(lead), tuple(parts), columns), torch.bfloat16)

    def _weight(self, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        scale = torch.randint(-9, 5, (*shape[:-1], 1), generator=generator).float().exp2()
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    def _load(self, weight: Tensor, parts: Sequence[int]) -> nn.Module:
        """A layer that was loaded in one arrival."""
        layer = RegionLayer(self.method, parts, weight.shape[-1], weight.shape[:-2])
        return load_by(layer, weight, [whole(weight.shape)])

    def _tensors(self, layer: nn.Module) -> dict[str, Tensor]:
        return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}

    def _same(self, a: nn.Module, b: nn.Module, what: str) -> None:
        found, wanted = kernel_bytes(a), kernel_bytes(b)
        _check(found.keys() == wanted.keys(), f"{what}: {sorted(found)} and {sorted(wanted)}")
        for name, data in found.items():
            differing = [
                i for i, pair in enumerate(zip(data, wanted[name], strict=True)) if len(set(pair)) > 1
            ]
            _check(
                not differing, f"{what}: {name} differs in {len(differing)} bytes, first at {differing[:5]}"
            )


def _without_quantizer(method: QuantMethod) -> QuantMethod:
    """The same method, for which quantizing is an error."""

    def quantize_(*_: Any) -> bool:
        pytest.fail("a saved layer was quantized again")

    kind = type(type(method).__name__, (type(method),), {"quantize_": quantize_})
    return kind(**method.params.model_dump())


def _decoded(layer: nn.Module) -> Tensor:
    return dequantize(layer, dtype=torch.float32)


def _amax(exact: Tensor, plan: WeightPlan) -> tuple[Tensor, Tensor]:
    """For each element of a matrix, the largest magnitude of its block and of its part."""
    block, part = torch.empty_like(exact), torch.empty_like(exact)
    for start, rows in zip(plan.geometry.starts, plan.geometry.parts, strict=True):
        height, width = plan.block[0] or max(rows, 1), plan.block[1] or plan.geometry.columns
        if rows:
            part[start : start + rows] = exact[start : start + rows].abs().max()
        for top in range(start, start + rows, height):
            for left in range(0, plan.geometry.columns, width):
                at = slice(top, min(top + height, start + rows)), slice(left, left + width)
                block[at] = exact[at].abs().max()
    return block, part


def _check(fine: bool, message: str) -> None:
    if not fine:
        pytest.fail(message)


def _equal(a: Tensor, b: Tensor, what: str) -> None:
    """Equality of values; a zero's sign counts."""
    same = (
        a.shape == b.shape
        and a.dtype == b.dtype
        and bool((a == b).all())
        and bool((a.signbit() == b.signbit()).all())
    )
    _check(same, f"{what}: values differ")
