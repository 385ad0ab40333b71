"""Plain `nn.Linear` modules as layers with a method, and a model's `load_state_dict` as a session."""

import functools
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from olq.errors import OlqError, StateError
from olq.methods.base import QuantMethod
from olq.reload.accounting import check_tags, missing_error, unknown_error
from olq.reload.checks import check_shape, check_source, check_values, contradiction, same_bytes
from olq.reload.names import Names
from olq.reload.progress import PlainParameter, Progress
from olq.reload.quantized import QuantizedWeight
from olq.reload.session import Session

if TYPE_CHECKING:
    from olq.reload.counter import CopyCounter


class QuantLinear(nn.Linear):
    """An `nn.Linear` whose weight is stored by a method. `prepare` turns modules into it; nobody constructs one.

    Attributes:
        quant_method: stores the weight and reads it in the forward.
    """

    quant_method: QuantMethod

    def forward(self, input: Tensor) -> Tensor:
        """`input @ W.T + bias`, weight decoded to the input's dtype."""
        return self.quant_method.apply(self, input, self.bias)

    def extra_repr(self) -> str:
        """Shape and method."""
        return f"{super().extra_repr()}, {self.quant_method}"


def take_over(
    layer: nn.Linear, method: QuantMethod, *, device: torch.device, label: str, reason: str = ""
) -> None:
    """Turn a plain linear layer into one that `method` stores; its weight becomes a load-format parameter.

    Args:
        layer: exactly an `nn.Linear`.
        method: a quantizing method.
        device: where kernel tensors will live.
        label: the layer's full name.
        reason: why it has this method, for the report.
    """
    dtype = layer.weight.dtype
    order = list(layer._parameters)
    del layer._parameters["weight"]
    layer.__class__ = QuantLinear
    method.create_weights(
        layer,
        layer.in_features,
        layer.out_features,
        dtype=dtype,
        device=device,
        label=label,
        reason=reason,
    )
    layer._parameters.update({name: layer._parameters.pop(name) for name in order})


def attach_load_state_dict(model: nn.Module) -> None:
    """Give the model instance a `load_state_dict` that opens a session."""
    model.__dict__["load_state_dict"] = functools.partial(load_state_dict, model)


def load_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """`torch.nn.Module.load_state_dict` for a prepared model: weights are quantized while they are copied.

    Tensors that a saved quantized model consists of are taken as they are. Hooks and `_load_from_state_dict` of
    modules run as torch runs them. Tied parameters may stand under any of their names, or under several with equal
    values.

    Args:
        model: a prepared model.
        state_dict: full-precision weights, or the state of a live quantized model, or both by layer.
        strict: False lets surplus names pass; they are listed in the result. Missing weights stay an error, since a
            quantized layer can't go without.
        assign: has to be False: kernel tensors keep their addresses.

    Returns:
        torch's pair of missing and unexpected names.

    Raises:
        UnknownNameError: `strict`, and a name that no parameter takes.
        CoverageError: something is missing, or a tied parameter has two values.
        OlqError: whatever else is wrong with a tensor, by its name.
    """
    if assign:
        raise StateError(
            "assign=True would replace parameters by the source's tensors.",
            where=f"load_state_dict of a prepared {type(model).__name__}",
            found="assign=True",
            need="assign=False: codes and scales are written into memory that olq owns",
            remedy="leave `assign` out",
        )
    with Session(model) as session:
        names = session.names
        check_tags(state_dict, names)
        names.release(state_dict)
        saved = [name for name, value in state_dict.items() if _is_saved(name, value, names)]
        rest = _by_first_name({k: v for k, v in state_dict.items() if k not in set(saved)}, names)
        if not _has_hooks(model):
            _check_tensors(rest, names)
        for name in saved:
            session.feed(name, state_dict[name])
        result = _torch_load(model, session, _like(state_dict, rest))
        taken = names.aliases.keys() | set(saved) | {one.label for one in names.leaders}
        missing = [name for name in result.missing_keys if name not in taken]
        if strict and result.unexpected_keys:
            raise unknown_error(result.unexpected_keys, names.routes, where="load_state_dict")
        # Weights and parameters that are missing are an error of commit(), which names them.
        required = {one.label for one in names.required}
        if strict and (others := [name for name in missing if name not in required]):
            raise missing_error(others, names.progress, {})
        session.commit()
    return _IncompatibleKeys(missing, result.unexpected_keys)


def _is_saved(name: str, value: Any, names: Names) -> bool:
    """Whether this is a kernel tensor or the tag of a saved quantized model."""
    return name in names.saved and (name not in names.routes or not value.is_floating_point())


def _by_first_name(state: dict[str, Any], names: Names) -> dict[str, Any]:
    """The state with each tied parameter once, under the name of the parameter that takes it."""
    first: dict[str, str] = {}
    kept: dict[str, Any] = {}
    for name, value in state.items():
        progress = names.routes.get(name)
        label = name if progress is None else progress.label
        if label not in first:
            first[label], kept[label] = name, value
        elif not _equal(kept[label], value, progress):
            raise contradiction(first[label], name)
    return kept


def _equal(a: Tensor, b: Tensor, progress: Progress | None) -> bool:
    if a is b or progress is None:
        return True
    dtype = progress.parameter.dtype
    return a.shape == b.shape and same_bytes(a.detach().to(dtype), b.detach().to(dtype))


def _has_hooks(model: nn.Module) -> bool:
    """Whether some module may rewrite the state before it is copied."""
    plain = nn.Module._load_from_state_dict
    return any(
        module._load_state_dict_pre_hooks
        or (
            type(module)._load_from_state_dict is not plain
            and not type(module).__module__.startswith("torch.")
        )
        for module in model.modules()
    )


def _check_tensors(state: Mapping[str, Any], names: Names) -> None:
    """Raise `SourceError` for what can't be loaded, before anything is written."""
    for name, value in state.items():
        progress = names.routes.get(name)
        if progress is not None and isinstance(value, Tensor):
            check_shape(value, progress.parameter, progress.label, name)
            if isinstance(progress, QuantizedWeight):
                check_source(value, progress.label, name)
            elif isinstance(progress, PlainParameter):
                check_values(value, progress.parameter, progress.label, name)


def _like(state_dict: Mapping[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """`rest` with the versions of modules that torch keeps beside a state."""
    state: Any = OrderedDict(rest)
    if hasattr(state_dict, "_metadata"):
        state._metadata = state_dict._metadata  # type: ignore[attr-defined]
    return state


def _torch_load(model: nn.Module, session: Session, state_dict: dict[str, Any]) -> _IncompatibleKeys:
    """torch's own loading, its copies seen by a counter and olq's errors not turned into text."""
    counter: CopyCounter = session.counter()
    try:
        with warnings.catch_warnings(), counter.scope("load_state_dict"):
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
            return cast("_IncompatibleKeys", type(model).load_state_dict(model, state_dict, strict=False))
    except RuntimeError as error:
        if counter.error is not None and not isinstance(error, OlqError):
            raise counter.error from None
        raise
