"""Plain `nn.Linear` modules as layers with a method, and a model's `load_state_dict` as a session."""

import functools
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from olq.errors import OlqError, StateError
from olq.methods.base import QuantMethod
from olq.reload.session import Session, missing_error, unknown_error

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
    layer: nn.Linear, method: QuantMethod, *, device: torch.device, label: str, weight: Tensor | None = None
) -> None:
    """Turn a plain linear layer into one that `method` stores; its weight becomes a load-format parameter.

    Args:
        layer: exactly an `nn.Linear`.
        method: a quantizing method.
        device: where kernel tensors will live.
        label: the layer's full name.
        weight: gives the dtype, if not the layer's own weight.
    """
    dtype = (layer.weight if weight is None else weight).dtype
    order = list(layer._parameters)
    del layer._parameters["weight"]
    layer.__class__ = QuantLinear
    method.create_weights(
        layer, layer.in_features, layer.out_features, dtype=dtype, device=device, label=label
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
    modules run as torch runs them.

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
        CoverageError: something is missing.
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
        saved = {
            k: v
            for k, v in state_dict.items()
            if k in names.saved and (k not in names.routes or not v.is_floating_point())
        }
        for name, tensor in saved.items():
            session.feed(name, tensor)
        rest = {name: value for name, value in state_dict.items() if name not in saved}
        result = _torch_load(model, session, rest)
        done = set(saved)
        missing = [n for n in result.missing_keys if n not in done and n not in names.aliases]
        unexpected = [n for n in result.unexpected_keys if n not in names.aliases]
        for name in result.unexpected_keys:
            if name in names.aliases:
                session.feed(name, rest[name])
        if strict and unexpected:
            raise unknown_error(unexpected, names.routes, where="load_state_dict")
        buffers = [
            n
            for n in missing
            if strict
            and isinstance(names.routes[n].parameter, Tensor)
            and names.routes[n] not in names.required
        ]
        if buffers:
            raise missing_error(buffers, names.progress, {})
        session.commit()
    return _IncompatibleKeys(missing, unexpected)


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
