"""Small models that several test modules prepare, load and compare."""

import torch
from torch import Tensor, nn

import olq

TOKENS = torch.tensor([[1, 2, 3]])


class Small(nn.Module):
    """An embedding, three linear layers and a bias; the head may be tied, and may stand first.

    Args:
        tie: head and embedding are one parameter.
        head_first: the head is registered before the embedding.
        dtype: of all parameters.
    """

    def __init__(
        self, tie: bool = False, head_first: bool = False, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        head = nn.Linear(32, 50, bias=False, dtype=dtype)
        if head_first:
            self.head = head
        self.emb = nn.Embedding(50, 32, dtype=dtype)
        self.a = nn.Linear(32, 48, dtype=dtype)
        self.b = nn.Linear(48, 32, bias=False, dtype=dtype)
        self.head = head
        if tie:
            self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.b(self.a(self.emb(tokens))))


def state(model: nn.Module) -> dict[str, Tensor]:
    """A checkpoint: the state dict, copied."""
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def fresh(config: olq.QuantConfig | None = None, **options) -> nn.Module:
    """A prepared `Small` without weights."""
    with olq.meta_parameters():
        model = Small(**options)
    return olq.prepare(model, config)


def live(config: olq.QuantConfig | None = None, **options) -> nn.Module:
    """A prepared `Small` with random weights."""
    return olq.prepare(Small(**options), config)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and bare tensor attributes, under all names."""
    bare = {
        f"{prefix}.{name}": value
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }
    named = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return {**dict(named[0]), **dict(named[1]), **bare}


def as_bytes(model: nn.Module) -> dict[str, bytes]:
    """What `tensors` lists, as bytes."""
    return {
        name: bytes(t.detach().contiguous().flatten().view(torch.uint8).tolist())
        for name, t in tensors(model).items()
    }


def places(model: nn.Module) -> dict[str, tuple]:
    """Address, shape, strides and dtype of what `tensors` lists."""
    return {name: (t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in tensors(model).items()}
