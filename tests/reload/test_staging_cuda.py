"""Staging on a GPU: streams, memory and bytes, with whoever is slow."""

import gc
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import olq
from olq.errors import ConfigError, NonFiniteError
from olq.reload import carriers
from olq.reload.carriers import CudaCarrier
from olq.reload.headers import read_header
from olq.reload.options import Staging
from olq.reload.staging import Staged
from reload.plans import METHODS, method_id

pytestmark = pytest.mark.cuda

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)


def write(folder: Path, sizes: list[int]) -> tuple[Path, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    content = {
        f"{i:03}": torch.randint(256, (size,), dtype=torch.uint8, generator=draw)
        for i, size in enumerate(sizes)
    }
    save_file(content, folder / "model.safetensors")
    return folder / "model.safetensors", content


def staged(file: Path, buffer: int, threads: int = 4, piece: int | None = MIB) -> Staged:
    return Staged([read_header(file)], CudaCarrier(DEVICE), Staging(buffer, threads), piece)


def busy(cycles: int) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)


@pytest.mark.parametrize("stream", ["default", "other", "changing"])
@pytest.mark.parametrize("slow", ["device", "host", "copies", "nothing"])
def test_bytes_are_right_whoever_is_slow(tmp_path, monkeypatch, slow, stream):
    """Each tensor is summed up and dropped; memory goes round many times."""
    draw = random.Random(1)
    sizes = [draw.choice((0, 1, 77, 5000, 3 * MIB, 9 * MIB + 5)) for _ in range(60)]
    file, content = write(tmp_path, sizes)
    streams = [torch.cuda.Stream() for _ in range(2)]
    if slow == "copies":
        copy = CudaCarrier.copy

        def late(self, into, source):
            busy(300_000)
            copy(self, into, source)

        monkeypatch.setattr(carriers.CudaCarrier, "copy", late)
    found: dict[str, Tensor] = {}
    source = staged(file, 4 * MIB)
    use = {"default": [torch.cuda.current_stream()], "other": streams[:1], "changing": streams}[stream]
    items = source.items()
    for i in range(len(sizes)):
        with torch.cuda.stream(use[i % len(use)]):
            name, tensor = next(items)
            if slow == "host":
                time.sleep(0.002)
            if slow == "device":
                busy(2_000_000)
            found[name] = tensor.clone()
            del tensor
    torch.cuda.synchronize()
    assert list(found) == list(content)
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in content.items())


def test_device_memory_is_two_buffers_and_one_larger_tensor(tmp_path):
    file, _ = write(tmp_path, [3 * MIB] * 20 + [40 * MIB, 41 * MIB] + [3 * MIB] * 20)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _, tensor in staged(file, 8 * MIB).items():
        del tensor
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before <= 2 * 8 * MIB + 41 * MIB


def test_closing_early_leaves_memory_that_others_can_use(tmp_path):
    file, _ = write(tmp_path, [8 * MIB] * 12)
    gc.collect()  # what earlier tests left is not this one's
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for taken in (0, 1, 3):
        items = staged(file, 16 * MIB).items()
        for _ in range(taken):
            next(items)
        items.close()
        mine = [torch.full((8 * MIB,), i, dtype=torch.uint8, device=DEVICE) for i in range(4)]
        torch.cuda.synchronize()
        assert [int(one.float().mean()) for one in mine] == [0, 1, 2, 3]
        assert all(int(one.min()) == int(one.max()) for one in mine)
        del mine, items
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_what_is_kept_stays_what_it_is(tmp_path):
    file, content = write(tmp_path, [2 * MIB] * 30)
    kept = dict(staged(file, 4 * MIB).items())
    assert all(torch.equal(kept[name].cpu(), tensor) for name, tensor in content.items())


def test_more_page_locked_memory_than_there_is_names_the_option(tmp_path):
    with pytest.raises(ConfigError, match="There is no page-locked memory") as error:
        CudaCarrier(DEVICE).host_buffer(1 << 50)
    assert "staging=None" in error.value.remedy


class Model(nn.Sequential):
    """A few layers, larger than a buffer and smaller."""

    def __init__(self) -> None:
        sizes = (256, 2048, 512, 640)
        super().__init__(*(nn.Linear(k, n, dtype=torch.bfloat16) for k, n in pairwise(sizes)))


def prepared(method: tuple[str, dict[str, str]], device: str) -> nn.Module:
    with olq.meta_parameters():
        model = Model()
    return olq.prepare(model, olq.QuantConfig(method=method[0], params=method[1]), device=device)


def bytes_of(model: nn.Module) -> dict[str, bytes]:
    return {
        name: bytes(t.cpu().reshape(-1).view(torch.uint8).tolist()) for name, t in model.state_dict().items()
    }


@pytest.mark.parametrize("stable", ["transient", "stable"])
@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_staged_load_and_reload_have_the_bytes_of_a_load_to_the_cpu(tmp_path, method, stable):
    model, cold = prepared(method, "cuda"), prepared(method, "cpu")
    for seed in (1, 2):
        torch.manual_seed(seed)
        save_file(Model().state_dict(), tmp_path / "model.safetensors")
        report = olq.load(model, tmp_path, staging=Staging(1 << 19, 3), sources=stable)
    assert report.replayed == 6
    olq.load(cold, tmp_path)
    assert bytes_of(model) == bytes_of(cold)


def test_a_load_to_a_gpu_is_staged_and_says_which_element_is_not_finite(tmp_path, monkeypatch):
    started = []
    begin = CudaCarrier.begin
    monkeypatch.setattr(CudaCarrier, "begin", lambda self: started.append(self.device) or begin(self))
    weights = Model().state_dict()
    weights["1.weight"][5, 7] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(NonFiniteError, match=r"1\.weight\[5, 7\]"):
        olq.load(prepared(("fp8", {}), "cuda"), tmp_path)
    assert started == [DEVICE]


def test_a_shadow_in_the_hosts_memory_is_not_staged(tmp_path, monkeypatch):
    save_file(Model().state_dict(), tmp_path / "model.safetensors")
    model = prepared(("fp8", {}), "cuda")
    olq.load(model, tmp_path)
    monkeypatch.setattr(CudaCarrier, "begin", lambda _: 1 / 0)
    olq.reload(model, tmp_path, shadow="host")
