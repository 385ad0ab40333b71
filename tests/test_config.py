"""A configuration is plain, frozen data, and says what is wrong with it."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from olq.config import QuantConfig, Rule
from olq.errors import ConfigError
from olq.frozen import FrozenDict, explain

REPO = Path(__file__).resolve().parents[1]

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(["fp8", "mxfp8", "nvfp4", "keep", "acme.sign8"])
components = st.sampled_from(["model", "layers", "*", "**", "*_proj", "0", "1", "10", "mlp"])
texts = st.lists(components, min_size=1, max_size=4).map(".".join) | st.sampled_from(
    ["re:.*o_proj", r"re:a\.b"]
)


@st.composite
def configs(draw: st.DrawFn) -> QuantConfig:
    patterns = draw(st.lists(texts, max_size=5, unique=True))
    cut = draw(st.integers(0, len(patterns)))
    params = st.dictionaries(st.text(), values, max_size=2)
    rules = [Rule(match=text, method=draw(names), params=draw(params)) for text in patterns[:cut]]
    return QuantConfig(
        method=draw(names), params=draw(params), rules=tuple(rules), keep=tuple(patterns[cut:])
    )


@given(configs())
def test_json_dict_pickle_and_copy_give_the_same_configuration(config: QuantConfig):
    text = config.model_dump_json()
    again = [
        QuantConfig.from_json(text),
        QuantConfig.model_validate_json(text),
        QuantConfig.from_dict(config.model_dump()),
        QuantConfig(**config.model_dump()),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
    ]
    for other in again:
        assert other == config
        assert hash(other) == hash(config)
        assert other.model_dump_json() == text


def test_a_json_file_and_a_toml_file_with_the_same_words_are_equal(tmp_path: Path):
    (tmp_path / "olq.toml").write_text(
        'method = "mxfp8"\nkeep = ["lm_head", "*.router"]\nparams = { scale_layout = "linear" }\n'
        '[[rules]]\nmatch = "*.experts.*"\nmethod = "nvfp4"\n'
    )
    data = {
        "method": "mxfp8",
        "params": {"scale_layout": "linear"},
        "rules": [{"match": "*.experts.*", "method": "nvfp4"}],
        "keep": ["lm_head", "*.router"],
    }
    (tmp_path / "olq.json").write_text(
        "\ufeff" + json.dumps(data), encoding="utf-8"
    )  # with a byte order mark
    config = QuantConfig.from_file(tmp_path / "olq.toml")
    assert config == QuantConfig.from_file(str(tmp_path / "olq.json")) == QuantConfig.from_dict(data)
    assert config.rules == (Rule(match="*.experts.*", method="nvfp4"),)


def test_an_empty_configuration_is_fp8_for_all_layers():
    config = QuantConfig.from_json("{}")
    assert config == QuantConfig()
    assert (config.method, config.params, config.rules, config.keep) == ("fp8", {}, (), ())


def test_nothing_in_a_configuration_can_be_changed():
    config = QuantConfig(
        params={"a": [1, {"b": 2}]}, keep=["x"], rules=[Rule(match="mlp", method="nvfp4", params={"c": 3})]
    )
    with pytest.raises(ValidationError, match="frozen"):
        config.method = "nvfp4"  # pyright: ignore[reportAttributeAccessIssue]
    inner = config.params["a"][1]
    assert [type(value) for value in (config.params["a"], config.rules, config.keep)] == [tuple] * 3
    for frozen in (config.params, inner, config.rules[0].params, QuantConfig().params):
        changes = [
            lambda d=frozen: d.__setitem__("a", 1),
            lambda d=frozen: d.__delitem__("a"),
            lambda d=frozen: d.__ior__({"a": 1}),
            lambda d=frozen: d.update(a=1),
            lambda d=frozen: d.setdefault("a", 1),
            lambda d=frozen: d.pop("a"),
            lambda d=frozen: d.popitem(),
            lambda d=frozen: d.clear(),
        ]
        for change in changes:
            with pytest.raises(TypeError, match="frozen; make a new configuration"):
                change()
    assert config.params == {"a": (1, {"b": 2})}


def test_there_is_a_json_schema_with_all_defaults():
    fields = QuantConfig.model_json_schema()["properties"]
    assert {name: field.get("default") for name, field in fields.items()} == {
        "method": "fp8",
        "params": None,  # made anew, so pydantic states none
        "rules": [],
        "keep": [],
    }


def test_equal_frozen_dicts_have_equal_hashes_in_any_order():
    assert hash(FrozenDict(a=1, b=(2,))) == hash(FrozenDict(b=(2,), a=1))


def message(*facts: str, problem: str) -> str:
    return "\n".join(
        [
            problem,
            *(f"  {k:8}{v}" for k, v in zip(("where:", "found:", "need:", "remedy:"), facts, strict=True)),
        ]
    )


ONE_MISTAKE = {
    "unknown key": (
        {"kep": ["lm_head"]},
        "QuantConfig has no field 'kep'.",
        ("kep", "kep = ['lm_head']", "one of 'method', 'params', 'rules', 'keep'", "did you mean 'keep'?"),
    ),
    "unknown key, nothing like it": (
        {"zzz": 1},
        "QuantConfig has no field 'zzz'.",
        ("zzz", "zzz = 1", "one of 'method', 'params', 'rules', 'keep'", "remove it"),
    ),
    "unknown key in a rule": (
        {"rules": [{"match": "a", "method": "fp8"}, {"match": "b", "method": "fp8", "param": {}}]},
        "Rule has no field 'param'.",
        ("rules[1].param", "param = {}", "one of 'match', 'method', 'params'", "did you mean 'params'?"),
    ),
    "keep below a rule, as happens in TOML": (
        {"rules": [{"match": "a", "method": "fp8", "keep": ["b"]}]},
        "Rule has no field 'keep'.",
        (
            "rules[0].keep",
            "keep = ['b']",
            "one of 'match', 'method', 'params'",
            "'keep' belongs to the whole configuration; in TOML it has to stand above the first [[rules]]",
        ),
    ),
    "a rule without a method": (
        {"rules": [{"match": "a"}]},
        "Rule needs a field 'method'.",
        ("rules[0].method", "only 'match'", "a value for 'method'", "add 'method'"),
    ),
    "an empty rule, but for the method": (
        {"rules": [{"method": "fp8"}]},
        "Rule needs a field 'match'.",
        ("rules[0].match", "only 'method'", "a value for 'match'", "add 'match'"),
    ),
    "a lone pattern": (
        {"keep": "lm_head"},
        "A list is needed here.",
        ("keep", "'lm_head'", "a list, also for one entry", "write ['lm_head']"),
    ),
    "a set has no order": (
        {"keep": {"lm_head"}},
        "A list is needed here.",
        ("keep", "{'lm_head'}", "a list, also for one entry", "write a list; its order counts"),
    ),
    "a number for a name": (
        {"method": 8},
        "QuantConfig can't take this value.",
        ("method", "8", "Input should be a valid string", "give a value of that kind"),
    ),
    "no method": (
        {"method": None},
        "QuantConfig can't take this value.",
        ("method", "None", "Input should be a valid string", "give a value of that kind"),
    ),
    "an empty method": (
        {"method": ""},
        "The name of a method is empty or holds white space.",
        (
            "method",
            "''",
            "a registered name, for example 'fp8'",
            "for layers that stay in high precision write 'keep'",
        ),
    ),
    "a method with a space": (
        {"rules": [{"match": "a", "method": "fp8 "}]},
        "The name of a method is empty or holds white space.",
        (
            "rules[0].method",
            "'fp8 '",
            "a registered name, for example 'fp8'",
            "for layers that stay in high precision write 'keep'",
        ),
    ),
    "a parameter that JSON can't hold": (
        {"params": {"scales": [1.0, {"limit": float("inf")}]}},
        "A parameter can't be written to JSON.",
        (
            "params.scales[1].limit",
            "inf",
            "a string, a finite number, true or false, null, or a list or table of these",
            "give types and devices by name, for example 'bfloat16'",
        ),
    ),
    "a pattern twice": (
        {"keep": ["lm_head", "embed"], "rules": [{"match": "embed", "method": "fp8"}]},
        "A pattern is listed twice.",
        (
            "keep[1] and rules[0].match",
            "'embed'",
            "each pattern once, because a layer gets one decision",
            "remove the one that you don't mean",
        ),
    ),
    "a bad regular expression": (
        {"keep": ["re:("]},
        "A regular expression does not compile.",
        (
            "keep[0]",
            "'re:(': missing ), unterminated subpattern at position 0",
            "an expression that Python's re module accepts",
            "correct it, or write a glob without `re:`",
        ),
    ),
}


@pytest.mark.parametrize(("data", "problem", "facts"), ONE_MISTAKE.values(), ids=ONE_MISTAKE)
def test_a_mistake_is_named_with_its_place_and_a_way_out(data: dict, problem: str, facts: tuple[str, ...]):
    where, *rest = facts
    with pytest.raises(ConfigError) as from_dict:
        QuantConfig.from_dict(data)
    assert str(from_dict.value) == message(f"configuration: {where}", *rest, problem=problem)
    with pytest.raises(ConfigError) as constructed:
        QuantConfig(**data)
    assert str(constructed.value) == message(f"QuantConfig.{where}", *rest, problem=problem)


def test_all_mistakes_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        QuantConfig.from_dict(
            {"method": 3, "rules": [{"match": "a..b", "method": "fp8"}], "kepe": []}, where="a.toml"
        )
    assert caught.value.problem == "There are 3 mistakes in QuantConfig."
    assert caught.value.where == "(1) a.toml: method; (2) a.toml: rules[0].match; (3) a.toml: kepe"
    assert caught.value.found == "(1) 3; (2) 'a..b', with nothing on one side of a dot; (3) kepe = []"
    assert "(3) did you mean 'keep'?" in caught.value.remedy


def test_a_rule_made_alone_names_itself():
    with pytest.raises(
        ConfigError, match=r"where:  Rule\.match\n  found:  'layers\.\[0-3\]', which holds '\[', '\]'"
    ):
        Rule(match="layers.[0-3]", method="fp8")


def test_a_key_that_stands_twice_in_json_is_an_error_at_any_depth():
    with pytest.raises(ConfigError, match=r"where:  JSON text\n  found:  'match' with 'a' and with 'b'"):
        QuantConfig.from_json('{"rules": [{"match": "a", "match": "b", "method": "fp8"}]}')


@pytest.mark.parametrize("data", [[], "fp8", None, 3, {1: 2}])
def test_something_else_than_a_table_of_fields_is_refused(data: object):
    with pytest.raises(
        ConfigError, match="need:   a mapping from names to values: method, params, rules, keep"
    ):
        QuantConfig.from_json(json.dumps(data)) if not isinstance(data, dict) else QuantConfig.from_dict(data)  # pyright: ignore


FILES = {
    "missing": ("none.json", None, "FileNotFoundError: No such file or directory"),
    "JSON": ("a.json", b'{"method" "fp8"}', r"Expecting ':' delimiter: line 1 column 11"),
    "JSON, deep": ("a.json", b"[" * 100_000, "(recursion|[Ss]tack)"),
    "TOML": ("a.toml", b"method = fp8", r"line 1"),
    "not UTF-8": ("a.toml", b'method = "\xff"', "can't decode byte 0xff"),
    "suffix": ("a.yaml", b"method: fp8", r"the suffix '\.yaml'"),
    "NaN": ("a.json", b'{"params": {"a": NaN}}', "nan"),
    "TOML date": ("a.toml", b"params = { a = 2020-01-01 }", r"datetime\.date\(2020, 1, 1\)"),
}


@pytest.mark.parametrize(("name", "content", "found"), FILES.values(), ids=FILES)
def test_a_file_that_cant_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, found: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"found:  .*{found}") as caught:
        QuantConfig.from_file(tmp_path / name)
    assert str(tmp_path / name) in caught.value.where


def test_explain_names_the_fields_of_the_model_at_fault():
    class Inner(BaseModel, extra="forbid"):
        depth: int = 0

    class Outer(BaseModel, extra="forbid"):
        inner: list[Inner] | None = None

    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"inner": [{}, {"dept": 1}]})
    error = explain(caught.value, Outer, where="method 'x': ")
    assert (error.where, error.need) == ("method 'x': inner[1].dept", "one of 'depth'")
    assert error.remedy == "did you mean 'depth'?"


def test_configuration_rules_and_registry_need_no_torch():
    """Loaded below a package that stands in for olq, whose own import loads torch."""
    program = (
        "import sys, types\n"
        "olq = types.ModuleType('olq'); olq.__path__ = [sys.argv[1]]; sys.modules['olq'] = olq\n"
        "import olq.config, olq.rules, olq.registry\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(REPO / "olq")], check=True, timeout=60)
