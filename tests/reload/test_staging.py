"""Files read ahead by threads, on a device that is late: bytes, bounds, order, errors, and the end."""

import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from olq.errors import ConfigError, SourceError, StateError
from olq.reload import staging
from olq.reload.headers import identity_of, read_header
from olq.reload.options import Staging
from olq.reload.staging import Staged
from reload.staging_device import LateDevice

SIZES = st.lists(
    st.lists(st.integers(0, 40) | st.integers(0, 400), min_size=1, max_size=10), min_size=1, max_size=4
)


def write(folder: Path, sizes: list[list[int]], seed: int = 0) -> tuple[list[Path], dict[str, bytes]]:
    """Files of uint8 tensors, and what is in them."""
    draw, files, content = random.Random(seed), [], {}
    for number, file in enumerate(sizes):
        mine = {f"{number}.{i:02}": draw.randbytes(size) for i, size in enumerate(file)}
        content |= mine
        files.append(folder / f"{number}.safetensors")
        tensors = {n: torch.tensor(list(b), dtype=torch.uint8) for n, b in mine.items()}
        save_file(tensors, files[-1])
    return files, content


def staged(files: list[Path], device: LateDevice, buffer: int, threads: int = 3, piece: int = 16) -> Staged:
    return Staged([read_header(file) for file in files], device, Staging(buffer, threads), piece)


def threads_of_staging() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("olq staging")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert threads_of_staging() == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@settings(max_examples=60)
@given(data=st.data(), sizes=SIZES)
def test_any_sizes_give_the_right_bytes_in_file_order_within_the_bounds(shared, data, sizes):
    buffer = data.draw(st.integers(1, 300), label="buffer")
    piece = data.draw(st.integers(1, 80), label="piece")
    threads = data.draw(st.integers(1, 6), label="threads")
    keep = data.draw(st.integers(0, 3), label="tensors that the consumer keeps")
    pace = data.draw(st.integers(0, 4), label="pace of the device")
    files, content = write(shared, sizes)
    device = LateDevice(data.draw(st.integers(0, 99)), pace=pace)
    source = staged(files, device, buffer, threads, piece)
    names, found, kept = [], {}, []
    for name, tensor in source.items():
        assert tensor.shape == (len(content[name]),)
        names.append(name)
        device.use(tensor, found.setdefault(name, bytearray()))
        if len(kept) < keep:
            kept.append((name, tensor))
        del tensor
    device.drain()
    assert names == sorted(content)
    assert {name: bytes(b) for name, b in found.items()} == content
    assert all(bytes(t.tolist()) == content[name] for name, t in kept)  # what is kept stays what it is
    largest = max(map(len, content.values()))
    most = 2 * buffer + (largest if largest > buffer else 0) + sum(t.numel() for _, t in kept)
    assert device.peak <= most
    assert len(device.buffers) <= 2
    assert all(b.numel() <= buffer for b in device.buffers)
    assert len(device.threads) <= threads
    assert device.attached_now == 0
    kept.clear()
    assert device.held == 0


@pytest.mark.parametrize(("reader", "consumer"), [(0.0, 0.004), (0.004, 0.0)], ids=["slow use", "slow read"])
def test_whoever_is_slow_the_bytes_are_right(tmp_path, monkeypatch, reader, consumer):
    files, content = write(tmp_path, [[300, 20, 0, 50], [7, 700, 1]])
    device = LateDevice(3)
    if reader:
        fast = LateDevice.copy

        def copy(self, into, source):
            time.sleep(reader)
            fast(self, into, source)

        monkeypatch.setattr(LateDevice, "copy", copy)
    found = {}
    for name, tensor in staged(files, device, 100).items():
        time.sleep(consumer)
        device.use(tensor, found.setdefault(name, bytearray()))
        del tensor
    device.drain()
    assert {name: bytes(b) for name, b in found.items()} == content


def test_reading_goes_on_while_the_consumer_is_busy(tmp_path):
    """Two buffers' worth of tensors are on their way before the first one has been given up."""
    files, _ = write(tmp_path, [[50] * 10])
    device = LateDevice()
    items = staged(files, device, 100).items()
    next(items)
    deadline = time.monotonic() + 20
    while device.held < 200 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert device.held == 200
    items.close()


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_closing_early_ends_threads_and_frees_memory_that_copies_still_write(tmp_path, taken):
    files, _ = write(tmp_path, [[90] * 12])
    for seed in range(10):
        device = LateDevice(seed, pace=0)
        source = staged(files, device, 100)
        items = source.items()
        for _ in range(taken):
            next(items)
        items.close()
        source.stop()
        assert threads_of_staging() == []
        after = [device.memory(90) for _ in range(4)]  # its next owner writes, on the consumer's stream
        for i in range(4):
            device.fill(after[i], i)
        device.drain()
        assert [one.unique().tolist() for one in after] == [[0], [1], [2], [3]]
        after.clear()
        assert device.held == 0


def test_a_dropped_iterator_ends_its_threads(tmp_path):
    files, _ = write(tmp_path, [[90] * 12])
    items = staged(files, LateDevice(), 100).items()
    next(items)
    del items
    gc.collect()
    assert threads_of_staging() == []


def test_an_interrupt_while_waiting_ends_the_threads(tmp_path, monkeypatch):
    files, _ = write(tmp_path, [[90] * 12])
    device = LateDevice()
    source = staged(files, device, 100)
    items = source.items()
    next(items)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(source._news, "wait", interrupted)
    monkeypatch.setattr(LateDevice, "copy", lambda *_: time.sleep(0.01))  # so that it has to wait
    with pytest.raises(KeyboardInterrupt):
        list(items)
    assert threads_of_staging() == []


def test_a_source_is_read_once_and_not_after_its_end(tmp_path):
    files, _ = write(tmp_path, [[5, 6]])
    source = staged(files, LateDevice(), 100)
    assert len(list(source.items())) == 2
    with pytest.raises(StateError, match="The reading of these files has ended"):
        next(source.items())
    source = staged(files, LateDevice(), 100)
    items = source.items()
    next(items)
    source.stop()  # by the session, while a thread of the engine still pulls
    with pytest.raises(StateError, match="after the load that opened the files had ended"):
        next(items)


# Errors


def test_a_file_cut_short_while_loading_is_named_with_the_tensor(tmp_path):
    files, _ = write(tmp_path, [[10], [50, 60]])
    headers = [read_header(file) for file in files]
    files[1].write_bytes(files[1].read_bytes()[:-20])
    short = [headers[0], type(headers[1])(files[1], headers[1].entries, read_identity(files[1]))]
    with pytest.raises(SourceError) as error:
        list(Staged(short, LateDevice(), Staging(1000, 4)).items())
    assert error.value.where == f"{files[1]}, in bytes of '1.00', '1.01'"
    assert error.value.found == f"EOFError: the file ends at byte {files[1].stat().st_size}"
    assert "could not be read to its end" in str(error.value)
    assert "load again" in error.value.remedy


def read_identity(file: Path) -> tuple[int, ...]:
    facts = file.stat()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


@pytest.mark.parametrize("change", ["replaced", "written to", "gone", "a folder"])
def test_a_file_that_is_not_the_one_that_was_checked_is_refused(tmp_path, change):
    files, _ = write(tmp_path, [[10], [50, 60]])
    for file in files:
        os.utime(file, (1, 1))  # long ago, for any clock
    source = staged(files, LateDevice(), 1000)
    if change == "replaced":
        write(tmp_path, [[10], [50, 60]], seed=1)
    elif change == "written to":
        with files[1].open("r+b") as raw:
            raw.seek(-1, 2)
            raw.write(b"x")
    else:
        files[1].unlink()
    if change == "a folder":
        files[1].mkdir()
    with pytest.raises(SourceError) as error:
        list(source.items())
    assert str(tmp_path if change == "replaced" else files[1]) in error.value.where  # two threads, two files
    reason = {"gone": "FileNotFoundError", "a folder": "IsADirectoryError"}
    assert reason.get(change, "another file, or another content") in error.value.found


@pytest.mark.parametrize("change", ["written to", "cut and extended", "replaced", "unlinked"])
def test_a_file_that_changes_while_it_is_open_gives_an_error_and_no_wrong_byte(tmp_path, change):
    (file,), content = write(tmp_path, [[90] * 40])
    os.utime(file, (1, 1))  # long ago, for any clock
    size = file.stat().st_size
    source = staged([file], LateDevice(1, eager=True), 100, threads=1)
    items = source.items()
    found = dict([next(items)])
    if change == "written to":
        with file.open("r+b") as raw:
            raw.seek(size - 1000)
            raw.write(b"x" * 1000)
    elif change == "cut and extended":
        os.truncate(file, size - 1000)
        os.truncate(file, size)
    else:
        file.unlink()
    if change in ("replaced", "unlinked"):
        if change == "replaced":
            write(tmp_path, [[90] * 40], seed=1)
        found |= dict(items)
        assert len(found) == 40
    else:
        with pytest.raises(SourceError, match="could not be read to its end") as error:
            found.update(items)  # keeps what came before the error
        assert error.value.where == str(file)
        assert error.value.found == "another file, or another content, than when the load began"
    assert all(bytes(tensor.tolist()) == content[name] for name, tensor in found.items())


def test_a_file_written_to_while_its_last_piece_is_read_is_refused(tmp_path, monkeypatch):
    (file,), _ = write(tmp_path, [[90]])
    seen = []

    def first_look_is_good(facts):  # the write comes between the opening and the last byte
        seen.append(identity_of(facts))
        return seen[0] if len(seen) == 1 else (*seen[0][:-1], seen[0][-1] + 1)

    source = staged([file], LateDevice(), 1000, piece=1000)
    monkeypatch.setattr(staging, "identity_of", first_look_is_good)
    with pytest.raises(SourceError, match="another content, than when the load began"):
        list(source.items())
    assert len(seen) == 2


def test_a_second_consumer_is_refused_and_the_first_goes_on(tmp_path):
    files, content = write(tmp_path, [[90] * 12])
    source = staged(files, LateDevice(1, eager=True), 100)
    items = source.items()
    found = dict([next(items)])
    with pytest.raises(StateError, match="These files are being read already") as error:
        next(source.items())
    assert error.value.where == str(files[0])
    assert error.value.found == "tensors asked for a second time, while they are handed out for the first"
    found |= dict(items)
    assert {name: bytes(t.tolist()) for name, t in found.items()} == content


@pytest.mark.parametrize("method", ["copy", "host_buffer", "finish"])
def test_an_error_of_the_carrier_is_not_one_of_a_file_and_names_its_piece(tmp_path, monkeypatch, method):
    files, _ = write(tmp_path, [[90] * 3, [50] * 3])
    own = OSError(5, "no such link")

    def fail(self, *_):
        raise own

    monkeypatch.setattr(LateDevice, method, fail)
    with pytest.raises(OSError, match="no such link") as error:
        list(staged(files, LateDevice(), 90, threads=1, piece=90).items())
    assert error.value is own
    # Two slots: the third piece waits for the copies out of the first.
    assert own.__notes__ == [f"while olq staged {files[0]}, in bytes of '0.00'"]


@pytest.mark.parametrize("started", [0, 2])
def test_a_thread_that_cannot_start_is_an_error_with_a_way_out(tmp_path, monkeypatch, started):
    files, _ = write(tmp_path, [[90] * 12])
    start, count = threading.Thread.start, []

    def limited(self):
        if len(count) == started:
            raise RuntimeError("can't start new thread")
        count.append(self)
        start(self)

    source = staged(files, LateDevice(), 100, threads=4)
    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(ConfigError, match="A thread that reads files can't be started") as error:
        list(source.items())
    assert error.value.where == "olq.Staging(threads=...)"
    assert error.value.found == f"can't start new thread, after {started} of 4"
    assert "staging=olq.Staging(threads=...)" in error.value.remedy
    assert threads_of_staging() == []


def test_errors_of_several_threads_are_one_error_that_counts_the_others(tmp_path, monkeypatch):
    files, _ = write(tmp_path, [[90] * 12])
    together = threading.Barrier(3)

    def fail(self, into, source):
        together.wait(10)
        raise ValueError(f"no copy of {source.numel()} bytes")

    monkeypatch.setattr(LateDevice, "copy", fail)
    with pytest.raises(ValueError, match="no copy of 16 bytes") as error:
        list(staged(files, LateDevice(), 100, threads=3).items())
    notes = error.value.__notes__
    assert notes[0] == f"while olq staged {files[0]}, in bytes of '0.00'"
    assert notes[1:] == ["another reading thread failed too: no copy of 16 bytes"] * 2


def test_an_error_that_is_kept_holds_no_buffer(tmp_path, monkeypatch):
    files, _ = write(tmp_path, [[90] * 12])
    slots = weakref.WeakSet()

    class Slot(staging._Slot):
        def __init__(self, memory):
            super().__init__(memory)
            slots.add(self)

    monkeypatch.setattr(staging, "_Slot", Slot)
    source = staged(files, LateDevice(), 100, threads=1)
    files[0].write_bytes(files[0].read_bytes()[:-100])
    monkeypatch.setattr(staging, "identity_of", lambda facts: source._headers[0].identity)
    with pytest.raises(SourceError, match="EOFError") as error:
        list(source.items())
    assert error.value.__cause__.__traceback__ is not None
    assert not slots


def test_no_page_locked_memory_is_an_error_with_a_way_out(tmp_path, monkeypatch):
    files, _ = write(tmp_path, [[90] * 12])

    def none(self, size):
        raise ConfigError(
            "There is no page-locked memory.", where="here", found="none", need="some", remedy="less"
        )

    monkeypatch.setattr(LateDevice, "host_buffer", none)
    with pytest.raises(ConfigError, match="There is no page-locked memory"):
        list(staged(files, LateDevice(), 100).items())


@pytest.mark.parametrize(
    "values", [{"buffer_bytes": 0}, {"threads": 0}, {"threads": 2.0}, {"buffer_bytes": True}]
)
def test_sizes_are_positive_integers(values):
    ((name, value),) = values.items()
    with pytest.raises(ConfigError, match="Staging needs positive integers") as error:
        Staging(**values)
    assert error.value.where == f"olq.Staging({name}=...)"
    assert error.value.found == repr(value)
