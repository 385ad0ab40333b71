"""Failures of formats and sources, by kind: odd shapes, saved files, ways in, views as sources (docs/failures.md)."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import olq
from olq.errors import LayoutError, StateError
from olq.numerics.random import UniformFill
from reload.engine_layers import OneWeight, stored_bytes, weight, whole_bytes
from reload.plans import METHODS, method_id
from reload.small_models import TOKENS, Small, as_bytes, fresh, live, places, state

EACH_METHOD = pytest.mark.parametrize("method", METHODS, ids=method_id)


def config(method: tuple[str, dict[str, str]]) -> olq.QuantConfig:
    return olq.QuantConfig(method=method[0], params=method[1])


def one_linear(rows: int, columns: int, quant: olq.QuantConfig) -> nn.Sequential:
    with olq.meta_parameters():
        model = nn.Sequential(nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16))
    return olq.prepare(model, quant)


# Shapes


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (127, 129), (64, 1024), (192, 256), (576, 2048), (4544, 128)]
)
def test_blocks_at_the_edges_are_counted_scaled_by_what_is_there_and_saved_in_logical_shape(rows, columns):
    """Widths that no block divides, or that are narrower than one, as shards of tensor-parallel layers are."""
    quant = olq.QuantConfig(params={"granularity": "block"})
    source = weight(rows, columns)
    source[:, -1] *= 64  # only in the blocks at the right edge
    model, other = one_linear(rows, columns, quant), one_linear(rows, columns, quant)
    olq.load(model, {"0.weight": source})
    scale = model[0].weight_scale
    assert scale.shape == (math.ceil(rows / 128), math.ceil(columns / 128))
    for i, row in enumerate(source.float().split(128)):
        for j, block in enumerate(row.split(128, dim=1)):
            assert scale[i, j] == block.abs().max() / 448
    decoded = olq.dequantize(model[0], dtype=torch.float32)
    assert decoded.shape == source.shape
    step = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns] * 16
    assert ((decoded - source.float()).abs() <= step * (1 + 2**-16)).all()  # half of E4M3's widest step, 32
    assert model(torch.ones(1, columns, dtype=torch.bfloat16)).shape == (1, rows)
    olq.load(other, state(model))
    assert as_bytes(other) == as_bytes(model)


# Saved files


@pytest.mark.parametrize("codes_first", [True, False])
def test_codes_and_their_scales_may_lie_in_different_files(tmp_path, codes_first):
    model, other = live(), fresh()
    saved = state(model)
    apart = {n for n in saved if n.endswith(("_scale", "_format"))}
    names = ("a.safetensors", "b.safetensors") if codes_first else ("b.safetensors", "a.safetensors")
    save_file({n: t for n, t in saved.items() if n not in apart}, tmp_path / names[0])
    save_file({n: t for n, t in saved.items() if n in apart}, tmp_path / names[1])
    olq.load(other, tmp_path)
    assert as_bytes(other) == as_bytes(model)
    assert torch.equal(other(TOKENS), model(TOKENS))


@pytest.mark.parametrize("method", ["mxfp8", "nvfp4"])
def test_scales_saved_in_a_kernels_order_are_never_read_as_plain_rows(method):
    """The same shape both ways (128 rows of four blocks and more), so that only the tag can tell."""
    swizzled = olq.QuantConfig(method=method, params={"scale_layout": "swizzled_128x4"})
    plain = olq.QuantConfig(method=method)
    source = {"0.weight": weight(128, 128) * torch.rand(128, 128).exp2().bfloat16()}
    model, same, linear = (one_linear(128, 128, quant) for quant in (swizzled, swizzled, plain))
    olq.load(model, source)
    saved = state(model)
    olq.load(linear, source)
    wanted = as_bytes(linear)
    assert saved["0.weight_scale"].numel() == linear[0].weight_scale.numel()
    assert not torch.equal(saved["0.weight_scale"].flatten(), linear[0].weight_scale.flatten())
    with pytest.raises(LayoutError, match=r"swizzled_128x4"):
        olq.load(
            linear, {**saved, "0.weight_scale": saved["0.weight_scale"].view(linear[0].weight_scale.shape)}
        )
    assert as_bytes(linear) == wanted
    olq.load(same, saved)
    assert as_bytes(same) == as_bytes(model)


@EACH_METHOD
def test_what_is_saved_is_as_small_as_the_report_says(method, tmp_path):
    model = one_linear(512, 512, config(method))
    report = olq.load(model, {"0.weight": weight(512, 512)})
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["0.weight"].dtype == torch.uint8
    assert sum(t.nbytes for n, t in saved.items() if not n.endswith("_format")) == report.kernel_bytes
    assert (tmp_path / "model.safetensors").stat().st_size < report.kernel_bytes + 2048
    assert report.kernel_bytes < 0.6 * 512 * 512 * 2


# Sources


class Fused(nn.Module):
    """q, k and v in one weight; its loop finds them by name, in whatever file they are."""

    def __init__(self, method: tuple[str, dict[str, str]]) -> None:
        super().__init__()
        self.qkv = OneWeight(
            self.load_part, method=method[0], params=method[1], parts=(48, 16, 16), columns=64
        )

    @staticmethod
    def load_part(parameter: Tensor, source: Tensor, part: str) -> None:
        start, rows = {"q": (0, 48), "k": (48, 16), "v": (64, 16)}[part]
        parameter[start : start + rows].copy_(source)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.qkv.weight.weight_loader(self.qkv.weight, tensor, name[0])


@EACH_METHOD
@pytest.mark.parametrize("files", [("qkv",), ("qk", "v"), ("v", "kq"), ("q", "v", "k")])
def test_parts_of_one_weight_may_lie_in_different_files(method, files, tmp_path):
    whole = weight(80, 64)
    parts = dict(zip("qkv", whole.split((48, 16, 16)), strict=True))
    parts["v"] = parts["v"] * 37  # what a common scale has to hear of
    for i, names in enumerate(files):
        tensors = {f"{n}.weight": parts[n].contiguous() for n in names}
        save_file(tensors, tmp_path / f"{i}.safetensors")
    model = Fused(method)
    olq.load(model, tmp_path)
    alone = OneWeight(None, method=method[0], params=method[1], parts=(48, 16, 16), columns=64)
    assert stored_bytes(model.qkv) == whole_bytes(alone, torch.cat(list(parts.values())))


@EACH_METHOD
def test_sources_that_are_views_of_one_storage_and_overlap_give_the_bytes_of_their_copies(method):
    """A trainer sends views of its own fused tensor: cut, stepped, transposed, expanded, one inside the other."""
    base = weight(160, 160)
    views = {
        "q": base[10:58, 5:69],
        "k": base[20:36, 6:134:2],
        "v": base.t()[20:36, 3:67],
    }
    viewed, copied = Fused(method), Fused(method)
    olq.load(copied, [(n, t.contiguous().clone()) for n, t in views.items()])
    olq.load(viewed, list(views.items()))
    assert stored_bytes(viewed.qkv) == stored_bytes(copied.qkv)
    at = places(viewed)
    olq.load(viewed, [("q", base[0, :64].expand(48, 64)), *list(views.items())[1:]])
    assert places(viewed) == at
    olq.load(copied, [("q", base[0, :64].repeat(48, 1)), *list(views.items())[1:]])
    assert stored_bytes(viewed.qkv) == stored_bytes(copied.qkv)
    assert torch.equal(base, weight(160, 160))


# Ways in


def by_feed(model: nn.Module, weights: dict[str, Tensor]) -> olq.Report:
    with olq.session(model) as session:
        for name, tensor in weights.items():
            session.feed(name, tensor)
        return session.commit()


def by_engine_loop(model: nn.Module, weights: dict[str, Tensor]) -> olq.Report:
    olq.initialize_online_processing(model)
    for name, tensor in weights.items():
        parameter = model.get_parameter(name)
        loader = getattr(parameter, "weight_loader", None)
        loader(parameter, tensor) if loader else parameter.data.copy_(tensor)
    return olq.finalize_layerwise_processing(model)


def by_file(model: nn.Module, weights: dict[str, Tensor], folder: Path) -> olq.Report:
    save_file(weights, folder / "model.safetensors")
    return olq.load(model, folder)


@EACH_METHOD
def test_every_way_in_makes_the_same_decisions_and_the_same_bytes(method, tmp_path):
    quant = config(method).model_copy(update={"keep": ("b",)})
    weights = state(Small())
    for name, tensor in weights.items():
        UniformFill(-1e-3, 1e-3, 1234).fill_(tensor, name)
    ways = {
        "mapping": lambda m: olq.load(m, weights),
        "iterator": lambda m: olq.load(m, iter(weights.items())),
        "files": lambda m: by_file(m, weights, tmp_path),
        "feed": lambda m: by_feed(m, weights),
        "the engine's loop": lambda m: by_engine_loop(m, weights),
        "load_state_dict": lambda m: m.load_state_dict(weights) and None,
        "dummy": lambda m: olq.dummy_init(m).load,
    }
    found, decided = {}, {}
    for way, call in ways.items():
        model = fresh(quant)
        report = call(model)
        found[way] = as_bytes(model)
        decided[way] = {w.name: (w.method, w.reason) for w in report.weights} if report else None
    real = Small()
    real.load_state_dict(weights)
    found["prepare"] = as_bytes(olq.prepare(real, quant))
    assert [way for way, one in found.items() if one != found["mapping"]] == []
    assert [way for way, one in decided.items() if one not in (decided["mapping"], None)] == []
    assert set(decided["mapping"]) == {"a.weight", "head.weight"}


NEED_A_SCHEME = [
    olq.reload,
    lambda model, _: olq.initialize_layerwise_reload(model),
    lambda model, _: olq.finalize_layerwise_processing(model),
]


@pytest.mark.parametrize("call", NEED_A_SCHEME)
def test_a_way_in_without_a_scheme_says_so(call):
    with pytest.raises(StateError, match=r"without quantized layers|none at all"):
        call(Small(), state(Small()))


# Ties


def test_a_quantized_head_leaves_the_embedding_that_it_was_tied_to_as_it_is():
    whole = Small(tie=True)
    weights = state(whole)
    for keep, tied in (((), False), (("head",), True)):
        model = fresh(olq.QuantConfig(keep=keep), tie=True)
        report = olq.load(model, weights)
        assert torch.equal(model.emb.weight, whole.emb.weight)
        assert model.emb.weight.dtype == torch.bfloat16
        assert (model.head.weight is model.emb.weight) == tied
        line = "alias: head.weight takes what arrives for emb.weight"
        line += "" if tied else ", quantized apart from it"
        assert line in report.table().splitlines()
        assert report.aliases == {"head.weight": "emb.weight"}
