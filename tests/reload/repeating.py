"""Sessions that repeat an earlier load, on the CPU and on a GPU: models, sources, and what both tests of them share.

On the CPU, where nothing waits for a GPU, weights are told to be judged later as on one.
"""

import pytest
import torch
from torch import nn

import olq
from olq.reload import quantized
from olq.reload.session import Session
from reload.fused_model import Fused, feed
from reload.fused_model import sources as cpu_sources
from reload.plans import METHODS
from reload.small_models import Small, state

#: For `pytestmark`.
ON_EACH_DEVICE = [
    pytest.mark.parametrize(
        "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True, scope="function"
    ),
    # NumPy's, where Triton's interpreter runs the kernels: they divide by zero and don't take the result.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]
#: Those whose units a shard fills: a scale that several shards share is staged, and not repeated.
WHOLE = [method for method in METHODS if method[1].get("scale_sharing") != "common"]


@pytest.fixture(autouse=True)
def device(request, monkeypatch):
    """Where models and sources are; the CPU judges later, as a GPU does."""
    if request.param == "cpu":
        monkeypatch.setattr(quantized, "waits", lambda device: True)
    monkeypatch.setattr(Where, "device", request.param)
    return request.param


class Where:
    """The device of the test that runs. What is random is drawn on the CPU, whatever it is."""

    device = "cpu"


def sources(seed: int) -> dict[str, torch.Tensor]:
    """What `Fused` loads, on the device."""
    return {name: tensor.to(Where.device) for name, tensor in cpu_sources(seed).items()}


def state_of_small(**options) -> dict[str, torch.Tensor]:
    """What `Small` loads, on the device."""
    return {name: tensor.to(Where.device) for name, tensor in state(Small(**options)).items()}


def prepared(model: nn.Module, config: olq.QuantConfig | None = None) -> nn.Module:
    """A prepared model on the device."""
    return olq.prepare(model.to(Where.device), config)


def fused(method: str = "fp8", **params: str) -> Fused:
    """A `Fused` without weights, on the device."""
    with torch.device(Where.device):
        return Fused(method, **params)


def activations() -> torch.Tensor:
    """A row for `Fused`."""
    return torch.ones(1, 64, device=Where.device)


def recorded(method: str = "fp8", **params: str) -> Fused:
    """A live `Fused` that has a routine for feeds and one for its own loop."""
    model = fused(method, **params)
    for seed in (1, 2):
        with Session(model, sources="stable") as session:
            feed(session, sources(seed))
    assert model.quant_plans.routine is not None
    return model


def repeating(model: nn.Module, **options) -> Session:
    """An open session that repeats."""
    session = Session(model, sources="stable", **options).begin()
    assert session.names.repeat is not None
    return session


def regular(model: nn.Module, **options) -> Session:
    """An open session that does not."""
    session = Session(model, sources="stable", **options).begin()
    session.names.open()
    return session
