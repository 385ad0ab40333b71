"""Sources: what can be read, in which order; and one clear error for each that can't, before anything is written."""

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import olq
from olq.errors import CoverageError, SourceError, StateError, UnknownNameError
from olq.reload.sources import open_source

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"0.weight": (24, 16), "0.bias": (24,), "1.weight": (8, 24), "1.bias": (8,)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def make_model() -> nn.Module:
    with olq.meta_parameters():
        layers = nn.Linear(16, 24, dtype=torch.bfloat16), nn.Linear(24, 8, dtype=torch.bfloat16)
    return olq.prepare(nn.Sequential(*layers))


def folder_of(path: Path, files: dict[str, list[str]], *, index: bool = True, seed: int = 0) -> Path:
    """Write a checkpoint, these names into those files."""
    path.mkdir(exist_ok=True)
    all_tensors = tensors(seed)
    for file, names in files.items():
        save_file({name: all_tensors[name] for name in names}, path / file)
    if index:
        where = {name: file for file, names in files.items() for name in names}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


SHARDS = {"model-00001-of-00002.safetensors": NAMES[:2], "model-00002-of-00002.safetensors": NAMES[2:]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "checkpoint", SHARDS)


def state_bytes(model: nn.Module) -> dict[str, bytes]:
    return {
        name: bytes(t.contiguous().flatten().view(torch.uint8).tolist())
        for name, t in model.state_dict().items()
    }


def message(error: pytest.ExceptionInfo) -> dict[str, str]:
    """The error's facts; each of its five lines is there."""
    lines = str(error.value).split("\n")
    assert [line.split(":")[0].strip() for line in lines[1:5]] == ["where", "found", "need", "remedy"]
    value = error.value
    assert all((value.problem, value.where, value.found, value.need, value.remedy))
    return {"problem": value.problem, "where": value.where, "found": value.found, "remedy": value.remedy}


# What can be read


def test_every_kind_of_source_gives_the_same_bytes(folder, tmp_path):
    single = tmp_path / "one.safetensors"
    save_file(tensors(), single)
    without_index = folder_of(tmp_path / "plain", SHARDS, index=False)
    sources = [
        folder,
        str(folder),
        without_index,
        single,
        tensors(),
        tensors().items(),
        iter(tensors().items()),
    ]
    found = []
    for source in sources:
        model = make_model()
        olq.load(model, source)
        found.append(state_bytes(model))
    assert all(one == found[0] for one in found)


def test_files_and_tensors_come_in_file_order(tmp_path):
    files = {f"part-{n}.safetensors": [name] for n, name in zip((10, 2, 1, 100), NAMES, strict=True)}
    found = open_source(folder_of(tmp_path / "a", files, index=False))
    assert [name for name, _ in found.items] == ["1.weight", "0.bias", "0.weight", "1.bias"]
    assert found.names == ("1.weight", "0.bias", "0.weight", "1.bias")
    header = {"b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header["a"] = {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}
    text = json.dumps(header).encode()
    one = tmp_path / "order.safetensors"
    one.write_bytes(struct.pack("<Q", len(text)) + text + bytes(3))
    assert [(name, len(t)) for name, t in open_source(one).items] == [("b", 1), ("a", 2)]


def test_bytes_are_counted_where_they_are_known(folder):
    total = sum(t.numel() * t.element_size() for t in tensors().values())
    assert open_source(folder).total_bytes == total
    assert open_source(tensors()).total_bytes == total
    assert open_source(iter(tensors().items())).total_bytes is None


def test_other_files_beside_an_index_are_left_alone(folder):
    save_file({"another": torch.ones(3)}, folder / "consolidated.safetensors")
    olq.load(make_model(), folder)


def test_hidden_files_and_folders_are_no_shards(tmp_path):
    folder = folder_of(tmp_path / "a", SHARDS, index=False)
    (folder / "._model-00001-of-00002.safetensors").write_bytes(b"left by a copy from another system")
    (folder / "cache.safetensors").mkdir()
    olq.load(make_model(), folder)


def test_shards_may_lie_in_folders_of_equal_file_names(tmp_path):
    for part, names in (("x", NAMES[:2]), ("y", NAMES[2:])):
        folder_of(tmp_path / part, {"model.safetensors": names}, index=False)
    where = {name: f"{'x' if name in NAMES[:2] else 'y'}/model.safetensors" for name in NAMES}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    olq.load(make_model(), tmp_path)


@pytest.mark.parametrize("other", ["./{}", "../checkpoint/{}"])
def test_an_index_may_spell_a_file_in_two_ways(folder, other):
    index = folder / "model.safetensors.index.json"
    spelled = json.loads(index.read_text())
    spelled["weight_map"]["1.weight"] = other.format(spelled["weight_map"]["1.weight"])
    index.write_text(json.dumps(spelled))
    assert [name for name, _ in open_source(folder).items] == list(open_source(folder).names or ())
    assert sorted(open_source(folder).names or ()) == sorted(NAMES)


@pytest.mark.parametrize("shape", [[0, (1 << 63) + 5], [0, 1 << 62, 8]])
def test_a_shape_beyond_any_tensor_is_one_clear_error(tmp_path, shape):
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(SourceError) as error:
        open_source(tmp_path)
    assert f"'a' has sizes beyond any tensor: {shape}" in message(error)["found"]


def test_an_overwritten_file_is_read_again(folder):
    model = make_model()
    olq.load(model, folder)
    first = state_bytes(model)
    folder_of(folder, SHARDS, seed=1)
    olq.reload(model, folder)
    fresh = make_model()
    olq.load(fresh, tensors(seed=1))
    assert state_bytes(model) == state_bytes(fresh) != first


def test_a_mapping_that_reads_lazily_is_asked_once_for_each_tensor():
    asked: list[str] = []

    class Reader(Mapping):
        def __getitem__(self, name: str) -> Tensor:
            tensor = tensors()[name]
            asked.append(name)
            return tensor

        def __iter__(self) -> Iterator[str]:
            return iter(NAMES)

        def __len__(self) -> int:
            return len(NAMES)

    olq.load(make_model(), Reader())
    assert asked == NAMES


def test_a_generator_is_never_pulled_ahead():
    handed: list[str] = []

    class Tracked(nn.Sequential):
        def load_weights(self, weights):
            for name, tensor in weights:
                assert handed[-1] == name
                parameter = dict(self.named_parameters())[name]
                getattr(parameter, "weight_loader", lambda p, t: p.data.copy_(t))(parameter, tensor)

    def generator():
        for name, tensor in tensors().items():
            handed.append(name)
            yield name, tensor

    olq.load(make_model(), generator(), progress=lambda done, total, name: handed[-1] == name or 1 / 0)
    with olq.meta_parameters():
        model = Tracked(nn.Linear(16, 24, dtype=torch.bfloat16), nn.Linear(24, 8, dtype=torch.bfloat16))
    olq.load(olq.prepare(model), generator())


# What can't be read: one error each, and nothing has been written


def truncate(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def corrupt(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"XF16"'))


def empty_file(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"")


def lose_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def wrong_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"0.bias": "model-00001', '"0.bias": "model-00002'))


def index_forgets(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["0.bias"]
    index.write_text(json.dumps(content))


def index_is_no_json(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {')


def index_has_no_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')


def index_maps_to_numbers(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"0.weight": 1}}')


def index_is_empty(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')


def twice(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    save_file({"0.bias": torch.ones(24)}, folder / "model-old.safetensors")


def only_pickles(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK")


def nothing(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def one_missing(folder: Path) -> None:
    names = {file: [n for n in names if n != "1.bias"] for file, names in SHARDS.items()}
    folder_of(folder, names)


def one_unknown(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    save_file({**load_file(file), "1.wieght": torch.ones(3)}, file)
    (folder / "model.safetensors.index.json").unlink()


SHARD_2 = "model-00002-of-00002.safetensors"
BROKEN = {
    truncate: (
        SourceError,
        "truncated, corrupt",
        SHARD_2,
        r"not fully covered \(\d+ bytes\)",
        "fetch this file again",
    ),
    corrupt: (
        SourceError,
        "truncated, corrupt",
        "model-00001",
        "unknown variant `XF16`",
        "fetch this file again",
    ),
    empty_file: (
        SourceError,
        "truncated, corrupt",
        SHARD_2,
        r"header too small \(0 bytes\)",
        "fetch this file",
    ),
    lose_shard: (
        SourceError,
        "Files of a checkpoint are missing",
        "checkpoint",
        f"1 of 2 .*{SHARD_2}",
        "fetch the miss",
    ),
    wrong_index: (
        SourceError,
        "do not agree",
        "index.json",
        r"1 names not where .*\['0.bias'\], 0 not",
        "fetch the ch",
    ),
    index_forgets: (
        SourceError,
        "do not agree",
        "index.json",
        r"0 names .*1 not in the index \['0.bias'\]",
        "left over",
    ),
    index_is_no_json: (
        SourceError,
        "index of a checkpoint can't be read",
        "index.json",
        "JSONDecodeError",
        "fetch",
    ),
    index_has_no_map: (
        SourceError,
        "index of a checkpoint can't be read",
        "index.json",
        "KeyError",
        "fetch the index",
    ),
    index_maps_to_numbers: (
        SourceError,
        "index of a checkpoint can't",
        "index.json",
        "TypeError",
        "fetch the index",
    ),
    index_is_empty: (
        SourceError,
        "no weights to load",
        "checkpoint",
        "files without a tensor",
        "check the path",
    ),
    twice: (
        SourceError,
        "in two files",
        "checkpoint",
        "'0.bias' in model-00001.* and in model-old",
        "left over",
    ),
    only_pickles: (
        SourceError,
        "no weights to load",
        "checkpoint",
        "only pytorch_model.bin",
        "check the path",
    ),
    nothing: (
        SourceError,
        "no weights to load",
        "checkpoint",
        r"no \*\.safetensors and no model",
        "check the path",
    ),
    one_missing: (
        CoverageError,
        "lacks 1 of the",
        "checkpoint",
        r"names, but not 1\.bias",
        "fetch the files",
    ),
    one_unknown: (
        UnknownNameError,
        "1 names belong to no",
        "checkpoint",
        "'1.wieght' .*did you mean '1.weight'",
        "rename",
    ),
}


@pytest.mark.parametrize("live", [False, True], ids=["first load", "reload"])
@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_a_broken_checkpoint_is_one_clear_error_and_loses_nothing(folder, tmp_path, damage, live):
    good = folder_of(tmp_path / "good", SHARDS, seed=1)
    model = make_model()
    if live:
        olq.load(model, folder)
        before, generation = state_bytes(model), model.quant_generation
        x = torch.randn(2, 16, dtype=torch.bfloat16)
        y = model(x)
    kind, problem, where, found, remedy = BROKEN[damage]
    damage(folder)
    with pytest.raises(kind) as error:
        (olq.reload if live else olq.load)(model, folder)
    facts = message(error)
    assert problem in facts["problem"]
    assert re.search(where, facts["where"])
    assert re.search(found, facts["found"])
    assert remedy in facts["remedy"]
    if live:
        assert state_bytes(model) == before  # still the old model, and servable
        assert model.quant_generation == generation
        assert torch.equal(model(x), y)
    (olq.reload if live else olq.load)(model, good)
    fresh = make_model()
    olq.load(fresh, good)
    assert state_bytes(model) == state_bytes(fresh)


@pytest.mark.parametrize(
    ("source", "problem", "found"),
    [
        pytest.param("/nowhere/to/be/found", "no such checkpoint", "nothing at this path", id="no path"),
        pytest.param({}, "no weights to load", "an empty mapping", id="empty mapping"),
        pytest.param([], "no weights to load", "no items", id="empty list"),
        pytest.param(iter(()), "no weights to load", "no items", id="empty iterator"),
        pytest.param(7, "can't be a source", "int", id="a number"),
        pytest.param(None, "can't be a source", "NoneType", id="None"),
        pytest.param({"0.weight": [1.0]}, "a name and a tensor", "('0.weight', list)", id="mapping to lists"),
        pytest.param({3: torch.ones(1)}, "a name and a tensor", "(int, Tensor)", id="names that are numbers"),
        pytest.param([torch.ones(2)], "a name and a tensor", "Tensor", id="tensors alone"),
        pytest.param(["0.weight"], "a name and a tensor", "str", id="names alone"),
        pytest.param([("0.bias", 1, 2, 3)], "a name and a tensor", "('0.bias', int, int, ...)", id="four"),
        pytest.param([("0.weight", None)], "a name and a tensor", "('0.weight', NoneType)", id="no tensor"),
    ],
)
def test_what_is_no_source_is_refused(source, problem, found):
    model = make_model()
    with pytest.raises(SourceError) as error:
        olq.load(model, source)
    assert problem in message(error)["problem"]
    assert found in message(error)["found"]
    olq.load(model, tensors())


def test_a_file_of_another_format_says_so(tmp_path):
    file = tmp_path / "pytorch_model.bin"
    torch.save(tensors(), file)
    with pytest.raises(SourceError) as error:
        olq.load(make_model(), file)
    assert "convert it to safetensors" in message(error)["remedy"]


def test_a_shard_that_vanishes_while_loading_is_named_and_the_load_can_be_repeated(folder):
    model = make_model()

    def lose(done: int, total: int | None, name: str) -> None:
        (folder / SHARD_2).unlink(missing_ok=True)

    with pytest.raises(SourceError) as error:
        olq.load(model, folder, progress=lose)
    assert SHARD_2 in message(error)["where"]
    with pytest.raises(StateError):
        model(torch.randn(2, 16, dtype=torch.bfloat16))
    olq.load(model, tensors())


def test_an_error_of_the_iterator_comes_through_and_the_load_can_be_repeated():
    model = make_model()
    olq.load(model, tensors())

    def broken():
        yield from list(tensors(1).items())[:2]
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        olq.reload(model, broken())
    with pytest.raises(StateError, match="whose load failed"):
        model(torch.randn(2, 16, dtype=torch.bfloat16))
    olq.reload(model, tensors(1))
    fresh = make_model()
    olq.load(fresh, tensors(1))
    assert state_bytes(model) == state_bytes(fresh)
