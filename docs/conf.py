"""The site: `ci/docs.sh` builds it, with warnings as errors."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.application import Sphinx

project = "dask-gpu-mpi"
author = "dask_gpu_mpi developers"
project_copyright = author
release = version = installed_version("dask-gpu-mpi")

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx_click",
]
exclude_patterns = ["_build"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # numpydoc's sections have the types
numpydoc_show_class_members = False

smartquotes = False  # options have two dashes

html_theme = "furo"
html_title = "dask-gpu-mpi"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_logo = "_static/logo.svg"


def write_texts(app: Sphinx, error: Exception | None) -> None:
    """The sources of the pages next to them, as ``PAGE.md``, and a list of them for language models, ``llms.txt``."""
    if error is not None or app.builder.name != "html":
        return
    lines = [
        "# dask-gpu-mpi",
        "",
        "> One batch job becomes one Dask cluster, with a worker on every GPU.",
        "",
        "## Pages",
        "",
    ]
    for name in sorted(app.env.found_docs):
        source, target = Path(app.env.doc2path(name)), Path(app.outdir, f"{name}.md")
        source = (
            Path(app.srcdir).parent / "CHANGELOG.md" if name == "changes" else source
        )  # which it includes
        target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        lines.append(f"- [{app.env.titles[name].astext()}]({name}.md)")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("build-finished", write_texts)
