"""The site: `ci/docs.sh` builds it, with warnings as errors."""

from __future__ import annotations

from importlib.metadata import version as installed_version

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
