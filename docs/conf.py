"""Settings of Sphinx, which makes the site from docs, the root's pages and the docstrings."""

import importlib
import json
import os
import pkgutil
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from math_core import LatexToMathML
from sphinx.errors import ExtensionError

import fusedops
from fusedops.cli.bench import load

ROOT = Path(__file__).parents[1]
load(ROOT)

from bench import plot, report  # noqa: E402

#: Pages whose text is elsewhere.
ELSEWHERE = {
    "index": "README.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
    "security": "SECURITY.md",
    "notes": "bench/NOTES.md",
}
#: The head of a page with examples, by which myst-nb knows that it runs them.
RUN = """---
file_format: mystnb
kernelspec: {{name: python3}}
mystnb: {{execution_in_temp: {}}}
---
"""
#: The place of a picture, as bench/tables.py writes it: a file of bench/results, and an op.
PICTURE = re.compile(r"<!-- picture: (\w+) (\w+) -->")

project = "fusedops"
version = release = fusedops.__version__
copyright = "The fusedops developers"
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "myst_nb",
]
default_role = "autolink"  # of autosummary: a docstring's `name` is a link where it names an object
html_theme = "furo"
html_title = f"fusedops {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_math_renderer = "mathml"
html_search_scorer = str(ROOT / "docs" / "scorer.js")

autodoc_typehints = "none"
numpydoc_class_members_toctree = numpydoc_show_class_members = False
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
# For the processes that run examples. On a busy machine threads of OpenMP wait for one another.
os.environ["MATPLOTLIBRC"] = str(ROOT / "docs")
os.environ["OMP_NUM_THREADS"] = "1"


def read(app: Any, page: str, source: list[str]) -> None:
    """Take a page's text from where it is, aim its links at pages, and make its examples cells."""
    text = source[0]
    if page in ELSEWHERE:
        text = (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8") + text
    for name, file in ELSEWHERE.items():
        text = re.sub(rf"\]\((\.\./)?{re.escape(file)}\b", f"]({name}.md", text)
    text = text.replace("](docs/", "](").replace("](bench/", "](../bench/")
    text = text.replace("](CITATION", "](../CITATION")
    text = PICTURE.sub(r'<img src="pictures/\1/\2.svg" alt="Times of \2 and its peers">', text)
    if "```python\n" in text:
        # A page that reads docs/data runs beside it.
        head = RUN.format("false" if '("data/' in text else "true")
        text = head + text.replace("```python\n", "```{code-cell}\n")
    source[0] = text


def draw(app: Any) -> None:
    """Draw the pictures of Measured, which are too many to be tracked."""
    places = PICTURE.findall((ROOT / "docs/measured.md").read_text(encoding="utf-8"))
    for name in {name for name, _ in places}:
        found = report.read(ROOT / f"bench/results/{name}.json")
        drawn = plot.draw_ops(found, app.outdir / "pictures" / name)
        missing = {op for of, op in places if of == name} - drawn.keys()
        if missing:
            raise ExtensionError(f"{name}.json has no times of {', '.join(sorted(missing))}")


TEX = LatexToMathML()


def formula(writer: Any, node: nodes.math | nodes.math_block) -> None:
    """Write a formula as MathML, which browsers show without a script or a font from elsewhere."""
    block = isinstance(node, nodes.math_block)
    tag = "div" if block else "span"
    mathml = TEX.convert_with_local_state(node.astext(), displaystyle=block)
    writer.body.append(f"{writer.starttag(node, tag, '', CLASS='math')}{mathml}</{tag}>")
    raise nodes.SkipNode


def check_search(app: Any, error: Exception | None) -> None:
    """Raise an error unless the search finds every public name in the reference."""
    if error or app.builder.name != "html":
        return
    text = (app.outdir / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    found = {entry[4] for entries in index["objects"].values() for entry in entries}
    missing = set(public_names()) - found
    if missing:
        raise ExtensionError(f"the search finds no {', '.join(sorted(missing))}")


def public_names() -> list[str]:
    """Return the names that modules export."""
    modules = [
        importlib.import_module(name)
        for _, name, _ in pkgutil.walk_packages(fusedops.__path__, "fusedops.")
        if not re.search(r"\.(_|cli)", name)
    ]
    return [name for each in (fusedops, *modules) for name in getattr(each, "__all__", ())]


def setup(app: Any) -> None:
    app.connect("builder-inited", draw)
    app.connect("source-read", read)
    app.connect("build-finished", check_search)
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
