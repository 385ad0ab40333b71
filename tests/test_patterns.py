"""Patterns take whole components of a path, and say what is wrong with them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from olq.errors import ConfigError
from olq.patterns import parse, suggest

# Few letters, so that components often agree, and often only in part.
component = st.text("ab1", min_size=1, max_size=3)
wild = st.text("ab1*", min_size=1, max_size=3).filter(lambda text: "**" not in text) | st.just("**")
paths = st.lists(component, min_size=1, max_size=5)
globs = st.lists(wild, min_size=1, max_size=4)


def fits(glob: str, text: str) -> bool:
    """`*` inside one component, by trying all it could stand for."""
    if not glob:
        return not text
    if glob[0] == "*":
        return any(fits(glob[1:], text[i:]) for i in range(len(text) + 1))
    return text[:1] == glob[0] and fits(glob[1:], text[1:])


def fits_run(glob: list[str], run: list[str]) -> bool:
    if not glob:
        return not run
    if glob[0] == "**":
        return any(fits_run(glob[1:], run[i:]) for i in range(len(run) + 1))
    return bool(run) and fits(glob[0], run[0]) and fits_run(glob[1:], run[1:])


def longest_end(glob: list[str], path: list[str]) -> str | None:
    """Every run of neighbouring components, one by one."""
    for stop in range(len(path), 0, -1):
        if any(fits_run(glob, path[start:stop]) for start in range(stop + 1)):
            return ".".join(path[:stop])
    return None


@given(globs, paths)
@example(["layers", "1"], ["layers", "10"])
@example(["**"], ["a"])
@example(["a", "**", "b"], ["a", "b", "a"])
@example(["a", "**"], ["b", "a"])
def test_a_glob_matches_what_a_search_over_all_runs_matches(glob: list[str], path: list[str]):
    assert parse(".".join(glob)).match(".".join(path)) == longest_end(glob, path)


@given(paths, st.data())
def test_a_glob_cut_out_of_a_path_matches_it_and_everything_below(path: list[str], data: st.DataObject):
    start = data.draw(st.integers(0, len(path) - 1))
    stop = data.draw(st.integers(start + 1, len(path)))
    cut = [
        data.draw(st.sampled_from([text, "*", text[:1] + "*", "*" + text[1:]])) for text in path[start:stop]
    ]
    pattern = parse(".".join(cut))
    assert pattern.match(".".join(path)) is not None
    assert pattern.match(".".join([*path, "below"])) is not None


TABLE = {
    ("lm_head", "lm_head"): "lm_head",
    ("lm_head", "model.lm_head"): "model.lm_head",
    ("lm_head", "model.lm_head_norm"): None,
    ("layers.1", "model.layers.1.mlp.up"): "model.layers.1",
    ("layers.1", "model.layers.10.mlp.up"): None,
    ("layers.1*", "model.layers.10.mlp.up"): "model.layers.10",
    ("*.mlp", "model.layers.3.mlp.up"): "model.layers.3.mlp",
    ("*.mlp", "mlp.up"): None,
    ("mlp", "mlp.up"): "mlp",
    ("model.*.mlp", "model.layers.3.mlp.up"): None,
    ("model.**.mlp", "model.layers.3.mlp.up"): "model.layers.3.mlp",
    ("model.**.layers", "model.layers.3"): "model.layers",
    ("**", "anything.at.all"): "anything.at.all",
    ("*", "one"): "one",
    ("*_proj", "a.q_proj.lora"): "a.q_proj",
    ("a-b", "a-b.c"): "a-b",
    ("re:.*o_proj", "a.o_proj"): "a.o_proj",
    ("re:.*o_proj", "a.o_proj.lora"): None,
    ("re:o_proj", "a.o_proj"): None,
    (r"re:.*\.layers\.(0|1[0-9])\..*", "model.layers.12.up"): "model.layers.12.up",
    (r"re:.*\.layers\.(0|1[0-9])\..*", "model.layers.1.up"): None,
    ("**", ""): "",
    ("*", ""): None,
}


@pytest.mark.parametrize(("text", "path"), TABLE)
def test_what_the_documentation_says_about_patterns(text: str, path: str):
    assert parse(text).match(path) == TABLE[text, path]


BAD = {
    "": "found:  ''",
    "re:": "found:  're:' with nothing behind it",
    "re:[a": r"found:  're:\[a': unterminated character set at position 0",
    "a..b": r"found:  'a\.\.b', with nothing on one side of a dot",
    ".a": "with nothing on one side of a dot",
    "a.": "with nothing on one side of a dot",
    "a**": r"with `\*\*` inside a component",
    "a.***": r"with `\*\*` inside a component",
    "layers.[0-3]": r"which holds '\[', '\]'[\s\S]*remedy: .* write 're:layers\.\[0-3\]'",
    "a?": r"which holds '\?'",
    " a": "which holds ' '",
    "^a$": r"which holds '\$', '\^'",
    "a|b": r"which holds '\|'",
    r"a\.b": r"which holds '\\\\'",
    "a/b": "which holds '/'",
}


@pytest.mark.parametrize("text", BAD)
def test_a_pattern_that_cant_be_read_is_refused_with_the_way_to_write_it(text: str):
    with pytest.raises(ConfigError, match=r"where:  keep\[2\]\n[\s\S]*" + BAD[text]):
        parse(text, where="keep[2]")


NAMES = ["lm_head"] + [
    f"model.layers.{i}.{name}"
    for i in range(12)
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
]
MEANT = {
    "lm_haed": "did you mean 'lm_head'?",
    "model.lm_head": "did you mean 'lm_head'?",
    "modle.layers.3": "did you mean 'model.layers.3'?",
    "layer.*.mpl": "did you mean 'layers.*.mlp'?",
    "mlp.down_proj.weight": "did you mean 'mlp.down_proj'?",
    "gate_up_proj": "did you mean 'gate_proj' or 'up_proj'?",
    "transformer.layers.1": "did you mean 'layers.1'?",
    "re:o_proj": "found inside 'model.layers.0.self_attn.o_proj': did you mean 're:.*o_proj.*'?",
    "vision": "names there are, for example: 'lm_head'",
    "re:vision.*": "names there are, for example: ",
}


@pytest.mark.parametrize("text", MEANT)
def test_a_pattern_that_matches_nothing_is_answered_with_one_that_does(text: str):
    assert all(parse(text).match(name) is None for name in NAMES)
    assert MEANT[text] in suggest(parse(text), NAMES)


def test_without_any_name_there_is_nothing_to_suggest():
    assert suggest(parse("a"), []) == "no layer was looked at"


@given(globs | paths, st.lists(paths.map(".".join), max_size=5))
def test_each_pattern_that_is_suggested_matches_something(glob: list[str], names: list[str]):
    pattern = parse(".".join(glob))
    text = suggest(pattern, names)
    if text.startswith("did you mean "):
        for offered in text.removeprefix("did you mean ").removesuffix("?").split(" or "):
            assert any(parse(offered.strip("'")).match(name) is not None for name in names)
