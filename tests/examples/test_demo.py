"""The demo runs in its short form, and what it prints is what it promises."""

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the demo's packages: matplotlib, tokenizers, tqdm")
pytest.importorskip("tokenizers", reason="needs the demo's packages: matplotlib, tokenizers, tqdm")
pytest.importorskip("tqdm", reason="needs the demo's packages: matplotlib, tokenizers, tqdm")

from examples.demo.__main__ import SHORT, main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the demo printed, and the folder that it wrote to."""
    out = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *words: lines.append(" ".join(map(str, words))))
        main(["--short", "--out", str(out)])
    return "\n".join(lines), out


def test_the_table_has_a_row_for_each_method_and_quantized_ones_are_smaller(run):
    text, _ = run
    rows = {}
    for name in SHORT:
        found = re.search(rf"^{re.escape(name)}  +(.*)$", text, re.MULTILINE)
        assert found, f"no row for {name}:\n{text}"
        rows[name] = found[1].replace(",", "").split()
    bits, weights, peak = ({name: float(row[i]) for name, row in rows.items()} for i in range(3))
    assert bits["bf16"] == 16
    assert 8 <= bits["fp8 channel"] < 9
    assert 4.5 <= bits["nvfp4"] < 5
    assert weights["nvfp4"] < weights["fp8 channel"] < weights["bf16"]
    # The quantizer's workspace is a third of so small a model: what it takes may turn the two methods around.
    assert max(peak["nvfp4"], peak["fp8 channel"]) < peak["bf16"]


def test_the_reload_keeps_addresses_and_equals_a_fresh_load(run):
    text, _ = run
    assert re.search(r"^addresses changed: 0 of \d\d tensors$", text, re.MULTILINE), text
    assert re.search(r"fresh load of B: in 0 of \d\d tensors$", text, re.MULTILINE), text


def test_each_checkpoint_is_better_on_its_own_text(run):
    text, _ = run
    a = [float(x) for x in re.search(r"with checkpoint A +(\S+) +(\S+)", text).groups()]
    b = [float(x) for x in re.search(r"after the reload of B +(\S+) +(\S+)", text).groups()]
    assert a[0] < b[0]
    assert b[1] < a[1]


def test_the_picture_is_a_png(run):
    _, out = run
    assert (out / "memory.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
