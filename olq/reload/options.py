"""What a load can be told by keyword, in one place for every call that takes it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from olq.errors import ConfigError
from olq.reload.names import near
from olq.reload.plans import PlanKey

#: Called after each tensor with (bytes so far, bytes in all if known, name).
ProgressCallback = Callable[[int, int | None, str], object]


@dataclass(frozen=True, slots=True)
class Staging:
    """How safetensors files are read for a load whose parameters all live on one CUDA device.

    Threads read file ranges into two page-locked buffers, whose bytes are copied to the device while the next are read
    and the last are quantized.

    Args:
        buffer_bytes: size of each of the two buffers in the host's memory. On the device wait tensors of at most twice
            this size in all, and one larger tensor.
        threads: how many read at a time.

    Raises:
        ConfigError: one of them is not a positive integer.
    """

    buffer_bytes: int = 128 << 20
    threads: int = 8

    def __post_init__(self) -> None:
        for name in ("buffer_bytes", "threads"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(
                    "Staging needs positive integers.",
                    where=f"olq.Staging({name}=...)",
                    found=repr(value),
                    need="an int of at least 1",
                    remedy=f"leave `{name}` out, or pass staging=None to read files without staging",
                )


DEFAULT_STAGING = Staging()


class LoadOptions(TypedDict, total=False):
    """What `load`, `reload` and `session` take by keyword.

    Attributes:
        scope: patterns of names or modules: a partial reload. Everything else keeps its bytes and is listed as stale.
        shadow: "device" or "host" loads into a second set of kernel tensors there (page-locked in the host's memory if
            there is a GPU), while the old weights go on serving; the commit copies them into the live addresses, and
            an error leaves the old model as it was. None loads in place, without extra memory.
        sources: "transient": a source has been consumed when `feed` returns. "stable": sources keep their values until
            `flush` or the commit, so that replayed ones may be queued, and many be quantized by one launch.
        replay: False runs every loader again, although it was recorded.
        plan_key: called with each name: what else its loader looks at. A recorded plan is used while this is equal.
        measure_error: keep SQNR and worst block of each weight, taken while its source is at hand. Costs a decode.
        measure_changes: count bytes of codes and scales that a reload changes. Keeps the old bytes of weights that are
            being loaded.
        allow_surplus: patterns of names that may arrive though nothing takes them.
        progress: called after each tensor with (bytes so far, bytes in all or None, name).
        staging: how safetensors files are read if everything that the load writes lives on one CUDA device; see
            `Staging`. None maps the files and takes tensor by tensor, which is also what is done for a CPU, for several
            devices, for `shadow="host"`, and for files with a tensor of F4, which has two elements in a byte. F6 can't
            be read in either way.
    """

    scope: Sequence[str] | None
    shadow: Literal["device", "host"] | None
    sources: Literal["transient", "stable"]
    replay: bool
    plan_key: PlanKey | None
    measure_error: bool
    measure_changes: bool
    allow_surplus: Sequence[str]
    progress: ProgressCallback | None
    staging: Staging | None


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an option that does not exist, or that has a value that it can't have."""
    if unknown := [name for name in options if name not in LoadOptions.__annotations__]:
        raise _option_error(unknown)
    _check_choice(options, "shadow", (None, "device", "host"))
    _check_choice(options, "sources", ("transient", "stable"))
    staging = options.get("staging")
    if staging is not None and not isinstance(staging, Staging):
        raise ConfigError(
            "An option of a load has a value that it can't have.",
            where="staging",
            found=repr(staging),
            need="olq.Staging(...) or None",
            remedy="leave `staging` out, or pass olq.Staging(buffer_bytes=..., threads=...)",
        )


def _option_error(names: Sequence[str]) -> ConfigError:
    known = sorted(LoadOptions.__annotations__)
    return ConfigError(
        "A load has no such option.",
        where="olq.load, olq.reload or olq.session",
        found=", ".join(repr(name) + near(name, known) for name in names),
        need=f"options among {', '.join(known)}",
        remedy="correct the name, or leave it out",
    )


def _check_choice(options: Mapping[str, Any], name: str, allowed: tuple[str | None, ...]) -> None:
    if name in options and options[name] not in allowed:
        raise ConfigError(
            "An option of a load has a value that it can't have.",
            where=name,
            found=repr(options[name]),
            need=" or ".join(map(repr, allowed)),
            remedy=f"leave `{name}` out, or choose one of these",
        )
