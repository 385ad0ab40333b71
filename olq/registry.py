"""Names to implementations: filled by a decorator, or by another package's entry point.

Strict. A name is taken once; an unknown name is answered with those that exist; there are no aliases and no
case folding. An entry point is listed without importing anything, and loaded when its own name is asked for.
If that fails, its own exception comes through, with a note that says what was being loaded.
"""

import difflib
import re
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Generic, TypeVar

from olq.errors import ConfigError, UnknownNameError

T = TypeVar("T")
Item = TypeVar("Item")

#: Group of entry points under which another package offers its methods.
METHOD_GROUP = "olq.methods"
_NAME = re.compile(r"[a-z][a-z0-9_.-]*")


class Registry(Generic[T]):
    """Named things of one kind.

    Args:
        kind: what the names stand for, for messages: `"method"`.
        group: the entry-point group of third parties.
        attribute: if given, the attribute of a registered thing that is set to its name.
    """

    def __init__(self, kind: str, *, group: str, attribute: str | None = None) -> None:
        self._kind, self._group, self._attribute = kind, group, attribute
        self._items: dict[str, T] = {}
        #: Names whose entry point was loaded and found to be what is registered.
        self._loaded: set[str] = set()
        self._listed: dict[str, list[EntryPoint]] | None = None
        self._lock = threading.RLock()

    def add(self, name: str) -> Callable[[Item], Item]:
        """Decorator that registers a class or function under `name`.

        Raises:
            ConfigError: the name is taken, or is no lower-case name.
        """

        def put(item: Item) -> Item:
            with self._lock:
                if not _NAME.fullmatch(name):
                    raise self._bad_name(name, item)
                if name in self._items:
                    raise self._taken(name, _describe(self._items[name]), _describe(item))
                if self._attribute is not None:
                    setattr(item, self._attribute, name)
                self._items[name] = item  # pyright: ignore[reportArgumentType]
            return item

        return put

    def remove(self, name: str) -> T:
        """Take a name out again, for a test or for a cell of a notebook that is run twice.

        Raises:
            UnknownNameError: nobody registered it in this process.
        """
        with self._lock:
            if name not in self._items:
                raise self._unknown(name)
            self._loaded.discard(name)
            return self._items.pop(name)

    def names(self) -> tuple[str, ...]:
        """All names, those of entry points included, sorted. Imports nothing."""
        with self._lock:
            return tuple(sorted(self._items.keys() | self._entry_points().keys()))

    def __getitem__(self, name: str) -> T:
        """The thing called `name`; loads its entry point if it has one.

        Raises:
            UnknownNameError: there is none.
            ConfigError: two packages offer the name, or a package offers a name that is taken.
            Exception: whatever the entry point raises while it is imported.
        """
        with self._lock:
            if name not in self._items and name not in self._entry_points():
                self._listed = None  # a package may have been installed since they were listed
            offers = self._entry_points().get(name, [])
            if len(offers) > 1:
                raise self._taken(name, *map(_provider, offers[:2]))
            if offers and name not in self._loaded:
                self._load(name, offers[0])
            if name not in self._items:
                raise self._unknown(name)
            return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def _entry_points(self) -> dict[str, list[EntryPoint]]:
        """By name. Listed at the first question, not at import: it reads the metadata of all packages."""
        if self._listed is None:
            self._listed = {}
            for entry in entry_points(group=self._group):
                self._listed.setdefault(entry.name, []).append(entry)
        return self._listed

    def _load(self, name: str, entry: EntryPoint) -> None:
        """Import an entry point. Its value is the thing itself, or a module that registers it."""
        before = set(self._items)
        try:
            item = entry.load()
            if isinstance(item, ModuleType):
                if name not in self._items:
                    raise self._not_registered(name, entry)
            elif name not in self._items:
                self.add(name)(item)
            elif self._items[name] is not item:
                raise self._taken(name, _describe(self._items[name]), _provider(entry))
        except Exception as error:
            # What a half-imported module registered would make the next try fail for another reason.
            self._items = {n: item for n, item in self._items.items() if n in before or n in self._loaded}
            error.add_note(f"while olq loaded the {self._kind} {name!r} from {_provider(entry)}")
            raise
        self._loaded.add(name)

    def _unknown(self, name: str) -> UnknownNameError:
        near = difflib.get_close_matches(str(name), self.names(), n=1)
        return UnknownNameError(
            f"No {self._kind} is called {name!r}.",
            where=f"the registered {self._kind}s and the entry points of group {self._group!r}",
            found=repr(name),
            need=f"one of {', '.join(map(repr, self.names()))}"
            if len(self)
            else "a registered name; there is none",
            remedy=f"did you mean {near[0]!r}?"
            if near
            else f"install the package that offers this {self._kind}",
        )

    def _taken(self, name: str, first: str, second: str) -> ConfigError:
        return ConfigError(
            f"Two {self._kind}s are called {name!r}.",
            where=f"registry of {self._kind}s",
            found=f"{first} and {second}",
            need="a name of its own for each",
            remedy="rename one, uninstall the package that you don't need, or remove() the first one",
        )

    def _bad_name(self, name: str, item: object) -> ConfigError:
        return ConfigError(
            f"This can't be the name of a {self._kind}.",
            where=_describe(item),
            found=repr(name),
            need="a lower-case letter, then lower-case letters, digits, '_', '.' or '-'",
            remedy="choose such a name; configurations repeat it letter by letter",
        )

    def _not_registered(self, name: str, entry: EntryPoint) -> ConfigError:
        return ConfigError(
            f"An entry point does not bring the {self._kind} that it promises.",
            where=_provider(entry),
            found=f"a module that registers no {name!r}",
            need=f'{name} = "module:Class", or a module that registers {name!r} when it is imported',
            remedy="correct the package's entry point",
        )


def _describe(item: object) -> str:
    return f"{getattr(item, '__module__', '?')}.{getattr(item, '__qualname__', repr(item))}"


def _provider(entry: EntryPoint) -> str:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed package"
    return f"entry point '{entry.name} = {entry.value}' of {package}"


#: The methods: built-in ones are added when olq.methods is imported.
METHODS: Registry[type[Any]] = Registry("method", group=METHOD_GROUP, attribute="name")


def register_method(name: str) -> Callable[[Item], Item]:
    """Class decorator that makes a `QuantMethod` available as `name`, in configurations and to `get_method`.

    Sets the class's `name`. Another package uses it, or lists the class as an entry point of group
    `olq.methods`, or does both for the same class.

    Raises:
        ConfigError: the name is taken, or is no lower-case name.
    """
    return METHODS.add(name)


def get_method(name: str, /, **params: Any) -> Any:
    """Make the method that is registered as `name`.

    Args:
        name: as in a configuration.
        params: parameters of the method, which checks them itself.

    Returns:
        A `QuantMethod`.

    Raises:
        UnknownNameError: there is no such method.
        ConfigError: a parameter is unknown or has a value that is not allowed.
    """
    return METHODS[name](**params)


def method_names() -> tuple[str, ...]:
    """Names of all methods, sorted, those of other packages included. Imports nothing."""
    return METHODS.names()
