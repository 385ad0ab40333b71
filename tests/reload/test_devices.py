"""Kernel tensors on one device, sources on another: the bytes are those of a CPU load."""

import pytest
import torch
from torch import nn

import olq
from olq.reload.region import slices
from reload.plans import METHODS, RegionLayer, kernel_bytes, method_id

pytestmark = pytest.mark.cuda

PARTS, COLUMNS = (130, 70, 3), 100
#: Cuts that leave whole units, cut units, and strided rows.
BOXES = [
    (range(0, 200, 2), range(0, 50)),
    (range(1, 200, 2), range(0, 50)),
    (range(0, 200), range(50, 100)),
    (range(200, 203), range(0, 100)),
]


def make_model(method: str, params: dict[str, str]) -> nn.Module:
    """Two linear layers, one with a bias."""
    layers = (
        nn.Linear(COLUMNS, 203, dtype=torch.bfloat16),
        nn.Linear(203, 64, bias=False, dtype=torch.bfloat16),
    )
    return nn.Sequential(*layers)


def load_pieces(layer: RegionLayer, weight: torch.Tensor) -> RegionLayer:
    """Load by the cuts, each piece on the weight's device."""
    olq.initialize_online_processing(layer)
    for box in BOXES:
        layer.weight.weight_loader(layer.weight, weight[slices(box)], box)
    olq.finalize_layerwise_processing(layer)
    return layer


@pytest.mark.parametrize("source", ["cpu", "cuda"])
@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_load_to_the_gpu_has_the_bytes_of_a_load_to_the_cpu(method, source):
    weight = torch.randn(203, COLUMNS, generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.device("cuda"):
        on_gpu = RegionLayer(*method, PARTS, COLUMNS)
    load_pieces(on_gpu, weight.to(source))
    on_cpu = load_pieces(RegionLayer(*method, PARTS, COLUMNS), weight)
    assert all(p.is_cuda for p in on_gpu.parameters())
    assert kernel_bytes(on_gpu.cpu()) == kernel_bytes(on_cpu)


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_gpu_model_loads_reloads_and_computes(method):
    name, params = method
    torch.manual_seed(5)
    first, second = (make_model(name, params).state_dict() for _ in range(2))
    with olq.meta_parameters():
        model = make_model(name, params)
    olq.prepare(model, olq.QuantConfig(method=name, params=params), device="cuda")
    olq.load(model, first)
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    olq.reload(model, {n: t.cuda() for n, t in second.items()})
    assert before == {n: p.data_ptr() for n, p in model.named_parameters()}
    with olq.meta_parameters():
        fresh = make_model(name, params)
    olq.prepare(fresh, olq.QuantConfig(method=name, params=params))
    olq.load(fresh, second)
    for (n, p), (_, q) in zip(model.state_dict().items(), fresh.state_dict().items(), strict=True):
        assert torch.equal(p.cpu(), q), n
    x = torch.randn(5, COLUMNS, dtype=torch.bfloat16)
    on_gpu, on_cpu = model(x.cuda()).cpu().float(), fresh(x).float()
    assert (
        on_gpu - on_cpu
    ).norm() <= 0.02 * on_cpu.norm()  # the same weights; bfloat16 sums in another order


@pytest.mark.unaudited(reason="an audit holds the memory that it watches, until it sweeps")
@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_model_that_is_moved_away_leaves_no_memory_behind(method):
    """What repeated loads have made ready would otherwise hold the old kernel tensors."""
    name, params = method
    with olq.meta_parameters():
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(8)))
    olq.prepare(model, olq.QuantConfig(method=name, params=params), device="cuda")
    weights = {n: torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda") for n in model.state_dict()}
    for _ in range(3):
        olq.load(model, weights, sources="stable")
    taken = torch.cuda.memory_allocated()
    size = sum(p.nbytes for p in model.parameters())
    model.cpu()
    assert taken - torch.cuda.memory_allocated() >= size
    model.cuda()
    report = olq.reload(model, weights, sources="stable")
    assert report.replayed == 8
    assert all(layer.quant_state.made["weight"].jobs for layer in model)  # made anew


def test_sources_that_are_ready_on_different_streams_are_read_on_theirs():
    """What waits is launched on the stream that was current when it came, and the flush waits for all of them."""
    count = 40
    with olq.meta_parameters():
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(count)))
    olq.prepare(model, device="cuda")
    draw = torch.Generator("cuda").manual_seed(1)
    right = {
        f"{i}.weight": torch.randn(256, 256, generator=draw, device="cuda").bfloat16() for i in range(count)
    }
    for _ in range(2):
        olq.load(model, right, sources="stable")
    wanted = {n: t.clone() for n, t in model.state_dict().items()}
    olq.load(model, {n: torch.ones_like(t) for n, t in right.items()}, sources="stable")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    buffers = {n: torch.zeros_like(t) for n, t in right.items()}
    torch.cuda.synchronize()
    with olq.session(model, sources="stable") as session:
        assert session.names.repeat is not None
        for i, (name, tensor) in enumerate(right.items()):
            with torch.cuda.stream(first if i < 10 else second):
                if i == 0:
                    torch.cuda._sleep(200_000_000)
                buffers[name].copy_(tensor)
                session.feed(name, buffers[name])
        session.flush()
        for buffer in buffers.values():
            buffer.zero_()  # on this stream, which the flush has made wait
        report = session.commit()
    assert report.replayed == count
    assert all(torch.equal(t, wanted[n]) for n, t in model.state_dict().items())
