"""The cut of files into reads covers every byte once, in file order, within a buffer."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from olq.reload.headers import Entry, Header
from olq.reload.staging_plan import plan_reads

SIZES = st.lists(st.lists(st.integers(0, 40) | st.integers(0, 400), max_size=12), max_size=4)


def headers(sizes: list[list[int]]) -> list[Header]:
    """Files with tensors of these sizes behind headers of different lengths."""
    found = []
    for number, file in enumerate(sizes):
        at, entries = 8 + 13 * number, []
        for i, size in enumerate(file):
            entries.append(Entry(f"{number}.{i}", "U8", (size,), at, at + size))
            at += size
        found.append(Header(Path(f"{number}"), tuple(entries), ()))
    return found


@given(sizes=SIZES, buffer=st.integers(1, 200), piece=st.integers(1, 60))
def test_reads_cover_every_byte_of_every_tensor_once_and_in_order(sizes, buffer, piece):
    files = headers(sizes)
    reads = plan_reads(files, buffer, piece)
    flat = [(i, entry) for i, header in enumerate(files) for entry in header.entries]
    seen = {number: [] for number, (_, entry) in enumerate(flat) if entry.nbytes}
    order = []
    for one in reads.pieces:
        assert 0 < one.size <= min(piece, buffer)
        for part in one.parts:
            file, entry = flat[part.tensor]
            assert one.file == file
            assert entry.start + part.into == one.offset + part.at - one.at  # the same byte, said twice
            assert one.at <= part.at
            assert part.at + part.size <= one.at + one.size
            seen[part.tensor].append((part.into, part.into + part.size))
            order.append(part.tensor)
    assert order == sorted(order)
    for number, ranges in seen.items():
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == flat[number][1].nbytes
    assert sum(one.size for one in reads.pieces) == sum(map(sum, sizes))


@given(sizes=SIZES, buffer=st.integers(1, 200), piece=st.integers(1, 60))
def test_pieces_of_a_fill_lie_side_by_side_in_one_buffer(sizes, buffer, piece):
    reads = plan_reads(headers(sizes), buffer, piece)
    assert [one.fill for one in reads.pieces] == sorted(one.fill for one in reads.pieces)
    for number, count in enumerate(reads.fills):
        mine = [one for one in reads.pieces if one.fill == number]
        assert len(mine) == count > 0
        assert [one.at for one in mine] == [0, *(one.at + one.size for one in mine[:-1])]
        assert mine[-1].at + mine[-1].size <= reads.buffer_bytes <= buffer
        assert len({one.file for one in mine}) == 1


def test_many_small_neighbours_are_one_read_and_a_large_tensor_is_several():
    reads = plan_reads(headers([[3] * 20, [500, 7]]), 200, 100)
    assert [(one.size, len(one.parts)) for one in reads.pieces] == [
        (60, 20),
        *[(100, 1)] * 5,
        (7, 1),
    ]
    assert reads.fills == (1, 2, 2, 2)
    assert reads.buffer_bytes == 200


def test_a_small_checkpoint_needs_a_small_buffer():
    assert plan_reads(headers([[5, 6]]), 1 << 27).buffer_bytes == 11
    assert plan_reads(headers([[0, 0]]), 1 << 27).pieces == ()
