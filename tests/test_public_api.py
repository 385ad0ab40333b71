"""The names that others build on: a change here changes a promise, and is written into CHANGELOG.md."""

import ast
import importlib.metadata
import inspect
import re
from pathlib import Path

import pytest

import olq
from olq import errors
from olq.config import QuantConfig, Rule

REPO = Path(__file__).resolve().parents[1]

NAMES = {
    "CopyCounter",
    "Decision",
    "DummyReport",
    "Fingerprint",
    "LoadOptions",
    "MethodParams",
    "QuantConfig",
    "QuantMethod",
    "Report",
    "Resolver",
    "Rule",
    "Session",
    "Shard",
    "Staging",
    "Status",
    "after_load",
    "dequantize",
    "derive",
    "dummy_init",
    "dummy_init_tensor",
    "finalize_layerwise_processing",
    "fingerprint",
    "forget_plans",
    "get_method",
    "initialize_layerwise_reload",
    "initialize_online_processing",
    "load",
    "materialize",
    "meta_parameters",
    "method_names",
    "on_commit",
    "prepare",
    "register_method",
    "reload",
    "session",
}
MODULES = {"activations", "alloc", "errors", "ops"}
CONFIG_KEYS = {"method", "params", "rules", "keep"}
RULE_KEYS = {"match", "method", "params"}
METHODS = {"fp8", "keep", "mxfp8", "nvfp4"}
ERRORS = {
    "ConfigError": ValueError,
    "CoverageError": RuntimeError,
    "LayoutError": ValueError,
    "LoaderError": RuntimeError,
    "NonFiniteError": ValueError,
    "SourceError": ValueError,
    "StateError": RuntimeError,
    "UnknownNameError": LookupError,
}


def objects() -> dict[str, object]:
    return {name: getattr(olq, name) for name in sorted(NAMES)}


def exported() -> list[str]:
    """Names that olq/__init__.py re-exports: `from … import name as name`."""
    tree = ast.parse((REPO / "olq" / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [alias.asname or f"{alias.name}, without `as`" for node in imports for alias in node.names]


def documented(name: str, thing: object) -> list[str]:
    """Names that lack a docstring: the thing itself, and a class's own public methods and properties."""
    missing = [] if inspect.getdoc(thing) else [name]
    if inspect.isclass(thing):
        for attribute, value in vars(thing).items():
            if not attribute.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
                missing += [] if inspect.getdoc(value) else [f"{name}.{attribute}"]
    return missing


def test_top_level_names_are_the_promised_ones():
    assert sorted(exported()) == sorted(NAMES | MODULES)


def test_nothing_public_stands_beside_the_promised_names():
    """Submodules are attributes of their package, which Python does and nobody promises."""
    public = {name for name, value in vars(olq).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public == NAMES


def test_a_function_is_not_hidden_by_a_module_of_its_name():
    """`olq.reload` is a function and a package: whichever is bound last wins, so it is checked after both."""
    import olq.reload

    assert callable(olq.reload)


def test_each_public_name_and_its_members_are_documented():
    assert not [gap for name, thing in objects().items() for gap in documented(name, thing)]


def test_each_public_callable_is_annotated():
    bare = []
    for name, thing in objects().items():
        if inspect.isfunction(thing):
            signature = inspect.signature(thing)
            parts = [p.annotation for p in signature.parameters.values()] + [signature.return_annotation]
            bare += [name] if inspect.Parameter.empty in parts else []
    assert not bare


def test_each_public_name_has_its_place_in_the_reference():
    pages = "".join(p.read_text(encoding="utf-8") for p in (REPO / "docs" / "reference").glob("*.md"))
    absent = [name for name in NAMES | MODULES if not re.search(rf"\bolq\.{name}\b", pages)]
    assert not absent, f"docs/reference lacks {absent}"


def test_config_keys_are_frozen():
    assert set(QuantConfig.model_fields) == CONFIG_KEYS
    assert set(Rule.model_fields) == RULE_KEYS


def test_built_in_methods_are_the_promised_ones():
    assert set(olq.method_names()) >= METHODS
    assert {name for name in olq.method_names() if name in METHODS} == METHODS


@pytest.mark.parametrize(("name", "builtin"), ERRORS.items())
def test_each_error_is_also_the_builtin_that_a_caller_expects(name: str, builtin: type[Exception]):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.OlqError)
    assert issubclass(kind, builtin)


def test_error_classes_are_the_promised_ones():
    kinds = {n for n, v in vars(errors).items() if inspect.isclass(v) and issubclass(v, errors.OlqError)}
    assert kinds == {*ERRORS, "OlqError"}


def test_the_version_is_that_of_the_installed_package():
    try:
        installed = importlib.metadata.version("olq")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs olq to be installed: make test does it")
    assert olq.__version__ == installed


def test_the_package_tells_type_checkers_that_it_is_typed():
    assert (REPO / "olq" / "py.typed").exists()
