"""The registry is strict: one name, one thing, and an answer for whoever asks for another."""

import threading

import pytest

from olq.errors import ConfigError, UnknownNameError
from olq.registry import METHODS, Registry, get_method, method_names, register_method

BUILT_IN = {"fp8", "keep", "mxfp8", "nvfp4"}


@pytest.fixture
def registry() -> Registry[type]:
    return Registry("method", group="olq.tests.nobody", attribute="name")


def test_a_registered_class_is_found_and_knows_its_name(registry: Registry[type]):
    @registry.add("sign8")
    class Sign8:
        name: str

    assert registry["sign8"] is Sign8
    assert Sign8.name == "sign8"
    assert (list(registry), len(registry), registry.names()) == (["sign8"], 1, ("sign8",))
    assert "sign8" in registry
    assert "Sign8" not in registry


def test_a_name_is_taken_once_and_stays_with_the_first(registry: Registry[type]):
    first = registry.add("sign8")(type("First", (), {"__module__": "one"}))
    second = type("Second", (), {"__module__": "two"})
    with pytest.raises(ConfigError) as caught:
        registry.add("sign8")(second)
    assert str(caught.value) == (
        "Two methods are called 'sign8'.\n"
        "  where:  registry of methods\n"
        "  found:  one.First and two.Second\n"
        "  need:   a name of its own for each\n"
        "  remedy: rename one, uninstall the package that you don't need, or remove() the first one"
    )
    assert registry["sign8"] is first
    assert not hasattr(second, "name")


def test_a_name_that_is_removed_can_be_used_again(registry: Registry[type]):
    first = registry.add("sign8")(type("First", (), {}))
    assert registry.remove("sign8") is first
    second = registry.add("sign8")(type("Second", (), {}))
    assert registry["sign8"] is second
    with pytest.raises(UnknownNameError, match="found:  'sign9'"):
        registry.remove("sign9")


@pytest.mark.parametrize("name", ["", "FP8", "fp 8", "8bit", "fp8:channel", " fp8"])
def test_names_are_lower_case_and_plain(registry: Registry[type], name: str):
    with pytest.raises(ConfigError, match=r"need:   a lower-case letter, then lower-case letters, digits"):
        registry.add(name)(type("Any", (), {}))
    assert len(registry) == 0


def test_an_unknown_name_is_answered_with_what_there_is(registry: Registry[type]):
    registry.add("sign8")(type("A", (), {}))
    registry.add("int8")(type("B", (), {}))
    with pytest.raises(UnknownNameError) as caught:
        registry["sing8"]
    assert str(caught.value) == (
        "No method is called 'sing8'.\n"
        "  where:  the registered methods and the entry points of group 'olq.tests.nobody'\n"
        "  found:  'sing8'\n"
        "  need:   one of 'int8', 'sign8'\n"
        "  remedy: did you mean 'sign8'?"
    )
    with pytest.raises(LookupError, match="remedy: install the package that offers this method"):
        registry["zzz"]


def test_an_empty_registry_says_so(registry: Registry[type]):
    with pytest.raises(UnknownNameError, match="need:   a registered name; there is none"):
        registry["fp8"]


def test_names_are_case_sensitive_and_have_no_aliases():
    with pytest.raises(UnknownNameError, match="did you mean 'fp8'"):
        get_method("fp_8")
    with pytest.raises(UnknownNameError):
        get_method("FP8")


def test_threads_that_register_the_same_name_leave_one_winner(registry: Registry[type]):
    lost, start = [], threading.Barrier(8)

    def put(item: type) -> None:
        start.wait()
        try:
            registry.add("sign8")(item)
        except ConfigError:
            lost.append(item)

    items = [type(f"C{i}", (), {}) for i in range(8)]
    threads = [threading.Thread(target=put, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lost) == 7
    assert registry["sign8"] in items
    assert registry["sign8"] not in lost


def test_the_built_in_methods_are_registered_when_olq_is_imported():
    import olq  # noqa: F401  (fills the registry)

    assert set(method_names()) >= BUILT_IN
    assert all(METHODS[name].name == name for name in BUILT_IN)
    assert method_names() == tuple(sorted(method_names()))


def test_get_method_hands_the_parameters_to_the_class():
    @register_method("test.echo")
    class Echo:
        def __init__(self, **params: object) -> None:
            self.params = params

    try:
        made = get_method("test.echo", name="a parameter may be called name", n=3)
        assert isinstance(made, Echo)
        assert made.params == {"name": "a parameter may be called name", "n": 3}
    finally:
        METHODS.remove("test.echo")


def test_a_parameter_that_the_method_refuses_is_named_with_the_method():
    with pytest.raises(ConfigError, match="method 'fp8'") as caught:
        get_method("fp8", granularity="collumn")
    assert "granularity" in caught.value.where
    assert "collumn" in caught.value.found
    assert all(allowed in str(caught.value) for allowed in ("tensor", "channel", "block"))
    with pytest.raises(ConfigError, match="method 'fp8'"):
        get_method("fp8", granularty="channel")
