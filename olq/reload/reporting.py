"""From the accounts of a finished load to its report."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from olq.methods.base import QuantMethod, WeightPlan
from olq.methods.state import LayerState, state_of
from olq.reload.declarations import declares
from olq.reload.derived import undeclared
from olq.reload.names import Names
from olq.reload.progress import PlainParameter
from olq.reload.quantized import QuantizedWeight
from olq.reload.routine import Target
from olq.reload.tree import Tree
from olq.report import KeptReport, Report, Status, TensorStatus, WeightReport

#: Attribute of a prepared model: layer names to the reason why they stay in high precision.
KEPT = "quant_kept"


def build_report(
    tree: Tree,
    names: Names,
    *,
    aliases: Mapping[str, str],
    surplus: Mapping[str, str],
    staged_peak: int,
    changes: Mapping[str, tuple[int, int]] | None = None,
    replayed: int = 0,
) -> Report:
    """The report of a load that is about to be committed, without what only the commit can tell.

    Tensors that nobody declared are left to it as well if something is declared, since hooks may make others.
    """
    reasons = {
        f"{prefix}.{name}" if prefix else name: reason
        for prefix, found in tree.notes(KEPT)
        for name, reason in found.items()
    }
    kept, untouched = [], []
    if names.repeat is not None:
        weights = [_repeated(label, target) for label, target in names.repeat.targets.items()]
    else:
        weights = [_weight(one, names, (changes or {}).get(one.label)) for one in names.weights]
    for progress in names.plain.values():
        layer_name = progress.label.rpartition(".")[0]
        if not progress.coverage.complete:
            untouched.append(progress.label)
        parameter = progress.parameter
        if isinstance(progress, PlainParameter) and isinstance(parameter, nn.Parameter):
            kept.append(
                KeptReport(
                    progress.label,
                    tuple(parameter.shape),
                    str(parameter.dtype).removeprefix("torch."),
                    parameter.numel() * parameter.element_size(),
                    _why_kept(tree.model, layer_name, parameter, names, reasons),
                )
            )
    return Report(
        weights=weights,
        kept=kept,
        aliases={**names.aliases, **aliases},
        surplus=dict(surplus),
        untouched=untouched,
        staged_peak_bytes=staged_peak,
        generation=tree.model.__dict__.get("quant_generation", 0) + 1,
        stale=list(names.stale),
        undeclared={} if declares(tree) else undeclared(tree),
        replayed=replayed,
    )


def build_status(names: Names) -> Status:
    """Where a load stands."""
    required = set(map(id, names.required))
    rows = []
    for one in names.progress:
        arrived, total = one.coverage.count, one.coverage.total
        state = "arrived" if one.coverage.complete else "partly" if arrived else "missing"
        if not arrived and total and id(one) not in required:
            state = "optional"
        rows.append(TensorStatus(one.label, state, arrived, total))
    rows += [TensorStatus(name, "stale", 0, count) for name, count in names.stale.items()]
    return Status(rows)


def _why_kept(
    model: nn.Module, owner: str, parameter: nn.Parameter, names: Names, reasons: Mapping[str, str]
) -> str:
    if owner in reasons:
        return reasons[owner]
    module = model.get_submodule(owner)
    kind = type(module).__name__
    if owner in names.layers:
        return "no weight of the layer's method"
    if isinstance(module, nn.Linear):
        return f"{kind} that no method has taken over: call olq.prepare(model, config) before the load"
    return f"{kind} is no linear layer" + (": a bare parameter" if parameter.dim() > 2 else "")


def _weight(weight: QuantizedWeight, names: Names, changed: tuple[int, int] | None) -> WeightReport:
    plan, error = weight.plan, weight.error
    state = state_of(names.layers[weight.label.rpartition(".")[0]])
    measured = error is not None and bool(error.signal or error.noise)
    return _row(
        weight.label,
        weight.method,
        state,
        plan,
        arrivals=weight.arrivals,
        direct=weight.direct_elements,
        sqnr_db=error.sqnr_db if error is not None and measured else None,
        worst_db=error.worst_db if error is not None and measured else None,
        worst_block=error.worst_block if error is not None and measured else None,
        changed_code_bytes=changed[0] if changed is not None else None,
        changed_scales=changed[1] if changed is not None else None,
    )


def _repeated(label: str, target: Target) -> WeightReport:
    """What a load would say of a weight whose units all came straight from sources."""
    arrivals, elements = target.weight.arrivals, target.parameter.numel()
    return _row(label, target.method, target.state, target.plan, arrivals=arrivals, direct=elements)


def _row(
    label: str, method: QuantMethod, state: LayerState, plan: WeightPlan, **counted: Any
) -> WeightReport:
    """What is said of every weight, and what was counted or measured of this one."""
    shape = plan.geometry.shape
    return WeightReport(
        name=label,
        method=method.title,
        reason=state.reason or "the layer's own method",
        shape=shape,
        kernel_bytes=plan.kernel_bytes,
        source_bytes=math.prod(shape) * plan.dtype.itemsize,
        generation=state.generation + 1,
        **counted,
    )
