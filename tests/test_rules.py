"""Each layer gets one decision with its reason, and no pattern is lost."""

import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olq.config import QuantConfig, Rule
from olq.errors import ConfigError
from olq.rules import Decision, Resolver

QKV = ("q_proj", "k_proj", "v_proj")
PARTS = {"qkv_proj": QKV, "gate_up_proj": ("gate_proj", "up_proj")}
LAYERS = ["lm_head"] + [
    f"model.layers.{i}.{name}"
    for i in (0, 1, 10)
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]
QKV_0 = "model.layers.0.self_attn.qkv_proj"


def resolve(config: QuantConfig, names: Sequence[str] = LAYERS) -> Resolver:
    resolver = Resolver(config)
    for name in names:
        resolver.decide(name, PARTS.get(name.rpartition(".")[2], ()))
    return resolver


def methods(config: QuantConfig) -> dict[str, str | None]:
    resolver = resolve(config)
    resolver.finish()
    return {made.layer: made.method for made in resolver.decisions}


def nvfp4(match: str, **params: object) -> Rule:
    return Rule(match=match, method="nvfp4", params=params)


def test_without_patterns_every_layer_gets_the_configurations_method():
    config = QuantConfig(method="mxfp8", params={"rule": "floor"})
    expected = Decision(QKV_0, "mxfp8", {"rule": "floor"}, "default: no pattern matches", QKV)
    assert resolve(config).decisions[1] == expected


def test_the_first_rule_that_matches_decides():
    rules = [nvfp4("layers.1"), Rule(match="mlp", method="mxfp8")]
    made = methods(QuantConfig(rules=tuple(rules)))
    assert {made[name] for name in LAYERS if ".layers.1." in name} == {"nvfp4"}
    assert {made[name] for name in LAYERS if ".mlp." in name and ".layers.1." not in name} == {"mxfp8"}
    assert made["lm_head"] == made["model.layers.10.self_attn.o_proj"] == "fp8"


def test_a_rule_inherits_no_parameters_from_the_configuration():
    config = QuantConfig(params={"granularity": "block"}, rules=(Rule(match="lm_head", method="fp8"),))
    assert resolve(config).decisions[0].params == {}


def test_with_keep_as_the_method_rules_list_the_only_layers_that_are_quantized():
    made = methods(QuantConfig(method="keep", rules=(nvfp4("*.down_proj"),)))
    assert {name: method for name, method in made.items() if method != "keep"} == {
        f"model.layers.{i}.mlp.down_proj": "nvfp4" for i in (0, 1, 10)
    }


def test_a_rule_may_keep_so_that_the_order_decides():
    config = QuantConfig(rules=(nvfp4("layers.0.mlp"), Rule(match="layers.0", method="keep")))
    made = methods(config)
    assert made["model.layers.0.mlp.down_proj"] == "nvfp4"
    assert made["model.layers.0.self_attn.o_proj"] == "keep"


REASONS = {
    "lm_head": ("lm_head", "keep[0] 'lm_head' matches the name"),
    "layers.1": ("model.layers.1.mlp.down_proj", "keep[0] 'layers.1' matches model.layers.1"),
    "re:.*o_proj": ("model.layers.0.self_attn.o_proj", "keep[0] 're:.*o_proj' matches the name"),
    "qkv_proj": (QKV_0, "keep[0] 'qkv_proj' matches the name"),
    r"re:.*\.[qk]_proj|.*\.v_.*": (
        QKV_0,
        r"keep[0] 're:.*\\.[qk]_proj|.*\\.v_.*' matches q_proj, k_proj, v_proj",
    ),
    "self_attn": (QKV_0, "keep[0] 'self_attn' matches model.layers.0.self_attn"),
}


@pytest.mark.parametrize("pattern", REASONS)
def test_the_reason_names_the_entry_and_what_it_matches(pattern: str):
    layer, reason = REASONS[pattern]
    made = {decision.layer: decision for decision in resolve(QuantConfig(keep=(pattern,))).decisions}
    assert (made[layer].method, made[layer].reason) == ("keep", reason)


@pytest.mark.parametrize(
    "keep",
    [
        QKV,
        ("qkv_proj",),
        ("*.qkv_proj",),
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("re:.*[qkv]_proj",),
        ("model.layers.*.self_attn.qkv_proj",),
    ],
    ids=str,
)
def test_a_fused_layer_is_reached_by_its_own_name_and_by_those_of_all_its_parts(keep: tuple[str, ...]):
    made = methods(QuantConfig(keep=keep))
    assert {name for name, method in made.items() if method == "keep"} == {n for n in LAYERS if "qkv" in n}


def test_parts_may_be_reached_by_different_rules_that_say_the_same():
    rules = tuple(nvfp4(part, scale="x") for part in QKV)
    made = resolve(QuantConfig(rules=rules)).decisions[1]
    assert (made.method, made.params) == ("nvfp4", {"scale": "x"})
    assert made.reason == "; ".join(f"rules[{i}] '{part}' matches {part}" for i, part in enumerate(QKV))


def test_a_pattern_for_some_parts_is_an_error_that_names_them():
    with pytest.raises(ConfigError) as caught:
        resolve(QuantConfig(keep=("q_proj",)))
    assert str(caught.value) == (
        "The parts of a fused layer can't be treated differently.\n"
        f"  where:  layer {QKV_0}\n"
        "  found:  q_proj gets keep by keep[0] 'q_proj'; "
        "k_proj gets fp8 by default; v_proj gets fp8 by default\n"
        "  need:   one method with the same parameters for all parts, because they are one tensor\n"
        "  remedy: match the fused name 'qkv_proj', or all of its parts alike"
    )


def test_parts_with_the_same_method_and_other_parameters_are_an_error():
    rules = (nvfp4("gate_proj", rule="a"), nvfp4("up_proj", rule="b"))
    found = r"gate_proj gets nvfp4\(rule='a'\) by rules\[0\] .*; up_proj gets nvfp4\(rule='b'\) by rules\[1\]"
    with pytest.raises(ConfigError, match=found):
        resolve(QuantConfig(rules=rules))


@pytest.mark.parametrize("pattern", ["*v_proj", "re:.*v_proj"])
def test_a_pattern_that_meets_the_fused_name_by_accident_is_an_error(pattern: str):
    """`*v_proj` ends like `qkv_proj`; it would keep q and k as well, and only where an engine fuses."""
    found = rf"keep\[0\] '{re.escape(pattern)}' matches it and model\.layers\.0\.self_attn\.v_proj, not all"
    with pytest.raises(ConfigError, match=found):
        resolve(QuantConfig(keep=(pattern,)))


def test_names_that_only_look_like_parts_are_not_part_of_the_fusion():
    """A pattern for `k_proj` of another module does not reach the fused layer, nor one below its parts."""
    made = resolve(QuantConfig(keep=("cross_attn.k_proj", "k_proj.k_scale", "proj")), LAYERS).decisions
    assert {decision.method for decision in made} == {"fp8"}


def test_a_rule_and_keep_for_the_same_layer_contradict_each_other():
    with pytest.raises(ConfigError) as caught:
        resolve(QuantConfig(rules=(nvfp4("re:.*o_proj"),), keep=("o_proj",)))
    assert str(caught.value) == (
        "`keep` and a rule contradict each other.\n"
        "  where:  layer model.layers.0.self_attn.o_proj\n"
        "  found:  keep[0] 'o_proj' and rules[0] 're:.*o_proj' (method 'nvfp4') both match\n"
        "  need:   one of them, because neither goes before the other\n"
        "  remedy: narrow one, or write the kept pattern as an earlier rule with method 'keep'"
    )


def test_a_rule_that_keeps_and_keep_do_not_contradict_each_other():
    rules = (Rule(match="o_proj", method="keep"), nvfp4("*_proj"))
    config = QuantConfig(rules=rules, keep=("re:.*o_proj",))
    assert methods(config)["model.layers.0.self_attn.o_proj"] == "keep"
    assert resolve(config).decisions[2].reason == "keep[0] 're:.*o_proj' matches the name"


def test_a_rule_for_one_part_and_keep_for_the_fused_name_contradict_each_other():
    with pytest.raises(ConfigError, match=r"where:  layer model\.layers\.0\.self_attn\.k_proj"):
        resolve(QuantConfig(rules=(nvfp4("k_proj"),), keep=("qkv_proj",)))


def test_a_pattern_that_matches_no_layer_is_an_error_with_what_may_have_been_meant():
    resolver = resolve(QuantConfig(keep=("lm_haed",)))
    with pytest.raises(ConfigError) as caught:
        resolver.finish()
    assert str(caught.value) == (
        "A pattern matches no layer.\n"
        "  where:  keep[0]\n"
        "  found:  'lm_haed' against the names of 13 layers\n"
        "  need:   at least one layer for each pattern, so that no wish is lost in silence\n"
        "  remedy: did you mean 'lm_head'?; or remove the entry"
    )


def test_the_other_spelling_of_a_fused_layer_is_suggested_where_the_model_does_not_fuse():
    resolver = Resolver(QuantConfig(keep=("gate_up_proj",)))
    for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        resolver.decide(name)
    with pytest.raises(ConfigError, match=r"did you mean 'gate_proj' or 'up_proj'"):
        resolver.finish()


def test_a_rule_whose_layers_earlier_rules_took_is_an_error():
    resolver = resolve(QuantConfig(rules=(nvfp4("*_proj"), Rule(match="o_proj", method="fp8"))))
    with pytest.raises(ConfigError) as caught:
        resolver.finish()
    assert str(caught.value) == (
        "A rule never decides.\n"
        "  where:  rules[1].match\n"
        "  found:  all layers that 'o_proj' matches were taken by rules[0] '*_proj'\n"
        "  need:   rules from the special to the general, because the first that matches decides\n"
        "  remedy: move it before them, or remove it"
    )


def test_a_rule_that_decides_once_is_not_shadowed():
    methods(QuantConfig(rules=(nvfp4("layers.1"), Rule(match="o_proj", method="fp8"))))


def test_all_patterns_that_decide_nothing_are_named_at_once():
    rules = (nvfp4("*_proj"), Rule(match="o_proj", method="fp8"), nvfp4("vision"))
    with pytest.raises(ConfigError) as caught:
        resolve(QuantConfig(rules=rules, keep=("model.lm_head",))).finish()
    assert caught.value.problem == "The configuration does not fit the model."
    assert caught.value.where == "(1) keep[0]; (2) rules[1].match; (3) rules[2].match"


def test_keep_may_name_a_module_that_is_never_quantized_and_a_rule_may_not():
    resolver = resolve(QuantConfig(keep=("embed_tokens",)))
    resolver.see(["model.embed_tokens", "model.norm"])
    resolver.finish()

    resolver = resolve(QuantConfig(rules=(nvfp4("embed_tokens"),)))
    resolver.see(["model.embed_tokens", "model.norm"])
    with pytest.raises(ConfigError, match=r"found:  'embed_tokens' matches 'model\.embed_tokens'\n"):
        resolver.finish()


def test_an_expression_for_a_module_does_not_count_as_one_for_the_layers_in_it():
    """`re:` matches whole names: what was meant to keep all of `model.layers.0` keeps nothing there."""
    resolver = resolve(QuantConfig(keep=(r"re:model\.layers\.0",)))
    resolver.see(["model", "model.layers", "model.layers.0", "model.norm"])
    with pytest.raises(ConfigError, match=r"did you mean 're:\.\*model\\\\\.layers\\\\\.0\.\*'"):
        resolver.finish()


def test_asking_again_gives_the_same_decision_once():
    resolver = Resolver(QuantConfig(keep=("lm_head",)))
    first = resolver.decide("lm_head")
    assert resolver.decide("lm_head") is first
    assert resolver.decisions == [first]


def test_asking_again_with_other_parts_is_an_error():
    resolver = Resolver(QuantConfig())
    resolver.decide("attn.qkv", ("q", "k", "v"))
    with pytest.raises(ConfigError, match=r"found:  parts \('q', 'k', 'v'\), then \('q', 'kv'\)"):
        resolver.decide("attn.qkv", ("q", "kv"))


def test_a_layer_at_the_top_has_parts_at_the_top():
    made = Resolver(QuantConfig(keep=("q", "k"))).decide("qk", ("q", "k"))
    assert (made.method, made.reason) == ("keep", "keep[0] 'q' matches q; keep[1] 'k' matches k")


def test_the_root_itself_can_be_the_layer():
    assert Resolver(QuantConfig(keep=("**",))).decide("").method == "keep"


def test_the_table_has_a_line_for_each_layer_and_a_count_of_methods():
    config = QuantConfig(rules=(nvfp4("mlp", scale="x", n=2),), keep=("lm_head",))
    assert resolve(config, LAYERS[:4]).table() == (
        "layer                              method  parameters      reason\n"
        "lm_head                            keep    -               keep[0] 'lm_head' matches the name\n"
        "model.layers.0.self_attn.qkv_proj  fp8     -               default: no pattern matches\n"
        "model.layers.0.self_attn.o_proj    fp8     -               default: no pattern matches\n"
        "model.layers.0.mlp.gate_up_proj    nvfp4   scale='x', n=2  "
        "rules[0] 'mlp' matches model.layers.0.mlp\n"
        "layers: 2 fp8, 1 keep, 1 nvfp4"
    )
    assert Resolver(config).table() == "layer  method  parameters  reason\nlayers: none"


# A model of the whole resolver: a pattern is the set of layers and parts that it takes, as a plain predicate.
SMALL = ["a.q", "a.k", "a.o", "b.q", "b.k", "b.o"]
UNITS = {"a.qk": ("a.q", "a.k"), "a.o": ("a.o",), "b.qk": ("b.q", "b.k"), "b.o": ("b.o",)}
PREDICATES: dict[str, Callable[[str, str], bool]] = {
    "a": lambda layer, path: path[0] == "a",
    "*.o": lambda layer, path: path[2:] == "o",
    "q": lambda layer, path: path[2:] == "q",
    "k": lambda layer, path: path[2:] == "k",
    "b.qk": lambda layer, path: layer == "b.qk",
    "re:b.*": lambda layer, path: path[0] == "b",
    "**": lambda layer, path: True,
    "c": lambda layer, path: False,
}


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(PREDICATES)), st.sampled_from(["x", "y", "keep"])),
        unique_by=lambda r: r[0],
    ),
    st.lists(st.sampled_from(sorted(PREDICATES)), unique=True, max_size=2),
    st.permutations(list(UNITS)),
)
def test_the_resolver_does_what_ten_lines_of_predicates_do(
    rules: list[tuple[str, str]], keep: list[str], order: list[str]
):
    rules = [rule for rule in rules if rule[0] not in keep]
    expected: dict[str, str | None] = {}
    used: set[str] = set()
    fits = True
    for layer, paths in UNITS.items():
        outcomes = set()
        for path in paths:
            first = next((rule for rule in rules if PREDICATES[rule[0]](layer, path)), None)
            kept = [text for text in keep if PREDICATES[text](layer, path)]
            fits &= not (kept and first and first[1] != "keep")
            used.update(kept, [first[0]] if first else [])
            outcomes.add("keep" if kept else first[1] if first else "default")
        fits &= len(outcomes) == 1
        expected[layer] = min(outcomes)

    config = QuantConfig(
        method="default", rules=tuple(Rule(match=m, method=name) for m, name in rules), keep=tuple(keep)
    )
    resolver = Resolver(config)

    def decide_all() -> dict[str, str]:
        made = [resolver.decide(name, () if name[2:] == "o" else ("q", "k")) for name in order]
        return {decision.layer: decision.method for decision in made}

    if not fits:
        with pytest.raises(ConfigError):
            decide_all()
        return
    assert decide_all() == expected
    if used == {m for m, _ in rules} | set(keep):
        resolver.finish()
    else:
        with pytest.raises(ConfigError):
            resolver.finish()
