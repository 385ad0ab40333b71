"""The audit finds each planted fault, names it, and stays silent where everything was written."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from olq import alloc
from olq.alloc import TensorSpec, allocate, audit, run_audited
from olq.alloc.auditing import Watch, is_last_holder
from olq.alloc.places import boxes_text
from olq.alloc.poison import poison_, still_poison
from olq.errors import CoverageError, StateError
from olq.layout import MNMajor, Nibbles, RowMajor, Swizzle128x4, UE8M0Words

# Faults, each a producer that leaves something out, and what the audit says. One look finds all but the first.


def forgets_one_byte() -> Tensor:
    codes = allocate(TensorSpec((40, 50), torch.uint8), device="cpu", owner="quantize, codes")
    codes.view(-1)[:1234] = 1
    codes.view(-1)[1235:] = 1
    return codes


def leaves_padding_stale() -> Tensor:
    """Swizzled scales without an order: the padding is the producer's, and it writes the data alone."""
    scale = allocate(TensorSpec((128, 8), torch.uint8), device="cpu", owner="quantize, scale")
    order = Swizzle128x4(100, 8)
    flat = scale.view(-1)
    for row in range(100):
        for column in range(8):
            flat[order.offset(row, column)] = 127
    return scale


def stops_before_the_tail() -> Tensor:
    """Whole tiles of 64 rows only."""
    codes = allocate(TensorSpec((200, 32), torch.uint8), device="cpu", owner="quantize, codes")
    codes[:192] = torch.arange(32, dtype=torch.uint8)
    return codes


def leaves_a_gap_between_attention_parts() -> Tensor:
    out, parts = alloc.attention_output(
        {"decode": (0, 5), "prefill": (5, 20)},
        rows=20,
        heads=2,
        head_dim=8,
        dtype=torch.bfloat16,
        device="cpu",
        owner="layers.0.attn",
    )
    parts["decode"].fill_(1)
    parts["prefill"][2:].fill_(2)
    return out


def misses_a_group_of_scales() -> Tensor:
    codes, scale = alloc.fp8_group_output(70, 300, scale_layout="mn_major", device="cpu", owner="silu")
    codes.fill_(1)
    scale[:, :2] = 1.0
    return scale


def misses_a_column_of_swizzled_scales() -> Tensor:
    codes, scale = alloc.mxfp8_output(70, 160, scale_layout="swizzled_128x4", device="cpu", owner="gemm")
    codes.fill_(1)
    order = Swizzle128x4(70, 5)
    for row in range(70):
        for column in (0, 1, 2, 4):
            scale.view(-1)[order.offset(row, column)] = 120
    return scale


def writes_between_strides_nothing() -> Tensor:
    """Rows of 20 bytes every 32, no order: the bytes between rows are the producer's as well."""
    out = allocate(TensorSpec((9, 20), torch.uint8, (32, 1)), device="cpu", owner="copy")
    out.fill_(3)
    return out


FAULTS = {
    forgets_one_byte: "quantize, codes, uint8 [40, 50]: 1 of 2000 bytes were written by nobody, at [24, 34]",
    leaves_padding_stale: "quantize, scale, uint8 [128, 8]: 224 of 1024 bytes were written by nobody, at ",
    stops_before_the_tail: "quantize, codes, uint8 [200, 32]: 256 of 6400 bytes were written by nobody, "
    "at [192:200, 0:32]",
    leaves_a_gap_between_attention_parts: "layers.0.attn, bfloat16 [20, 16]: 64 of 640 bytes were written by nobody, "
    "at [5:7, 0:16]",
    misses_a_group_of_scales: "silu, scale, float32 [70, 3], mn_major: 280 of 864 bytes were written by nobody, "
    "at [0:70, 2]",
    misses_a_column_of_swizzled_scales: "gemm, scale, uint8 [128, 8], swizzled_128x4 of a 70x5 matrix: "
    "70 of 1024 bytes were written by nobody, at [0:70, 3]",
    writes_between_strides_nothing: "copy, uint8 [9, 20], strides [32, 1]: 96 of 276 bytes were written by nobody, "
    "96 of them between elements",
}
NAMES = [fault.__name__ for fault in FAULTS]


@pytest.mark.parametrize(("fault", "text"), FAULTS.items(), ids=NAMES)
def test_two_runs_find_a_planted_fault_to_the_byte(fault, text):
    with pytest.raises(CoverageError) as caught:
        run_audited(fault)
    assert text in caught.value.found


@pytest.mark.parametrize("fault", list(FAULTS)[1:], ids=NAMES[1:])
def test_one_run_finds_a_planted_fault_of_some_bytes(fault):
    """By chance it may blame a written byte in 256 of a slice that lacks others."""
    exact: list[alloc.Finding] = []
    run_audited(fault, strict=False, findings=exact)
    with audit(strict=False) as one:
        kept = fault()
    assert kept.numel()
    assert [finding.owner for finding in one.findings] == [finding.owner for finding in exact]
    for finding, truth in zip(one.findings, exact, strict=True):
        assert set(finding.coordinates) >= set(truth.coordinates)
        assert truth.count <= finding.count <= truth.count * 1.1


def test_the_message_names_tensor_place_and_owner_and_a_way_out():
    with pytest.raises(CoverageError) as caught:
        run_audited(stops_before_the_tail)
    assert str(caught.value) == (
        "Kernel-owned memory has bytes that nobody wrote.\n"
        "  where:  quantize, codes\n"
        "  found:  quantize, codes, uint8 [200, 32]: 256 of 6400 bytes were written by nobody, at [192:200, 0:32]\n"
        "  need:   each byte written: data by its producer, padding by whoever knows the layout\n"
        "  remedy: let the producer write these bytes, or give the spec the order that owns them as padding"
    )


def test_a_single_byte_is_left_unsettled_by_one_run():
    with audit() as one:
        kept = forgets_one_byte()
    assert kept.shape == (40, 50)
    assert not one.findings
    assert one.unsettled >= 1


def test_findings_can_be_collected_without_raising():
    findings: list[alloc.Finding] = []
    run_audited(stops_before_the_tail, strict=False, findings=findings)
    with audit(strict=False) as one:
        kept = stops_before_the_tail()
    assert kept.shape == (200, 32)
    assert len(one.findings) == len(findings) == 1
    assert findings[0].coordinates == tuple((r, c) for r in range(192, 200) for c in range(32))
    assert (findings[0].owner, findings[0].count, findings[0].kind) == ("quantize, codes", 256, "unwritten")


# no false blame

SPECS = st.sampled_from(
    [
        TensorSpec((37, 65), torch.uint8),
        TensorSpec((3, 5, 7), torch.bfloat16, (70, 1, 5)),
        TensorSpec.of(Swizzle128x4(130, 5), lead=(2,)),
        TensorSpec.of(MNMajor(7, 3), torch.float32),
        TensorSpec.of(UE8M0Words(33, 5), torch.int32),
        TensorSpec.of(Nibbles(33, 5)),
        TensorSpec.of(RowMajor(5, 3, 16, 8, value=1.0), torch.float32),
        TensorSpec((), torch.float32),
        TensorSpec((0, 4), torch.float32),
    ]
)


def write_data(t: Tensor, spec: TensorSpec, seed: int, *, unlike: bool = False) -> None:
    """Random bytes to every byte but the padding that the allocator owns; `unlike`: none is what stood there."""
    storage = alloc.memory.storage_elements(t, spec).view(torch.uint8)
    values = torch.randint(
        0, 256, storage.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    if unlike:
        values = torch.where(values == storage, values ^ 1, values)
    storage.copy_(torch.where(is_padding(spec), storage, values))


def is_padding(spec: TensorSpec) -> Tensor:
    """Which bytes are padding that the allocator writes."""
    written = alloc.places.allocator_bytes(spec)
    return torch.zeros(spec.nbytes, dtype=torch.bool) if written is None else written[0]


@given(SPECS, st.integers(0, 10**6))
def test_memory_that_is_written_is_never_blamed(spec, seed):
    def produce(unlike: bool = False) -> Tensor:
        t = allocate(spec, device="cpu", owner="test")
        write_data(t, spec, seed, unlike=unlike)
        return t

    run_audited(produce)
    with (
        audit()
    ):  # one run can't tell poison from data that happens to be the same: one of 65536 numbers of 16 bits
        produce(unlike=True)


@given(SPECS, st.integers(0, 10**6), st.data())
def test_two_runs_find_exactly_the_bytes_left_out(spec, seed, data):
    mine = (~is_padding(spec)).nonzero().flatten().tolist()
    left_out = data.draw(st.lists(st.sampled_from(mine), unique=True, max_size=9)) if mine else []

    def produce() -> Tensor:
        t = allocate(spec, device="cpu", owner="test")
        storage = alloc.memory.storage_elements(t, spec).view(torch.uint8)
        old = storage[left_out].clone()
        write_data(t, spec, seed)
        storage[left_out] = old
        return t

    findings: list[alloc.Finding] = []
    run_audited(produce, strict=False, findings=findings)
    assert sum(finding.count for finding in findings) == len(left_out)
    assert all(finding.kind == "unwritten" for finding in findings)


@given(
    st.sampled_from([torch.uint8, torch.int32, torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 99),
)
def test_the_two_poisons_differ_in_each_byte_and_floats_read_as_nan_then_as_numbers(dtype, seed):
    first, second = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    poison_(first, dtype, seed)
    poison_(second, dtype, seed, flipped=True)
    assert (first != second).all()
    assert (
        len(still_poison(first, dtype, seed)) == len(still_poison(second, dtype, seed, flipped=True)) == 4096
    )
    if dtype.is_floating_point:
        assert first.view(dtype).isnan().all()
        assert second.view(dtype).isfinite().all()
        made = (torch.zeros(1) / torch.zeros(1)).to(dtype).view(torch.uint8)
        whole = first.view(-1, dtype.itemsize)
        assert not (whole == made).all(1).any()


def test_the_pattern_of_a_large_storage_is_the_same_in_poison_and_verdict():
    storage = torch.zeros(3 * (1 << 20) + 5, dtype=torch.uint8)
    poison_(storage, torch.uint8, 7)
    assert len(still_poison(storage, torch.uint8, 7)) == storage.numel()
    assert len(still_poison(storage, torch.uint8, 8)) < storage.numel() / 200
    storage[2_500_000] ^= 1
    assert len(still_poison(storage, torch.uint8, 7)) == storage.numel() - 1


# writing what is not the producer's


@pytest.mark.parametrize("run", ["once", "twice"])
def test_padding_that_a_producer_writes_over_is_found(run):
    """A tile of 32 rows stored whole, though the matrix has 30."""

    def produce() -> Tensor:
        spec = TensorSpec.of(Swizzle128x4(30, 4), lead=(2,))
        scale = allocate(spec, device="cpu", owner="gemm, scale")
        scale.view(2, 32, 16)[:, :, :4] = 120
        return scale

    def produce_in_block() -> None:
        with audit():
            produce()

    with pytest.raises(CoverageError) as caught:
        run_audited(produce) if run == "twice" else produce_in_block()
    assert str(caught.value) == (
        "Padding of kernel-owned memory was written over.\n"
        "  where:  gemm, scale\n"
        "  found:  gemm, scale, uint8 [2, 128, 4], swizzled_128x4 of a 30x4 matrix: "
        "16 of 1024 bytes of padding were written over, at [0:2, 30:32, 0:4]\n"
        "  need:   each byte written: data by its producer, padding by whoever knows the layout\n"
        "  remedy: let the producer write logical elements only, masked at the edges"
    )


def test_writing_its_own_value_to_padding_is_fine():
    def produce() -> Tensor:
        scale = allocate(TensorSpec.of(Swizzle128x4(30, 4)), device="cpu", owner="gemm, scale")
        return scale.fill_(0)

    run_audited(produce)


# reading what nobody wrote


def test_two_runs_find_a_value_that_was_computed_from_unwritten_memory():
    def produce() -> Tensor:
        scale = allocate(TensorSpec((4, 4), torch.float32), device="cpu", owner="scale")
        scale[:3] = 2.0
        out = allocate(TensorSpec((4, 4), torch.float32), device="cpu", owner="gemm")
        out.copy_(scale.amax(0, keepdim=True).expand(4, 4))
        scale[3:] = 2.0  # written after it was read
        return out

    with pytest.raises(CoverageError) as caught:
        run_audited(produce)
    assert str(caught.value).startswith("Something read kernel-owned memory before anybody wrote it.\n")
    assert "gemm, float32 [4, 4]" in caught.value.found
    assert "bytes depend on memory that nobody wrote, at [0:4, 0:4]" in caught.value.found
    assert caught.value.remedy == "let a producer write these bytes first, or mask the read"


def test_two_runs_compare_what_the_call_returns():
    def forward() -> dict[str, list[Tensor]]:
        codes = allocate(TensorSpec((4, 4), torch.uint8), device="cpu", owner="codes")
        padded = codes.float()
        codes.fill_(1)
        return {"logits": [torch.ones(2), padded.sum(0)]}

    with pytest.raises(CoverageError, match=r"the returned value\['logits'\]\[1\], torch.float32 \[4\]"):
        run_audited(forward)


def test_two_runs_return_what_the_call_returns():
    assert run_audited(lambda: (1, "a")) == (1, "a")
    assert run_audited(lambda: torch.arange(3)).tolist() == [0, 1, 2]


def test_runs_that_allocate_differently_are_refused():
    sizes = iter([3, 4])
    with pytest.raises(StateError) as caught:
        run_audited(
            lambda: allocate(TensorSpec((next(sizes),), torch.uint8), device="cpu", owner="f").fill_(0)
        )
    assert str(caught.value) == (
        "The two runs of an audited call allocated differently.\n"
        "  where:  olq.alloc.run_audited\n"
        "  found:  f [3] torch.uint8 in the first run, f [4] torch.uint8 in the second, at the same place\n"
        "  need:   the same tensors in the same order each time\n"
        "  remedy: clear caches between the runs, or use the block form: with olq.alloc.audit()"
    )


# who is judged, and when


def untouched(owner: str = "forgotten") -> Tensor:
    return allocate(TensorSpec((64,), torch.uint8), device="cpu", owner=owner)


def test_unwritten_memory_is_found_though_it_was_dropped_before_the_end():
    with audit(strict=False) as one:
        for _ in range(200):
            stops_before_the_tail()
    tail = {(row, column) for row in range(192, 200) for column in range(32)}
    assert len(one.findings) == 200
    assert all(tail <= set(finding.coordinates) for finding in one.findings)


def test_memory_made_and_dropped_without_a_byte_written_is_not_reported():
    with audit() as one:
        untouched()
        with pytest.raises(ZeroDivisionError):
            _ = untouched(), 1 / 0
    assert not one.findings
    with audit(strict=False) as one:
        kept = untouched()
    assert [finding.owner for finding in one.findings] == ["forgotten"]
    assert one.findings[0].count == kept.numel()


def test_abandoned_memory_is_not_reported():
    with audit() as one:
        kept = untouched(), torch.nn.Parameter(untouched(), requires_grad=False)
        alloc.abandon(*kept)
    assert not one.findings


def test_the_innermost_audit_judges_and_the_outer_one_goes_on():
    with audit(strict=False) as outer:
        with audit(strict=False) as inner:
            mine = untouched("inner")
        yours = untouched("outer")
    assert mine.shape == yours.shape
    assert [finding.owner for finding in inner.findings] == ["inner"]
    assert [finding.owner for finding in outer.findings] == ["outer"]


def test_an_error_in_the_block_is_the_blocks_own():
    def stop() -> None:
        with audit():
            raise ZeroDivisionError(untouched().shape)

    before = alloc.memory.on_allocate
    with pytest.raises(ZeroDivisionError):
        stop()
    assert alloc.memory.on_allocate is before


def test_memory_made_in_another_thread_is_judged_too():
    made: list[Tensor] = []
    with audit(strict=False) as one:
        thread = threading.Thread(target=lambda: made.append(untouched("worker")))
        thread.start()
        thread.join()
    assert [finding.owner for finding in one.findings] == ["worker"]


def test_a_buffer_that_exists_can_be_watched():
    spec = TensorSpec.of(MNMajor(7, 3), torch.float32)
    buffer = allocate(spec, device="cpu", owner="step")
    buffer.fill_(0)
    with audit() as one:
        one.watch(buffer, owner="second step", spec=spec)
        buffer.fill_(2.0)
    with audit(strict=False) as one:
        one.watch(buffer, owner="third step", spec=spec)
        buffer[:6] = 2.0
    assert [str(finding).split(", at ")[1] for finding in one.findings] == ["[6, 0:3]"]
    plain = torch.zeros(5, 6)
    with audit(strict=False) as one:
        one.watch(plain, owner="plain")
        plain[:, 2:] = 1
    assert [str(finding) for finding in one.findings] == [
        "plain, float32 [5, 6]: 40 of 120 bytes were written by nobody, at [0:5, 0:2]"
    ]


def test_an_audit_lets_go_of_what_the_program_dropped():
    with audit() as one:
        for _ in range(1000):
            untouched().fill_(7)
        held = sum(watch.storage is not None for watch in one.watches)
    assert held <= 128


def test_a_last_holder_is_told_from_one_of_two():
    t = torch.zeros(64, dtype=torch.uint8)
    view = t[3:]
    assert not is_last_holder(t)
    del view
    assert is_last_holder(t)


def test_off_the_audit_leaves_no_hook_and_memory_alone():
    before = alloc.memory.on_allocate
    with audit():
        untouched().fill_(0)
        assert alloc.memory.on_allocate is not None
    assert alloc.memory.on_allocate is before


def test_a_watch_of_nothing_holds_nothing():
    watch = Watch("x", TensorSpec((0,), torch.uint8), 0, False, torch.empty(0, dtype=torch.uint8))
    assert not len(watch.judge())
    assert not watch.is_untouched


# words for places


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([(r, c) for r in range(5, 128) for c in range(4)], "[5:128, 0:4]"),
        ([(0, 0), (2, 0), (2, 1)], "[0, 0], [2, 0:2]"),
        ([(r, c) for r in range(3) for c in (0, 2)], "[0:3, 0], [0:3, 2]"),
        ([()], "[]"),
        ([(i, 0) for i in range(0, 20, 2)], "[0, 0], [2, 0], [4, 0], [6, 0] and 6 more places"),
    ],
)
def test_coordinates_are_merged_into_boxes(places, text):
    assert boxes_text(places) == text
