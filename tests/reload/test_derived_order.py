"""What may be declared, and the order in which it runs: for any graph, exactly once."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import olq
from olq.errors import ConfigError
from olq.reload import derived
from reload.small_models import as_bytes, places

NOT_A_NAME = [
    ("a.b", "without a dot"),
    ("", "without a dot"),
    ("forward", "class attribute"),
    ("in_features", "a int of that name"),
    ("weight", "a tensor of a quantized weight"),
    ("weight_scale", "a tensor of a quantized weight"),
]


@pytest.mark.parametrize(("name", "text"), NOT_A_NAME)
def test_names_that_a_tensor_cannot_have_are_refused(name: str, text: str):
    layer = olq.prepare(nn.Sequential(nn.Linear(32, 16)), olq.QuantConfig(method="fp8"))[0]
    with pytest.raises(ConfigError, match=text):
        derived.derive(layer, name, lambda m: m.weight)
    assert derived.refresh(layer) == derived.Refreshed((), ())


def test_a_declaration_is_made_once():
    module = nn.Linear(4, 4)
    derived.derive(module, "copy", lambda m: m.weight)
    with pytest.raises(ConfigError, match="the tensor 'copy', which the module has already"):
        derived.derive(module, "copy", lambda m: m.weight)
    derived.after_load(module, print)
    with pytest.raises(ConfigError, match=r"the hook print\(\), which the module has already"):
        derived.after_load(module, print)


def test_hooks_of_one_name_are_told_apart():
    module = nn.Linear(4, 4)
    for _ in range(2):
        derived.after_load(module, lambda m: None)
    assert derived.refresh(module).refreshed == ("<lambda>()", "<lambda>()#2")


def test_a_circle_is_shown():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    a, b = model
    derived.derive(a, "x", lambda m: m.weight, reads=[(b, "y")])
    derived.derive(b, "y", lambda m: m.weight, reads=[(b, "z")])
    derived.derive(b, "z", lambda m: m.weight, reads=[(b, "y")])
    with pytest.raises(ConfigError, match="in a circle") as caught:
        derived.refresh(model)
    assert caught.value.found == "1.y reads 1.z reads 1.y"
    assert not hasattr(a, "x")


def test_reads_stay_inside_the_model():
    model, stranger = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    derived.derive(stranger, "y", lambda m: m.weight)
    for read in (stranger, (stranger, "y")):
        model[0].quant_derived = []
        derived.derive(model[0], "x", lambda m: m.weight, reads=[read])
        with pytest.raises(ConfigError, match=r"a Linear that model.modules\(\) does not list"):
            derived.refresh(model)


def test_reads_name_what_is_declared():
    module = nn.Linear(4, 4)
    derived.derive(module, "x", lambda m: m.weight, reads=[(module, "w1")])
    with pytest.raises(ConfigError, match="w1 in reads") as caught:
        derived.refresh(module)
    assert caught.value.need == "one of x"


def test_what_is_not_last_cannot_read_what_is():
    module = nn.Linear(4, 4)
    derived.derive(module, "x", lambda m: m.weight, last=True)
    derived.derive(module, "y", lambda m: m.x, reads=[(module, "x")])
    with pytest.raises(ConfigError, match="reads x, which has last=True"):
        derived.refresh(module)


def test_reading_a_module_is_reading_its_descendants():
    inner, outer = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(inner), outer)
    derived.derive(outer, "copy", lambda m: inner.weight * 1, reads=[model[0]])
    derived.derive(model, "all", lambda m: inner.weight * 1)
    derived.refresh(model)
    assert derived.refresh(model, {inner}) == derived.Refreshed(("all", "1.copy"), ())
    assert derived.refresh(model, {outer}) == derived.Refreshed(("all",), ("1.copy",))


def draw_graph(data: st.DataObject) -> tuple[nn.Module, list[dict], list[str]]:
    """A small model with a random graph of derived tensors and hooks; the log says which ran."""
    size = data.draw(st.integers(1, 4), label="modules")
    model = nn.ModuleList(nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(size))
    count = data.draw(st.integers(1, 8), label="nodes")
    rank = data.draw(st.permutations(range(count)), label="rank")
    log: list[str] = []
    nodes: list[dict] = []
    for i in range(count):
        at, hook, last = data.draw(st.tuples(st.integers(0, size - 1), st.booleans(), st.booleans()))
        nodes.append({"i": i, "module": model[at], "at": at, "hook": hook, "last": last})
    for i, node in enumerate(nodes):
        allowed = [j for j in range(count) if rank[j] < rank[i] and (node["last"] or not nodes[j]["last"])]
        node["needs"] = data.draw(st.lists(st.sampled_from(allowed), unique=True)) if allowed else []
        node["modules"] = data.draw(st.lists(st.integers(0, size - 1), unique=True))
        if not node["needs"] and not node["modules"]:
            node["modules"] = [node["at"]]  # what an empty `reads` stands for
            node["empty"] = True

    def value(i: int, _: nn.Module | None = None) -> Tensor:
        node = nodes[i]
        read = [model[m].weight.flatten() for m in node["modules"]]
        read += [getattr(nodes[j]["module"], f"d{j}") for j in node["needs"]]
        log.append(f"{node['at']}.{i}")
        return torch.stack([*read, torch.full((1,), i + 1.0, dtype=torch.float64)]).sum(0)

    def hook(i: int, module: nn.Module) -> None:
        setattr(module, f"d{i}", value(i))

    for i, node in enumerate(nodes):
        node["run"] = functools.partial(hook if node["hook"] else value, i)
    for i, node in enumerate(nodes):
        reads: list = [model[m] for m in node["modules"]]
        reads += [
            (nodes[j]["module"], nodes[j]["run"] if nodes[j]["hook"] else f"d{j}") for j in node["needs"]
        ]
        reads = [] if node.get("empty") else data.draw(st.permutations(reads))
        if node["hook"]:
            derived.after_load(node["module"], node["run"], reads=reads, last=node["last"])
        else:
            derived.derive(node["module"], f"d{i}", node["run"], reads=reads, last=node["last"])
    return model, nodes, log


def expected_order(nodes: list[dict]) -> list[str]:
    """Again and again the first that may run: by last, module and declaration."""
    order: list[dict] = []
    while len(order) < len(nodes):
        done = {node["i"] for node in order}
        ready = [n for n in nodes if n["i"] not in done and done.issuperset(n["needs"])]
        order.append(min(ready, key=lambda n: (n["last"], n["at"], n["i"])))
    return [f"{node['at']}.{node['i']}" for node in order]


def affected(nodes: list[dict], changed: set[int]) -> set[int]:
    found = {n["i"] for n in nodes if changed.intersection(n["modules"])}
    while more := {n["i"] for n in nodes if found.intersection(n["needs"])} - found:
        found |= more
    return found


@given(st.data())
def test_any_graph_runs_once_in_its_one_legal_order(data: st.DataObject):
    model, nodes, log = draw_graph(data)
    report = derived.refresh(model)
    assert log == expected_order(nodes)
    assert len(report.refreshed) == len(nodes)
    assert report.skipped == ()


@given(st.data())
def test_a_partial_refresh_is_a_full_one_restricted_to_what_depends_on_the_change(data: st.DataObject):
    model, nodes, log = draw_graph(data)
    derived.refresh(model)
    at = places(model)
    changed = data.draw(st.sets(st.integers(0, len(model) - 1)), label="changed")
    with torch.no_grad():
        for m in changed:
            model[m].weight.add_(1000)
    log.clear()
    report = derived.refresh(model, {model[m] for m in changed})
    due = affected(nodes, changed)
    assert log == [name for name in expected_order(nodes) if int(name.split(".")[1]) in due]
    assert len(report.refreshed) == len(due)
    assert len(report.skipped) == len(nodes) - len(due)
    after = as_bytes(model)
    derived.refresh(model)
    assert as_bytes(model) == after
    assert places(model) == at
