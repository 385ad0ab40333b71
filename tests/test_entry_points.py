"""Another package adds a method: installed for real, and in the ways in which it can go wrong.

The packages that go wrong are a module and a `dist-info` folder in a folder that is put on `sys.path`: what
an installer would leave there.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from olq.errors import ConfigError, UnknownNameError
from olq.registry import Registry

HERE = Path(__file__).resolve().parent
GROUP = "olq.tests.methods"


def run(*command: str, cwd: Path, paths: tuple[Path, ...] = ()) -> str:
    """Output of a Python program that sees olq, and the packages in `paths`."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*paths, HERE.parent)))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin, built and installed by pip into a folder of its own, without a network."""
    folder = tmp_path_factory.mktemp("plugin")
    source, target = folder / "source", folder / "site"
    shutil.copytree(HERE / "plugin_pkg", source)  # setuptools builds beside its input
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    run("-m", "pip", "install", *options, "--target", str(target), str(source), cwd=folder)
    return target


def test_an_installed_method_is_listed_without_being_imported_and_loaded_when_asked_for(installed: Path):
    program = (
        "import sys, olq\n"
        "assert 'sign_int8' in olq.method_names() and 'olq_sign_int8' not in sys.modules\n"
        "method = olq.get_method('sign_int8', levels=7)\n"
        "import olq_sign_int8\n"
        "assert type(method) is olq_sign_int8.SignInt8 and method.name == 'sign_int8'\n"
        "assert olq.get_method('sign_int8', levels=7) == method != olq.get_method('sign_int8')\n"
        "print(method)"
    )
    assert run("-c", program, cwd=installed, paths=(installed,)).strip() == "SignInt8(levels=7)"


def test_without_the_package_the_method_is_unknown(tmp_path: Path):
    program = (
        "import olq\n"
        "try:\n"
        "    olq.get_method('sign_int8')\n"
        "except olq.errors.UnknownNameError as error:\n"
        "    print(error)"
    )
    assert "one of 'fp8', 'keep', 'mxfp8', 'nvfp4'" in run("-c", program, cwd=tmp_path)


def test_an_installed_method_passes_the_conformance_suite(installed: Path, tmp_path: Path):
    shutil.copy(HERE / "plugin_pkg" / "check_sign_int8.py", tmp_path)
    report = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--rootdir", str(tmp_path)),
        "check_sign_int8.py",
        cwd=tmp_path,
        paths=(installed,),
    )
    assert " passed" in report
    assert " skipped" not in report


Package = Callable[..., None]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Put a package with one module and its entry points on `sys.path`."""
    modules: list[str] = []

    def put(module: str, code: str, **entries: str) -> None:
        folder = tmp_path / module
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))
        modules.append(module)
        monkeypatch.syspath_prepend(folder)

    yield put  # pyright: ignore[reportReturnType]
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def registry() -> Registry[type]:
    return Registry("method", group=GROUP, attribute="name")


def test_a_package_that_is_installed_later_is_found(registry: Registry[type], package: Package):
    with pytest.raises(UnknownNameError):
        registry["late"]
    package("late_pkg", "class Late: ...", late="late_pkg:Late")
    assert registry["late"].__name__ == "Late"
    assert registry["late"].name == "late"  # pyright: ignore[reportAttributeAccessIssue]
    assert "late" in registry.names()


def test_asking_for_one_name_imports_no_other_package(registry: Registry[type], package: Package):
    package("good_pkg", "class Good: ...", good="good_pkg:Good")
    package("broken_pkg", "1 / 0", broken="broken_pkg:Broken")
    assert registry.names() == ("broken", "good")
    assert "broken" in registry
    assert registry["good"].__name__ == "Good"
    assert "broken_pkg" not in sys.modules


BROKEN = {
    "raises while it is imported": ("1 / 0", ZeroDivisionError, "division by zero"),
    "needs what is not there": ("import no_such_module_at_all", ModuleNotFoundError, "no_such_module_at_all"),
    "has no such class": ("class Other: ...", AttributeError, "Broken"),
}


@pytest.mark.parametrize(("code", "kind", "text"), BROKEN.values(), ids=BROKEN)
def test_a_package_that_fails_raises_its_own_error_each_time_it_is_asked_for(
    registry: Registry[type], package: Package, code: str, kind: type[Exception], text: str
):
    package("broken_pkg", code, broken="broken_pkg:Broken")
    for _ in range(2):
        with pytest.raises(kind, match=text) as caught:
            registry["broken"]
        assert caught.value.__notes__ == [
            "while olq loaded the method 'broken' "
            "from entry point 'broken = broken_pkg:Broken' of broken_pkg 1.0"
        ]


@pytest.fixture
def importable(registry: Registry[type], monkeypatch: pytest.MonkeyPatch) -> Registry[type]:
    module = type(sys)("olq_test_registry")
    module.registry = registry  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "olq_test_registry", module)
    return registry


DECORATED = "from olq_test_registry import registry\n@registry.add('twice')\nclass Twice: ..."


@pytest.mark.parametrize("value", ["twice_pkg:Twice", "twice_pkg"])
def test_a_package_may_decorate_its_class_and_list_it(
    importable: Registry[type], package: Package, value: str
):
    package("twice_pkg", DECORATED, twice=value)
    assert importable["twice"].__name__ == "Twice"
    assert importable["twice"] is importable["twice"]


def test_a_package_that_was_imported_before_it_is_asked_for_is_the_same(
    importable: Registry[type], package: Package
):
    package("twice_pkg", DECORATED, twice="twice_pkg:Twice")
    import twice_pkg  # pyright: ignore[reportMissingImports]

    assert importable["twice"] is twice_pkg.Twice


def test_a_package_that_registers_and_then_fails_leaves_nothing_behind(
    importable: Registry[type], package: Package
):
    package("twice_pkg", DECORATED + "\n1 / 0", twice="twice_pkg:Twice")
    for _ in range(2):  # the second time it is again its own error, not "the name is taken"
        with pytest.raises(ZeroDivisionError):
            importable["twice"]
    with pytest.raises(UnknownNameError):
        importable.remove("twice")


def test_a_module_that_registers_nothing_under_its_name_is_an_error(
    registry: Registry[type], package: Package
):
    package("empty_pkg", "", empty="empty_pkg")
    with pytest.raises(ConfigError, match="found:  a module that registers no 'empty'") as caught:
        registry["empty"]
    assert caught.value.where == "entry point 'empty = empty_pkg' of empty_pkg 1.0"


def test_two_packages_with_one_name_are_an_error_that_names_both(registry: Registry[type], package: Package):
    package("first_pkg", "class A: ...", same="first_pkg:A", other="first_pkg:A")
    package("second_pkg", "class B: ...", same="second_pkg:B")
    with pytest.raises(ConfigError) as caught:
        registry["same"]
    assert caught.value.problem == "Two methods are called 'same'."
    for text in ("'same = first_pkg:A' of first_pkg 1.0", "'same = second_pkg:B' of second_pkg 1.0"):
        assert text in caught.value.found
    assert registry.names() == ("other", "same")
    assert registry["other"].__name__ == "A"


def test_a_package_cant_take_a_name_that_is_registered(registry: Registry[type], package: Package):
    registry.add("fp8")(type("BuiltIn", (), {"__module__": "olq"}))
    package("taker_pkg", "class Mine: ...", fp8="taker_pkg:Mine")
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            registry["fp8"]
        assert caught.value.found == "olq.BuiltIn and entry point 'fp8 = taker_pkg:Mine' of taker_pkg 1.0"


def test_entry_points_are_listed_once_and_loaded_once(
    registry: Registry[type], package: Package, monkeypatch: pytest.MonkeyPatch
):
    package("good_pkg", "class Good: ...", good="good_pkg:Good")
    calls = []

    class Counted(EntryPoint):
        def load(self) -> object:
            calls.append("load")
            return super().load()

    def listed(*, group: str) -> list[EntryPoint]:
        calls.append("list")
        return [Counted("good", "good_pkg:Good", group)]

    monkeypatch.setattr("olq.registry.entry_points", listed)
    for _ in range(100):
        assert registry["good"].__name__ == "Good"
    assert calls == ["list", "load"]
