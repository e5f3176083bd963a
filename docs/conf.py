"""Sphinx settings."""

import magma_optax

project = "magma_optax"
release = magma_optax.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
myst_enable_extensions = ["dollarmath", "deflist"]
html_theme = "furo"
exclude_patterns = ["_build"]
nitpicky = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
default_role = "code"
napoleon_use_ivar = True
myst_heading_anchors = 3
