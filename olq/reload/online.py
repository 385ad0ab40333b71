"""One layer between load format and kernel format.

Open    load-format parameters stand in the module, their loaders are wrapped, nothing may be called.
Live    kernel tensors stand in the module.

`open_layer` and `install` are the two ways across; a first load and a reload take the same ones. What differs is
whether the kernel tensors exist already.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn

from olq.errors import LayoutError, LoaderError, StateError
from olq.methods.base import QuantMethod, WeightPlan
from olq.methods.guards import guard
from olq.methods.state import FORMAT_SUFFIX, LayerState, state_of
from olq.patterns import join
from olq.reload.checks import check_shape
from olq.reload.counter import CopyCounter, active_counter
from olq.reload.ledger import Ledger
from olq.reload.progress import PlainParameter, Progress
from olq.reload.quantized import QuantizedWeight
from olq.reload.stage import Meter


class LayerLoad:
    """The running load of one layer.

    Args:
        layer: has a `LayerState`.
        meter: counts staged bytes.
        measure: whether quantization errors are kept.
        shadow: "device" or "host" keeps new bytes beside the live ones until the commit; None writes in place.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        meter: Meter | None = None,
        measure: bool = False,
        shadow: str | None = None,
        plains: Mapping[str, Progress] | None = None,
    ) -> None:
        self.layer = layer
        state = self._state = state_of(layer)
        self._method = cast("QuantMethod", layer.quant_method)
        #: Load-format parameters by name.
        self.parameters = state.load_parameters
        self.meter = meter or Meter()
        self.measure = measure
        self.shadow = shadow
        self._scanning = Lock()
        #: Whether the layer could be called when this load began.
        self.was_live = state.live
        self._weights: dict[str, QuantizedWeight] | None = None
        self.plains: dict[str, PlainParameter] = {}
        #: Kernel tensors that arrived as such, with a saved model.
        self.restored: set[str] = set()
        #: Weights that are complete by that.
        self.whole: set[str] = set()
        #: The session that this load belongs to; None is an engine's own loop.
        self.owner: Any = None
        #: Parameters that were registered after the load began: their loader may have run unseen.
        self.late: list[Progress] = []
        me = weakref.ref(self)  # or the load, and what it has written, would wait for the garbage collector
        self.ledger = Ledger(later=lambda: load.weights.values() if (load := me()) is not None else ())
        self.scan(layer, state, plains or {})
        self.late.clear()

    @property
    def weights(self) -> dict[str, QuantizedWeight]:
        """Quantized weights by name. Their accounts begin when somebody asks for the first time."""
        if self._weights is None:
            with self._scanning:
                if self._weights is None:
                    self._weights = {name: self._open(name, plan) for name, plan in self._state.plans.items()}
        return self._weights

    def _open(self, name: str, plan: WeightPlan) -> QuantizedWeight:
        live = self._state.kernel if self.shadow is None else {}
        return QuantizedWeight(
            join(self._state.label, name),
            self.parameters[name],
            self._method,
            plan,
            device=self._state.device,
            tensors={suffix: live[name + suffix] for suffix in plan.tensors} if live else None,
            meter=self.meter,
            measure=self.measure,
            pinned=self.shadow == "host",
        )

    @property
    def started(self) -> bool:
        """Whether anything has arrived."""
        weights = self._weights or {}
        return bool(self.restored) or any(one.arrivals for one in (*weights.values(), *self.plains.values()))

    def progress(self) -> Iterator[Progress]:
        """All parameters of the layer."""
        yield from self.weights.values()
        yield from self.plains.values()

    def give_up(self) -> None:
        """Drop what has arrived; nothing more may come."""
        for weight in self.weights.values():
            weight.give_up()

    def scan(self, layer: nn.Module, state: LayerState, known: Mapping[str, Progress] | None = None) -> None:
        """Take in parameters that were registered after the load began, such as a bias after `create_weights`.

        Args:
            layer, state: of this load.
            known: accounts that parameters have already, by full name.
        """
        with self._scanning:
            for name, parameter in layer._parameters.items():
                if parameter is None or name in self.parameters or name in self.plains:
                    continue
                if any(parameter is tensor for tensor in state.kernel.values()):
                    continue
                if parameter.device.type != "meta":
                    beside = shadow_device(self.shadow, parameter)
                    full = join(state.label, name)
                    plain = known.get(full) if known else None
                    if not isinstance(plain, PlainParameter):
                        plain = PlainParameter(full, parameter, beside)
                    self.plains[name] = plain
                    self.ledger.add(self.plains[name])
                    self.late.append(self.plains[name])
                    wrap_loader(layer, name, parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied layer opens its own load."""
        return

    def __reduce__(self) -> Any:
        """A pickled layer opens its own load."""
        return (type(None), ())


class WrappedLoader:
    """A weight loader whose copies are seen.

    Args:
        layer: whose parameter it loads.
        name: the parameter.
        loader: the engine's own loader, or None for a plain copy.
    """

    def __init__(self, layer: nn.Module, name: str, loader: Callable[..., Any] | None) -> None:
        self.layer, self.name, self.loader = layer, name, loader

    def __call__(self, parameter: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the loader. When the outermost loader returns, what it wrote has been consumed.

        Raises:
            StateError: no load is open, so that checkpoint data would land in kernel tensors.
        """
        state = state_of(self.layer)
        counter = active_counter()
        if (plain := self._loaded_alone(state, parameter)) is not None and counter is not None:
            with counter.scope(_call_name(state.label, self.name, args, kwargs), [plain]):
                return self._run(plain, parameter, *args, **kwargs)
        load = self._load(state)
        load.scan(self.layer, state)
        if counter is None:
            counter = CopyCounter(load.ledger, state.device)
        else:
            for progress in load.progress():
                counter.ledger.add(progress)
        # Inside another loader that one's name counts.
        name = "" if counter.depth else _call_name(state.label, self.name, args, kwargs)
        with counter.scope(name, load.plains.values()):
            progress = load.weights.get(self.name) or load.plains.get(self.name)
            return self._run(progress, parameter, *args, **kwargs)

    def _loaded_alone(self, state: LayerState, parameter: Tensor) -> PlainParameter | None:
        """A parameter in high precision that a partial load takes, while its layer stays in kernel format."""
        counter = active_counter()
        if counter is None or state.open is not None or self.name in state.plans:
            return None
        return next((one for one in counter.ledger.find(parameter) if isinstance(one, PlainParameter)), None)

    def _load(self, state: LayerState) -> LayerLoad:
        if state.owner is not None:
            state.owner.names.open()
        if state.open is None and not state.live and not state.kernel:
            open_layer(self.layer)  # a copy of a layer that was open
        if state.open is None:
            raise StateError(
                "A weight loader was called while no load is open.",
                where=join(state.label, self.name),
                found="a live layer in kernel format" if state.live else "a layer whose load was aborted",
                need="an open load, which puts the load-format parameter back",
                remedy="load through olq.load, olq.reload or olq.session, or call "
                "initialize_layerwise_reload(model) first",
            )
        return state.open

    def _run(self, progress: Progress | None, parameter: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.loader is not None:
            return self.loader(parameter, *args, **kwargs)
        (source,) = args
        if progress is not None:
            check_shape(source, progress.parameter, progress.label, self.name)
        return parameter.copy_(source.reshape(parameter.shape))


def shadow_device(shadow: str | None, tensor: Tensor) -> torch.device | None:
    """Where a shadow load keeps the new values of a parameter in high precision; None without one."""
    if shadow is None:
        return None
    return torch.device("cpu") if shadow == "host" else tensor.device


def open_layer(
    layer: nn.Module,
    *,
    meter: Meter | None = None,
    measure: bool = False,
    shadow: str | None = None,
    plains: Mapping[str, Progress] | None = None,
) -> LayerLoad:
    """Put a layer into load format, ready to take weights. An open layer stays as it is.

    Args:
        layer: has a `LayerState`.
        meter: counts staged bytes.
        measure: whether to keep quantization errors.
        shadow: see `LayerLoad`. The layer is live, and can be called throughout.
        plains: accounts that parameters in high precision have already, by full name.
    """
    state = state_of(layer)
    if state.owner is not None:  # a session writes it without having opened it
        state.owner.names.open()
    if state.open is not None:
        return state.open
    if state.live:
        names = [name + suffix for name, plan in state.plans.items() for suffix in plan.tensors]
        state.kernel = {name: cast("Tensor", layer._parameters[name]) for name in names}
        for name in state.plans:
            state.tags[name + FORMAT_SUFFIX] = cast("Tensor", layer._buffers.pop(name + FORMAT_SUFFIX))
            layer._non_persistent_buffers_set.discard(name + FORMAT_SUFFIX)
        _replace(layer._parameters, names, dict(state.load_parameters))
    state.open = LayerLoad(layer, meter=meter, measure=measure, shadow=shadow, plains=plains)
    state.live = state.live and shadow is not None
    for name, parameter in state.load_parameters.items():
        wrap_loader(layer, name, parameter)
        parameter.__class__ = _guarded(type(parameter))
    guard(layer)
    return state.open


def load_of(layer: nn.Module) -> LayerLoad:
    """The running load of an open layer."""
    return state_of(layer).open


def check_parameters(layer: nn.Module) -> None:
    """Raise if somebody replaced a load-format parameter while the layer was open."""
    state = state_of(layer)
    for name, parameter in state.load_parameters.items():
        if layer._parameters.get(name) is not parameter:
            raise LoaderError(
                "A load-format parameter was replaced while its load was open.",
                where=join(state.label, name),
                found="another object in its place, which no loader of this load writes to",
                need="the parameter that create_weights or prepare registered",
                remedy="don't re-create parameters (nn.Parameter(...)) during a load: olq makes their memory",
            )


def install(layer: nn.Module) -> None:
    """Put the finished kernel tensors into the module: the layer is live, one generation on."""
    state = state_of(layer)
    load: LayerLoad = state.open
    tensors: dict[str, Tensor] = {}
    for name, weight in load.weights.items():
        tag_name = name + FORMAT_SUFFIX
        for suffix in weight.plan.tensors:
            old = state.kernel.get(name + suffix)
            tensors[name + suffix] = old if isinstance(old, nn.Parameter) else _new_parameter(weight, suffix)
        tag = state.tags.get(tag_name)
        if tag is None or tag.device != state.device:
            layer.register_buffer(tag_name, _new_tag(weight, state.device))
        else:
            layer._buffers[tag_name] = tag
    for parameter in state.load_parameters.values():
        parameter.__class__ = _unguarded(type(parameter))
        unwrap = parameter.__dict__.get("weight_loader")
        if isinstance(unwrap, WrappedLoader) and unwrap.loader is None:
            del vars(parameter)["weight_loader"]
    _replace(layer._parameters, list(state.load_parameters), tensors)
    state.kernel, state.tags, state.open = {}, {}, None
    state.live, state.held, state.generation = True, "", state.generation + 1


@torch.inference_mode(False)  # or what is made here could not be used outside of it
def _new_parameter(weight: QuantizedWeight, suffix: str) -> nn.Parameter:
    weight.prepare_tensors()  # a weight without elements has padding only
    return nn.Parameter(weight.tensors[suffix], requires_grad=False)


@torch.inference_mode(False)
def _new_tag(weight: QuantizedWeight, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(weight.plan.tag.encode()), dtype=torch.uint8).to(device)


def give_tensor(state: LayerState, weight_name: str, suffix: str, tensor: Tensor, label: str) -> None:
    """Let a kernel's own tensor become the layer's kernel tensor: it gets the bytes.

    Raises:
        LayoutError: its shape, strides or dtype differ.
    """
    weight = state.open.weights[weight_name]
    mine = weight.tensors[suffix]
    facts = [(t.dtype, list(t.shape), list(t.stride())) for t in (tensor, mine)]
    if facts[0] != facts[1]:
        raise LayoutError(
            "A given tensor can't hold this kernel tensor.",
            where=label,
            found="{}, shape {}, strides {}".format(*facts[0]),
            need="{}, shape {}, strides {}".format(*facts[1]),
            remedy="allocate it from the method's plan: plan.tensors[suffix]",
        )
    if tensor.data_ptr() != mine.data_ptr() or tensor.device != mine.device:
        with torch.no_grad():
            tensor.detach().copy_(mine)
        weight.replace_tensor(suffix, tensor.detach())
        state.kernel.pop(weight_name + suffix, None)


def abort(layer: nn.Module, *, untouched: bool = False, why: str = "") -> None:
    """Drop what has arrived.

    Args:
        layer: open, or not.
        untouched: nothing of the live model has been written, so that a layer that was live goes live again, as it
            was. Otherwise it is not callable until a load of all of it commits.
        why: what a call is told then.
    """
    state = state_of(layer)
    if state.open is None:
        return
    state.open.give_up()
    if untouched and state.open.was_live:
        held = state.held
        install(layer)
        state.generation -= 1
        state.held = held
    else:
        state.live, state.held = False, why
    state.open = None


def wrap_loader(layer: nn.Module, name: str, parameter: Tensor) -> None:
    """Make a parameter's loader show what it writes."""
    loader = getattr(parameter, "weight_loader", None)
    if not isinstance(loader, WrappedLoader):
        vars(parameter)["weight_loader"] = WrappedLoader(layer, name, loader)


def _replace(parameters: dict[str, Any], old: list[str], new: dict[str, Any]) -> None:
    """Put `new` where the first of `old` stands: the order of parameters is part of a model's face."""
    if len(parameters) == len(old) and parameters.keys() == set(old):
        parameters.clear()
        parameters.update(new)
        return
    items = list(parameters.items())
    at = next((i for i, (name, _) in enumerate(items) if name in old), len(items))
    before = [(name, p) for name, p in items[:at] if name not in old]
    after = [(name, p) for name, p in items[at:] if name not in old]
    parameters.clear()
    parameters.update([*before, *new.items(), *after])


@lru_cache(maxsize=64)
def _guarded(kind: type) -> type:
    """A subclass whose `data` shows the counter what is assigned to it: that emits no operator."""
    if getattr(kind, "_olq_plain", None) is not None:
        return kind

    def get(self: Tensor) -> Tensor:
        return kind.data.__get__(self)  # type: ignore[attr-defined]

    def put(self: Tensor, value: Tensor) -> None:
        if value.shape != self.shape:
            raise LayoutError(
                "Weights of another shape were assigned to a parameter's data.",
                where="parameter.data = ...",
                found=f"shape {list(value.shape)}",
                need=f"shape {list(self.shape)}",
                remedy="assign a tensor of the load-format shape",
            )
        if active_counter() is None:
            raise LoaderError(
                "Weights were assigned to a parameter's data outside a loader.",
                where="parameter.data = ...",
                found="no open scope of a CopyCounter in this thread",
                need="a write inside the parameter's weight_loader, or inside olq.load or session.load",
                remedy="call parameter.weight_loader(parameter, tensor)",
            )
        with torch.no_grad():
            self.copy_(value)

    return type(
        kind.__name__,
        (kind,),
        {"data": property(get, put), "_olq_plain": kind, "__module__": kind.__module__},
    )


def _unguarded(kind: type) -> type:
    return getattr(kind, "_olq_plain", kind)


def _call_name(label: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    extra = [repr(a) for a in args[1:] if not isinstance(a, Tensor)]
    extra += [f"{k}={v!r}" for k, v in kwargs.items() if not isinstance(v, Tensor)]
    return join(label, name) + (f" ({', '.join(extra)})" if extra else "")
