"""The modules of a model, found in one walk: what begin and commit ask many times.

`nn.Module.named_modules` is a recursion of generators; on a model of 160 modules one pass costs what two hundred
microseconds of quantizing on a GPU do.
"""

from collections.abc import Container, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from olq.methods.state import LayerState, find_state
from olq.patterns import join

#: Names of tensors by the module that holds them.
Without = Mapping[nn.Module, Container[str]]
NOTHING: Without = MappingProxyType({})


class Tree:
    """A model's modules as they are now. It knows nothing of what is added or removed later.

    Args:
        model: any module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        #: Every name of every module, parents first: a shared module stands here several times.
        self.named: list[tuple[str, nn.Module]] = []
        _walk(model, "", self.named)
        #: Every module once, with its first name.
        self.modules: dict[nn.Module, str] = {}
        for name, module in self.named:
            self.modules.setdefault(module, name)

    @cached_property
    def layers(self) -> list[tuple[str, nn.Module, LayerState]]:
        """The layers with quantized weights, each with its first name and record."""
        return [(name, m, state) for m, name in self.modules.items() if (state := find_state(m)) is not None]

    def notes(self, attribute: str) -> Iterator[tuple[str, Any]]:
        """What was noted on the model and its parts under an attribute, each with the part's name."""
        for module, name in self.modules.items():
            if attribute in module.__dict__:
                yield name, module.__dict__[attribute]

    def parameters(self, without: Without = NOTHING) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter under every name, but those that some modules have under the names in `without`."""
        for prefix, module in self.named:
            if not module._parameters:
                continue
            left_out = without.get(module, ())
            for name, parameter in module._parameters.items():
                if parameter is not None and name not in left_out:
                    yield join(prefix, name), parameter

    def buffers(self, without: Without = NOTHING) -> Iterator[tuple[str, Tensor, bool]]:
        """Every buffer under every name, but those in `without`, and whether state dicts hold it."""
        for prefix, module in self.named:
            if not module._buffers:
                continue
            left_out = without.get(module, ())
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in left_out:
                    yield join(prefix, name), buffer, name not in module._non_persistent_buffers_set


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module, LayerState]]:
    """The layers with quantized weights, each with its name and record."""
    return Tree(model).layers


def _walk(module: nn.Module, name: str, named: list[tuple[str, nn.Module]]) -> None:
    named.append((name, module))
    for child_name, child in module._modules.items():
        if child is not None:
            _walk(child, f"{name}.{child_name}" if name else child_name, named)
