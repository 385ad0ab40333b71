"""Loads through staging, on a device that is late, with a CPU's arithmetic: bytes and errors are those of any load."""

import json
import struct
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import _TYPES, load_file, save_file

import olq
from olq.errors import ConfigError, CoverageError
from olq.reload import session as session_module
from olq.reload import sources as sources_module
from olq.reload.carriers import CudaCarrier, carrier_for
from olq.reload.headers import read_header
from olq.reload.session import Session
from olq.reload.sources import open_source
from olq.reload.staging import Staged
from olq.reload.staging_plan import DTYPES
from reload import test_sources as mapped
from reload.fused_model import Fused, sources
from reload.plans import METHODS, method_id
from reload.small_models import Small, as_bytes, fresh, live, places, state
from reload.staging_device import LateDevice

SMALL = olq.Staging(buffer_bytes=1000, threads=3)


@pytest.fixture
def devices(monkeypatch):
    """Every load of files goes through a late device; those that were made."""
    made: list[LateDevice] = []

    def carrier(progress, shadow):
        made.append(LateDevice(len(made), eager=True))
        return made[-1]

    monkeypatch.setattr(session_module, "carrier_for", carrier)
    yield made
    assert not [one for one in threading.enumerate() if one.name.startswith("olq staging")]


# What the mapped source promises holds here too


@pytest.mark.parametrize("live", [False, True], ids=["first load", "reload"])
@pytest.mark.parametrize("damage", mapped.BROKEN, ids=lambda damage: damage.__name__)
def test_a_broken_checkpoint_is_one_clear_error_and_loses_nothing(devices, tmp_path, damage, live):
    folder = mapped.folder_of(tmp_path / "checkpoint", mapped.SHARDS)
    mapped.test_a_broken_checkpoint_is_one_clear_error_and_loses_nothing(folder, tmp_path, damage, live)
    assert devices
    assert devices[-1].threads


def test_other_promises_of_a_source_of_files(devices, tmp_path):
    def folder(name: str):
        return mapped.folder_of(tmp_path / name, mapped.SHARDS)

    mapped.test_every_kind_of_source_gives_the_same_bytes(folder("a"), tmp_path)
    mapped.test_other_files_beside_an_index_are_left_alone(folder("b"))
    mapped.test_an_overwritten_file_is_read_again(folder("c"))
    assert all(one.threads for one in devices)


def test_a_shard_that_is_gone_when_its_turn_comes_is_named_and_the_load_can_be_repeated(
    devices, tmp_path, monkeypatch
):
    folder = mapped.folder_of(tmp_path / "checkpoint", mapped.SHARDS)
    model = mapped.make_model()
    start = Staged._start

    def lose(self):
        (folder / mapped.SHARD_2).unlink()
        start(self)

    monkeypatch.setattr(Staged, "_start", lose)
    with pytest.raises(olq.errors.SourceError) as error:
        olq.load(model, folder)
    facts = mapped.message(error)
    assert mapped.SHARD_2 in facts["where"]
    assert "FileNotFoundError" in facts["found"]
    olq.load(model, mapped.tensors())


# Bytes


@settings(max_examples=25)
@given(data=st.data())
def test_a_staged_load_and_reload_have_the_bytes_of_any_other(tmp_path_factory, data):
    method, params = data.draw(st.sampled_from(METHODS))
    stable = data.draw(st.sampled_from(("transient", "stable")))
    staging = olq.Staging(data.draw(st.integers(1, 5000)), data.draw(st.integers(1, 4)))
    seed = data.draw(st.integers(0, 99))
    folder = tmp_path_factory.mktemp("fused")
    model, cold = Fused(method, **params), Fused(method, **params)
    olq.load(cold, sources(2).items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_module, "carrier_for", lambda *_: LateDevice(seed, eager=True))
        for number in (1, 2):
            save_file(sources(number), folder / "model.safetensors")
            report = olq.load(model, folder, staging=staging, sources=stable)
    assert report.replayed == 4  # what was recorded of one staged load is repeated by the next
    assert as_bytes(model) == as_bytes(cold)


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_plain_module_loads_and_reloads(devices, tmp_path, method):
    config = olq.QuantConfig(method=method[0], params=method[1])
    weights = state(Small())
    save_file(weights, tmp_path / "model.safetensors")
    model, cold = live(config), fresh(config)
    at = places(model)
    olq.reload(model, tmp_path, staging=SMALL)
    olq.load(cold, weights)
    assert as_bytes(model) == as_bytes(cold)
    assert places(model) == at
    assert (
        devices[0].peak <= 2 * 1000 + 50 * 32 * 2 * 2
    )  # two buffers, one larger tensor, and the one in hand


def test_a_saved_quantized_model_loads(devices, tmp_path):
    model = live()
    save_file(state(model), tmp_path / "model.safetensors")
    other = fresh()
    olq.load(other, tmp_path, staging=SMALL)
    assert as_bytes(other) == as_bytes(model)


def test_a_loader_may_keep_what_it_was_given(devices, tmp_path):
    """Like tensors of any other source: one that waits for its sibling, or all of them at once."""

    class Collects(Fused):
        def load_weights(self, weights) -> None:
            kept = dict(weights)
            super().load_weights((name, kept[name]) for name in ("v", "k", "norm", "q"))

    save_file(sources(1), tmp_path / "model.safetensors")
    model, cold = Collects(), Fused()
    olq.load(model, tmp_path, staging=SMALL)
    olq.load(cold, sources(1).items())
    assert as_bytes(model) == as_bytes(cold)


def test_a_thread_that_pulls_ahead_gets_the_right_bytes(devices, tmp_path):
    class Threaded(Fused):
        def load_weights(self, weights) -> None:
            got = []
            thread = threading.Thread(target=lambda: got.extend(weights))
            thread.start()
            thread.join()
            super().load_weights(got)

    save_file(sources(1), tmp_path / "model.safetensors")
    model, cold = Threaded(), Fused()
    olq.load(model, tmp_path, staging=SMALL)
    olq.load(cold, sources(1).items())
    assert as_bytes(model) == as_bytes(cold)


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_of_the_loader_ends_the_threads_while_its_traceback_lives(devices, tmp_path, kind):
    class Fails(Fused):
        def load_weights(self, weights) -> None:
            next(iter(weights))
            raise kind

    save_file(sources(1), tmp_path / "model.safetensors")
    with pytest.raises(kind) as error:
        olq.load(Fails(), tmp_path, staging=olq.Staging(100, 3))
    assert error.tb is not None
    assert not [one for one in threading.enumerate() if one.name.startswith("olq staging")]
    assert devices[0].attached_now == 0


def test_stable_sources_of_files_do_not_pile_up_on_the_device(devices, tmp_path, monkeypatch):
    """Their queue is written whenever it holds a buffer's worth."""
    save_file(sources(1), tmp_path / "model.safetensors")
    model = Fused()
    olq.load(model, tmp_path, staging=SMALL)
    flushed = []
    flush = session_module.Replay.flush
    monkeypatch.setattr(session_module.Replay, "flush", lambda self: flushed.append(1) or flush(self))
    olq.load(model, tmp_path, staging=SMALL, sources="stable")
    assert len(flushed) >= 3  # in between, and at the commit
    held = devices[-1].peak
    assert held <= 2 * 1000 + 2 * 48 * 64 * 2


def test_what_is_missing_is_named_after_a_staged_load(devices, tmp_path):
    save_file({"q": sources(1)["q"]}, tmp_path / "model.safetensors")
    with pytest.raises(CoverageError, match="norm"):
        olq.load(Fused(), tmp_path)


# Who is staged


def test_staging_none_maps_the_files(devices, tmp_path):
    save_file(sources(1), tmp_path / "model.safetensors")
    olq.load(Fused(), tmp_path, staging=None)
    assert devices == []


def test_other_sources_than_files_are_not_staged(devices):
    olq.load(Fused(), sources(1).items())
    assert devices == []


def test_a_dtype_without_a_name_in_torch_is_read_by_safetensors(devices, tmp_path, monkeypatch):
    save_file(sources(1), tmp_path / "model.safetensors")
    monkeypatch.setattr(sources_module, "DTYPES", {})
    olq.load(Fused(), tmp_path)
    assert not devices[0].threads


def test_every_dtype_has_the_bytes_that_safetensors_reads(tmp_path):
    assert _TYPES.items() <= DTYPES.items()
    assert DTYPES.keys() - _TYPES.keys() <= {"F8_E8M0"}  # which safetensors reads, but does not list
    raw = torch.arange(48, dtype=torch.uint8) % 2  # of which every dtype's bytes are legal
    given = {name: raw.view(dtype).reshape(2, -1) for name, dtype in DTYPES.items()}
    given |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 5), "last": torch.empty(2, 0)}
    save_file({name: t.clone() for name, t in given.items()}, tmp_path / "all.safetensors")
    staged = Staged([read_header(tmp_path / "all.safetensors")], LateDevice(eager=True), SMALL)
    found = dict(staged.items())
    want = load_file(tmp_path / "all.safetensors")
    assert list(found) == [entry.name for entry in read_header(tmp_path / "all.safetensors").entries]
    for name, tensor in want.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        if tensor.numel():
            assert bytes(found[name].reshape(-1).view(torch.uint8).tolist()) == bytes(
                tensor.reshape(-1).view(torch.uint8).tolist()
            ), name


@pytest.mark.parametrize(("name", "size"), [("F8_E8M0", 4), ("F8_E4M3FNUZ", 4), ("F4", 2)])
def test_a_scale_of_one_byte_leaves_a_checkpoint_staged_and_half_bytes_map_it(tmp_path, name, size):
    header = json.dumps({"a": {"dtype": name, "shape": [4], "data_offsets": [0, size]}}).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(1, size + 1)))
    source = open_source(file, lambda: LateDevice(eager=True))
    assert (source.staged is None) == (name == "F4")
    ((_, tensor),) = source.items
    want = load_file(file)["a"]
    assert (tensor.dtype, tensor.shape) == (want.dtype, want.shape)
    assert bytes(tensor.view(torch.uint8).tolist()) == bytes(range(1, size + 1))


@pytest.mark.parametrize(
    ("devices", "shadow", "found"),
    [
        (["cuda:1", "cuda:1"], None, 1),
        (["cuda:0"], "device", 0),
        (["cuda:0"], "host", None),
        (["cuda:0", "cuda:1"], None, None),
        (["cuda:0", "cpu"], None, None),
        (["cpu"], None, None),
        ([], None, None),
    ],
)
def test_a_load_is_staged_if_all_of_it_lives_on_one_cuda_device(devices, shadow, found):
    carrier = carrier_for(map(torch.device, devices), shadow)
    assert (carrier is None) if found is None else carrier.device == torch.device("cuda", found)
    assert carrier is None or isinstance(carrier, CudaCarrier)


def test_a_model_on_the_cpu_is_not_staged():
    with Session(Fused()) as session:
        assert session._carrier() is None
        session.load(sources(1).items())


@pytest.mark.parametrize("value", [True, 8, "auto", {"threads": 2}])
def test_an_option_that_is_no_staging_is_refused(value):
    with pytest.raises(ConfigError) as error:
        olq.load(Fused(), sources(1).items(), staging=value)
    assert error.value.where == "staging"
    assert error.value.found == repr(value)
    assert error.value.need == "olq.Staging(...) or None"
