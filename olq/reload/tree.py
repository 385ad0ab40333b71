"""The modules of a model, found in one walk: what begin and commit ask many times.

`nn.Module.named_modules` is a recursion of generators; on a model of 160 modules one pass costs what two hundred
microseconds of quantizing on a GPU do.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from olq.methods.state import ATTRIBUTE as STATE
from olq.methods.state import LayerState
from olq.patterns import join

#: Names of tensors by the module that holds them.
Without = Mapping[nn.Module, frozenset[str]]
NOTHING: Without = MappingProxyType({})
_NONE: frozenset[str] = frozenset()


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
        self.modules: dict[nn.Module, str] = {module: name for name, module in self.named}
        if len(self.modules) != len(self.named):  # a shared one has its last name there
            self.modules = {}
            for name, module in self.named:
                self.modules.setdefault(module, name)
        #: The layers with quantized weights, each with its first name and record.
        self.layers: list[tuple[str, nn.Module, LayerState]] = [
            (name, m, state)
            for m, name in self.modules.items()
            if (state := m.__dict__.get(STATE)) is not None
        ]

    def notes(self, attribute: str) -> Iterator[tuple[str, Any]]:
        """What was noted on the model and its parts under an attribute, each with the part's name."""
        for module, name in self.modules.items():
            if attribute in module.__dict__:
                yield name, module.__dict__[attribute]

    def parameters(self, without: Without = NOTHING) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter under every name, but those that some modules have under the names in `without`."""
        for prefix, module in self.named:
            found = module._parameters
            if not found:
                continue
            left_out = without.get(module, _NONE)
            if found.keys() <= left_out:
                continue
            for name, parameter in found.items():
                if parameter is not None and name not in left_out:
                    yield join(prefix, name), parameter

    def buffers(self, without: Without = NOTHING) -> Iterator[tuple[str, Tensor, bool]]:
        """Every buffer under every name, but those in `without`, and whether state dicts hold it."""
        for prefix, module in self.named:
            found = module._buffers
            if not found:
                continue
            left_out = without.get(module, _NONE)
            if found.keys() <= left_out:
                continue
            for name, buffer in found.items():
                if buffer is not None and name not in left_out:
                    yield join(prefix, name), buffer, name not in module._non_persistent_buffers_set


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module, LayerState]]:
    """The layers with quantized weights, each with its name and record."""
    return Tree(model).layers


def _walk(module: nn.Module, name: str, named: list[tuple[str, nn.Module]]) -> None:
    named.append((name, module))
    prefix = f"{name}." if name else ""
    for child_name, child in module._modules.items():
        if child is None:
            continue
        if child._modules:
            _walk(child, prefix + child_name, named)
        else:
            named.append((prefix + child_name, child))
