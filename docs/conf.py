"""Sphinx settings. The build needs no network: other projects are known from inventories/."""

import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for the tutorial's kernel too

import jax
import jax.typing
import optax

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE / "extensions"))


class ArrayLike:
    """Stands for the union of all that is an array, so that signatures name it and link to it."""


ArrayLike.__module__ = "jax.typing"
jax.typing.ArrayLike = ArrayLike
# Where users import these from, and where their projects document them.
jax.Array.__module__ = "jax"
optax.GradientTransformation.__module__ = "optax"
optax.GradientTransformationExtraArgs.__module__ = "optax"

import magma_optax  # noqa: E402

project = "magma_optax"
release = magma_optax.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "myst_nb",
    "mathml",
    "links",
]
exclude_patterns = ["_build", "inventories", "extensions"]
default_role = "py:obj"
highlight_language = "none"

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
html_math_renderer = "mathml"
suppress_warnings = ["mystnb.unknown_mime_type"]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
python_display_short_literal_types = True
napoleon_use_ivar = True
napoleon_use_rtype = False

intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "inventories/python.inv"),
    "jax": ("https://docs.jax.dev/en/latest/", "inventories/jax.inv"),
    "optax": ("https://optax.readthedocs.io/en/latest/", "inventories/optax.inv"),
}
intersphinx_timeout = 1

html_theme = "furo"
html_title = "magma_optax"
html_static_path = ["static"]
html_css_files = ["tables.css"]
