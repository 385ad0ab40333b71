"""New weights into the running model: what changes, and what must not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import olq
from examples.engine import Llama, load_model, perplexity
from olq.testing.memory import measure_memory


@dataclass(frozen=True)
class Reloaded:
    """What a reload of checkpoint B into a model that held A did.

    Args:
        before: perplexity on each text with A's weights, by the text's name.
        after: the same with B's.
        tensors: number of parameters and buffers.
        moved: names of those whose address changed; none, if all is well.
        different: names of those that differ from a fresh load of B in any byte; none, if all is well.
        peak_bytes: the most that the reload needed on top of the running model.
    """

    before: dict[str, float]
    after: dict[str, float]
    tensors: int
    moved: list[str]
    different: list[str]
    peak_bytes: int

    def __str__(self) -> str:
        lines = [f"{'perplexity on':<24}" + "".join(f"{name:>16}" for name in self.before)]
        lines.append(f"{'  with checkpoint A':<24}" + "".join(f"{p:>16.3f}" for p in self.before.values()))
        lines.append(f"{'  after the reload of B':<24}" + "".join(f"{p:>16.3f}" for p in self.after.values()))
        lines.append("addresses changed: " + self._count(self.moved))
        lines.append("bytes that differ from a fresh load of B: in " + self._count(self.different))
        lines.append(f"memory on top of the running model, at most: {self.peak_bytes:,} bytes")
        return "\n".join(lines)

    def _count(self, names: list[str]) -> str:
        some = f" ({', '.join(names[:2])}, ...)" if names else ""
        return f"{len(names)} of {self.tensors} tensors{some}"


def reload(
    model: Llama,
    quant: olq.QuantConfig,
    folder: Path,
    *,
    texts: Mapping[str, Sequence[int]],
    stage: Callable[[str, float], Callable[[float], None]],
) -> Reloaded:
    """Reload `folder` into `model`, which keeps running before and after.

    Args:
        model: live, with the weights of another checkpoint.
        quant: how it was loaded, for the fresh model that it is compared with.
        folder: the new checkpoint.
        texts: held-out token ids by name.
        stage: as in `measure.measure`.
    """

    def perplexities(when: str) -> dict[str, float]:
        found = {}
        for name, ids in texts.items():
            step = stage(f"{when}: perplexity on {name}", 0.2)
            found[name] = perplexity(model, ids, progress=lambda done, total, step=step: step(done / total))
        return found

    before = perplexities("before the reload")
    addresses = {name: tensor.data_ptr() for name, tensor in tensors(model).items()}
    step = stage("reloading", 0.2)
    trace = measure_memory(lambda: olq.reload(model, folder))
    step(1.0)
    moved = [name for name, tensor in tensors(model).items() if tensor.data_ptr() != addresses[name]]
    fresh = tensors(load_model(folder, quant)[0])
    different = [name for name, tensor in tensors(model).items() if not equal_bytes(tensor, fresh[name])]
    after = perplexities("after the reload")
    return Reloaded(before, after, len(addresses), moved, different, trace.peak_bytes)


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same shape, dtype and bits; unlike `==`, it tells -0.0 from 0.0 and finds NaN equal to itself."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a.detach().contiguous().view(torch.uint8), b.detach().contiguous().view(torch.uint8))
