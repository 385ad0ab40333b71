"""How fast a checkpoint on disk becomes a quantized model on a GPU, against safetensors' own load of the same files.

    python -m benchmarks.load_gpu [--layers 32] [--rounds 3] [--folder FOLDER] [--results FILE]

A Llama-3-8B shape in bfloat16 under the names of its checkpoints, in eight files that are written first and are in the
page cache then; linear layers (fused qkv and gate_up) become fp8 per channel, embedding, head and norms stay. First the
bytes of some layers against plain float32 arithmetic on the tensors that safetensors reads: if they differ nothing is
timed. Then rounds, in each of which every way loads all files, one after the other, by a clock of the CPU with the GPU
idle at both ends. Rates are bytes of the files by seconds.

    load_file   safetensors.torch.load_file(file, device="cuda") of all files, without a model
    safe_open   the same with safe_open(file, device="cuda") and get_tensor
    olq load    olq.load into a model without weights: session, quantization, commit
    olq reload  olq.reload into that model
    olq mapped  olq.load with staging=None: files are mapped, tensors copied one by one. Once

Exit status: 1 if bytes differ; 4 without a CUDA device; else 0.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import olq
from benchmarks import runner
from benchmarks.reload_gpu import HIDDEN, LAYERS, Linear, timed

VOCABULARY, FILES = 128256, 8
#: Where a layer keeps each of its linear layers.
INSIDE = {"qkv_proj": "self_attn", "o_proj": "self_attn", "gate_up_proj": "mlp", "down_proj": "mlp"}
NORMS = ("input_layernorm", "post_attention_layernorm")


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint, in file order."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(layers):
        for layer, (k, parts) in LAYERS.items():
            for part, rows in parts.items():
                found[f"model.layers.{i}.{INSIDE[layer]}.{part}.weight"] = (rows, k)
        found |= {f"model.layers.{i}.{norm}.weight": (HIDDEN,) for norm in NORMS}
    return {**found, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


class Model(nn.Module):
    """The parameters of a Llama, and a load_weights with the usual table of fused names."""

    def __init__(self, layers: int, device: str = "cuda") -> None:
        super().__init__()
        self.parts = {part: name for name, (_, parts) in LAYERS.items() for part in parts}
        self.fused = {
            f"model.layers.{i}.{INSIDE[name]}.{name}.weight": Linear("fp8", k, parts, device)
            for i in range(layers)
            for name, (k, parts) in LAYERS.items()
        }
        self.linears = nn.ModuleList(self.fused.values())
        plain = [name for name in shapes(layers) if name.split(".")[-2] not in self.parts]
        self.plain = nn.ParameterList(
            nn.Parameter(
                torch.empty(shapes(layers)[name], dtype=torch.bfloat16, device=device), requires_grad=False
            )
            for name in plain
        )
        self.places = dict(zip(plain, self.plain, strict=True))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Names are those of the checkpoint."""
        fused = {name: linear._parameters["weight"] for name, linear in self.fused.items()}
        for name, tensor in weights:
            part = name.split(".")[-2]
            if part in self.parts:
                parameter = fused[name.replace(part, self.parts[part])]
                vars(parameter)["weight_loader"](parameter, tensor, part)
            else:
                self.places[name].copy_(tensor)


def write_files(folder: Path, layers: int, device: str = "cuda") -> int:
    """Write the checkpoint, with several threads.

    Returns:
        Bytes of the files.
    """
    names = list(shapes(layers).items())
    total, groups = sum(math.prod(shape) for _, shape in names), [[]]
    room = total / FILES
    for name, shape in names:
        if room <= 0:
            groups.append([])
            room += total / FILES
        groups[-1].append((name, shape))
        room -= math.prod(shape)

    def write(number: int) -> int:
        file, at, header = folder / f"model-{number:05}.safetensors", 0, {}
        for name, shape in groups[number]:
            size = 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (at, at + size)}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        draw = torch.Generator(device).manual_seed(number)
        with file.open("wb", buffering=0) as raw:
            raw.write(len(text).to_bytes(8, "little") + text)
            for _, shape in groups[number]:
                tensor = torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16).cpu()
                view = tensor.view(torch.uint8).reshape(-1).numpy().data
                while len(view):
                    view = view[raw.write(view) :]
        return file.stat().st_size

    with ThreadPoolExecutor(FILES) as pool:
        return sum(pool.map(write, range(len(groups))))


def read(folder: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the checkpoint by safetensors, on the CPU."""
    for file in sorted(folder.iterdir()):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118, not a mapping
                if wanted(name):
                    yield name, reader.get_tensor(name)


def same_bytes(model: Model, folder: Path, layers: Iterable[int]) -> bool:
    """Whether some layers hold what float32 arithmetic makes of each of their rows, and embedding and head as is."""
    prefixes = tuple(f"model.layers.{i}." for i in layers)
    for name, tensor in read(folder, lambda n: n.startswith(prefixes) or n in model.places):
        tensor = tensor.to(model.plain[0].device)
        part = name.split(".")[-2]
        if part not in model.parts:
            if not torch.equal(tensor, model.places[name]):
                return False
            continue
        linear = model.fused[name.replace(part, model.parts[part])]
        start = sum(linear.parts[p] for p in list(linear.parts)[: list(linear.parts).index(part)])
        rows = slice(start, start + len(tensor))
        values = tensor.float()
        amax = values.abs().amax(1, keepdim=True)
        scale = amax / torch.full_like(amax, 448)  # by a number, torch multiplies by its reciprocal on a GPU
        codes = (
            (values * (torch.ones_like(scale) / scale))
            .clamp(-448, 448)
            .to(torch.float8_e4m3fn)
            .view(torch.uint8)
        )
        stored = (cast("Tensor", linear.get_parameter(n))[rows] for n in ("weight", "weight_scale"))
        if not all(map(torch.equal, (codes, scale), stored)):
            return False
    return True


def check(folder: Path, layers: int) -> dict[str, float] | None:
    """A first load in this process, which makes all memory: its seconds and page-locked bytes. None: wrong bytes."""
    model, before = Model(layers), pinned_bytes()
    seconds = timed(lambda: olq.load(model, folder))
    found = {"first_load_seconds": seconds, "pinned_bytes": pinned_bytes() - before}
    return found if same_bytes(model, folder, {0, layers // 2, layers - 1}) else None


def by_load_file(folder: Path) -> None:
    """Load all files by safetensors."""
    for file in sorted(folder.iterdir()):
        load_file(file, device="cuda")


def by_safe_open(folder: Path) -> None:
    """Load all tensors by safetensors, one by one."""
    for file in sorted(folder.iterdir()):
        with safe_open(file, framework="pt", device="cuda") as reader:
            for name in reader.keys():  # noqa: SIM118, not a mapping
                reader.get_tensor(name)


def pinned_bytes() -> int:
    """Page-locked memory that torch holds, in use or kept for later."""
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def measure(folder: Path, layers: int, rounds: int, size: int) -> dict[str, object]:
    """Time every way in turn."""
    taken: dict[str, list[float]] = {"load_file": [], "safe_open": [], "olq load": [], "olq reload": []}
    peak = kernel = 0
    for _ in range(rounds):
        taken["load_file"].append(timed(lambda: by_load_file(folder)))
        taken["safe_open"].append(timed(lambda: by_safe_open(folder)))
        model = Model(layers)
        torch.cuda.reset_peak_memory_stats()
        taken["olq load"].append(timed(lambda model=model: olq.load(model, folder)))
        kernel = torch.cuda.memory_allocated()
        peak = max(peak, torch.cuda.max_memory_allocated() - kernel)
        taken["olq reload"].append(timed(lambda model=model: olq.reload(model, folder)))
        del model
        gc.collect()
    model = Model(layers)
    mapped = timed(lambda: olq.load(model, folder, staging=None))
    rates = {name: size / statistics.median(seconds) / 1e9 for name, seconds in taken.items()}
    return {
        "case": "load fp8",
        "layers": layers,
        "bytes": size,
        "gb_per_s": {**rates, "olq mapped": size / mapped / 1e9},
        "seconds": taken,
        "times_load_file": rates["olq load"] / rates["load_file"],
        "times_safe_open": rates["olq load"] / rates["safe_open"],
        "model_bytes": kernel,
        "extra_device_bytes": peak,
        "staging": [olq.Staging().buffer_bytes, olq.Staging().threads],
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def main(argv: list[str] | None = None) -> int:
    """Run, print, return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load_gpu", description=str(__doc__).split("\n")[0]
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where a temporary folder for the files is made")
    parser.add_argument("--results", type=Path, help="append a line of JSON to this file")
    chosen = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device")
        return runner.NO_GPU
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        begun = time.perf_counter()
        size = write_files(folder, chosen.layers)
        print(f"{size} bytes written in {time.perf_counter() - begun:.1f} s", flush=True)
        first = check(folder, chosen.layers)
        if first is None:
            print("NOT TIMED, a loaded layer differs from its tensors, quantized")
            return runner.WRONG
        row = {**measure(folder, chosen.layers, chosen.rounds, size), **first}
    print(json.dumps(row), flush=True)
    runner.keep(row, chosen.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
