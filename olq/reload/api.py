"""The calls that users make: load, reload, session, dequantize, and the three of the engine's own loop."""

from collections.abc import Mapping
from typing import Unpack, cast

import torch
from torch import Tensor, nn

from olq.errors import LayoutError, StateError
from olq.methods.base import QuantMethod, kernel_tensors, plan_of
from olq.methods.state import LayerState, require_live
from olq.reload import online, saved
from olq.reload.accounting import missing_error
from olq.reload.callbacks import run_callbacks
from olq.reload.commit import go_live
from olq.reload.names import Names
from olq.reload.options import LoadOptions
from olq.reload.reporting import KEPT, build_report
from olq.reload.session import Session
from olq.reload.sources import Weights
from olq.reload.tree import Tree, layers_of
from olq.report import Report


def load(model: nn.Module, weights: Weights, **options: Unpack[LoadOptions]) -> Report:
    """Load a checkpoint into a model whose layers quantize while they load.

    Args:
        model: from `prepare`, or an engine's model whose layers called `create_weights`. If it has a
            `load_weights(iterator)`, names are that method's business; otherwise they are parameter names.
        weights: a folder of safetensors files (Hugging Face index honoured), one file, a mapping, or an iterable of
            (name, tensor). Full precision; or the saved `state_dict` of a quantized model.
        options: `measure_error`, `allow_surplus`, `progress` and the others of `LoadOptions`.

    Returns:
        What was loaded, how it is stored and why.

    Raises:
        SourceError: the source, or a tensor in it, is not what it should be.
        UnknownNameError: names that no parameter takes.
        CoverageError: parameters that did not arrive, or elements that arrived twice.
        NonFiniteError: inf or NaN in a weight whose method refuses it.
        StateError: a load of this model is open, or it has no quantized weights.
        ConfigError: an option is not what it should be, or a pattern matches nothing.

    Peak memory while loading, for CPU sources in file order: kernel tensors, one source tensor, 8 MB of workspace.
    Files for a GPU are read ahead: see `Staging`.
    """
    with Session(model, **options) as session:
        session.load(weights)
        return session.commit()


def reload(model: nn.Module, weights: Weights, **options: Unpack[LoadOptions]) -> Report:
    """Load other weights into a live model: every kernel tensor keeps its address.

    Arguments, result and errors are those of `load`. No second copy of the model is made, unless `shadow` asks for it.
    From the first tensor to the commit a forward raises; after an error it goes on raising until a load of everything
    has committed. With `shadow` the old weights serve until the commit, and after an error.

    Raises:
        StateError: the model is not live.
    """
    if layers_of(model) or not _keeps_everything(model):
        _need_live(model, "reload")
    return load(model, weights, **options)


def session(model: nn.Module, **options: Unpack[LoadOptions]) -> Session:
    """A load or reload in pieces: `with olq.session(model) as s: s.feed(name, tensor)`. See `Session`.

    Args:
        model: as for `load`.
        options: see `LoadOptions`.
    """
    return Session(model, **options)


def dequantize(layer: nn.Module, name: str = "weight", *, dtype: torch.dtype | None = None) -> Tensor:
    """The logical weight that a live layer computes with.

    Args:
        layer: a live layer with quantized weights.
        name: which of them.
        dtype: float32, bfloat16 or float16; None is the load format's.

    Returns:
        [*lead, N, K], without padding, new memory.

    Raises:
        LayoutError: the layer has no quantized weight of that name.
        StateError: its weights are not all there.
    """
    plan = plan_of(layer, name)
    require_live(layer)
    method = cast("QuantMethod", layer.quant_method)
    tensors = kernel_tensors(layer, name, plan)
    out = torch.empty(plan.geometry.shape, dtype=dtype or plan.dtype, device=tensors[""].device)
    for part, (start, rows) in enumerate(zip(plan.geometry.starts, plan.geometry.parts, strict=True)):
        method.dequantize_(out[..., start : start + rows, :], tensors, plan, plan.whole(part))
    return out


def initialize_online_processing(module: nn.Module, *, measure_error: bool = False) -> None:
    """Wrap the loaders of a layer, or of all layers of a model, so that what they write is quantized.

    For engines with a loading loop of their own; `load` and `session` do it by themselves. Calling it again changes
    nothing. Parameters that are registered later are found when a loader is called.

    Args:
        module: a layer whose `create_weights` was called, or a module that contains such layers.
        measure_error: keep quantization errors for the report.

    Raises:
        StateError: a layer is live already: see `initialize_layerwise_reload`.
    """
    for name, layer, state in layers_of(module):
        if state.live:
            raise StateError(
                "This layer has its weights already.",
                where=state.label or name,
                found="a live layer",
                need="a layer before its first load",
                remedy="call initialize_layerwise_reload(model) to load other weights",
            )
        state.label = state.label or name
        online.open_layer(layer, measure=measure_error)


def initialize_layerwise_reload(model: nn.Module, *, measure_error: bool = False) -> None:
    """Put the load format back, so that the engine's own loop can load again; kernel tensors keep their addresses.

    Args:
        model: live.
        measure_error: keep quantization errors for the report.

    Raises:
        StateError: the model is not live.
    """
    _need_live(model, "initialize_layerwise_reload")
    for _, layer, _ in layers_of(model):
        online.open_layer(layer, measure=measure_error)


def finalize_layerwise_processing(
    model: nn.Module, kernel_tensors: Mapping[str, Tensor] | None = None
) -> Report:
    """End an engine's own loading loop: check that nothing is missing, install the kernel tensors, go live.

    Args:
        model: its layers are open.
        kernel_tensors: tensors that a kernel owns, by full name ("model.layers.0.mlp.down_proj.weight"). They get the
            bytes and become the layer's tensors. Absent on a first load; on a reload olq has the live tensors itself.

    Returns:
        The report of all layers of the model.

    Raises:
        CoverageError: something is missing; it is named, and more may be loaded before the next call.
        LayoutError: a given tensor does not have its kernel tensor's shape, strides and dtype.
        StateError: no load is open.
    """
    for _, _, state in layers_of(model):
        if state.owner is not None:  # a session writes the layer without having opened it
            state.owner.names.open()
    layers = {name: (layer, state) for name, layer, state in layers_of(model) if state.open is not None}
    if not layers:
        raise StateError(
            "There is no open load to finish.",
            where=f"finalize_layerwise_processing of a {type(model).__name__}",
            found="layers that are live, or none at all",
            need="layers opened by initialize_online_processing or initialize_layerwise_reload",
            remedy="call one of them before the loading loop",
        )
    names = Names(layers={name: layer for name, (layer, _) in layers.items()})
    missing: list[str] = []
    for name, (layer, state) in layers.items():
        online.check_parameters(layer)
        state.label = name
        _relabel(state, name)
        if text := saved.finish_restored(state.open, name):
            missing.append(text)
        late, names.loads[layer] = state.open.late, state.open
        for weight, progress in state.open.weights.items():
            names.places[progress.label] = layer, weight
        names.plain.update((progress.label, progress) for progress in state.open.plains.values())
        for progress in state.open.progress():
            text = progress.missing()
            if text and not (progress in late and not progress.coverage.count):
                missing.append(text)
    if missing:
        raise missing_error(missing, names.progress, {})
    staged_peak = max(state.open.meter.peak for _, state in layers.values())
    if kernel_tensors:
        _give_tensors(layers, kernel_tensors)
    tree = Tree(model)
    report = build_report(tree, names, aliases={}, surplus={}, staged_peak=staged_peak)
    report = go_live(tree, names, report, shadow=False, partial=False)
    model.__dict__["quant_generation"] = report.generation
    run_callbacks(model, report)
    return report


def _give_tensors(layers: Mapping[str, tuple[nn.Module, LayerState]], given: Mapping[str, Tensor]) -> None:
    known: dict[str, tuple[LayerState, str, str, str]] = {}
    for name, (_, state) in layers.items():
        for weight, plan in state.plans.items():
            for suffix in plan.tensors:
                known[f"{name}.{weight}{suffix}" if name else weight + suffix] = (
                    state,
                    weight,
                    suffix,
                    weight + suffix,
                )
    for name, tensor in given.items():
        if name not in known:
            raise LayoutError(
                "A given tensor belongs to no kernel tensor of the model.",
                where="kernel_tensors",
                found=repr(name),
                need=f"names such as {next(iter(known), '')!r}",
                remedy="use the names of the live model's parameters",
            )
        state, weight, suffix, _ = known[name]
        online.give_tensor(state, weight, suffix, tensor, name)


def _relabel(state: LayerState, name: str) -> None:
    for progress in state.open.progress():
        leaf = progress.label.rpartition(".")[2]
        progress.label = f"{name}.{leaf}" if name else leaf


def _keeps_everything(model: nn.Module) -> bool:
    """Whether a model's methods leave all of its weights as they are: it is always live."""
    return KEPT in model.__dict__ or any("quant_method" in vars(module) for module in model.modules())


def _need_live(model: nn.Module, call: str) -> None:
    layers = layers_of(model)
    dead = [state.label or name for name, _, state in layers if not state.live and not state.kernel]
    if dead or not layers:
        raise StateError(
            f"{call} needs a model that has been loaded before.",
            where=", ".join(dead[:5]) or type(model).__name__,
            found="layers without weights" if dead else "a model without quantized layers",
            need="a live model",
            remedy="call olq.load(model, weights) first" if dead else "call olq.prepare(model, config) first",
        )
