"""Sphinx: Markdown pages, an API reference from docstrings, and nothing that is loaded from another host."""

import logging
import re
import sys
import textwrap
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

project = "olq"
author = "The olq authors"
copyright = "The olq authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
root_doc = "index"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "olq"
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "monokai"


def refuse_foreign_hosts(app: Sphinx, failure: Exception | None) -> None:
    """Fail the build when a page would fetch a script, style, font or picture from somewhere else."""
    if failure or app.builder.format != "html":
        return
    fetch = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=[\"'](?:https?:)?//[^\"']*[^>]*>")
    pages = Path(app.outdir).rglob("*.html")
    found = [f"{p.relative_to(app.outdir)}: {m[0]}" for p in pages for m in fetch.finditer(p.read_text())]
    if found:
        raise ExtensionError("pages load from other hosts:\n" + "\n".join(found[:20]))


def returns_field(section: re.Match[str]) -> str:
    """The field list of a "Returns" section; with several results, `name: what it is` each, a list of them."""
    lines = textwrap.dedent(section[1]).strip("\n").split("\n")
    starts = [bool(re.match(r"\w+: ", line)) for line in lines]
    if sum(starts) > 1:
        lines = [f"- {x}" if start else f"  {x.strip()}" for x, start in zip(lines, starts, strict=True)]
    return ":returns:\n" + textwrap.indent("\n".join(lines), "    ") + "\n\n"


def docstring_to_rest(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Docstrings are plain text with `backticks`: keep what reStructuredText would take for markup.

    A module's docstring aligns its words in columns, so all but its first line is shown as it stands.
    """
    if what == "module" and len(lines) > 1:
        rest = [line for line in lines[1:] if line.strip()]
        lines[:] = [lines[0], "", *(["::", "", *("    " + line for line in lines[1:]), ""] if rest else [])]
        return
    text = "\n".join(lines)
    # Napoleon takes what stands before a colon for a type. Here the types are in the signature.
    text = re.sub(r"^Returns:\n((?: +.*\n?|\n)+)", returns_field, text, flags=re.MULTILINE)
    if what in {"attribute", "data", "property"}:
        text = text.replace(": ", " – ")
    pieces = re.split(r"(``.+?``|`[^`]+`)", text, flags=re.DOTALL)
    for i, piece in enumerate(pieces):
        if piece.startswith("`"):
            pieces[i] = f"``{piece.strip('`')}``"
        else:
            pieces[i] = re.sub(r"[*|]|(?<=\w)_(?!\w)", r"\\\g<0>", piece)
    lines[:] = "".join(pieces).split("\n")


def setup(app: Sphinx) -> None:
    """Register both, and let a glob of the index match nothing: a kind of page may have none yet."""
    log = logging.getLogger("sphinx.sphinx.directives.other")  # its warning has no type to suppress it by
    log.addFilter(lambda record: getattr(record, "subtype", None) != "empty_glob")
    app.connect("build-finished", refuse_foreign_hosts)
    app.connect("autodoc-process-docstring", docstring_to_rest, priority=100)  # before napoleon's turn
