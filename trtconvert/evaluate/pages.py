"""Loads the HTML templates of `trtconvert.evaluate`."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


def template(name: str) -> Template:
    """Returns a template of the folder `templates`. Missing variables are errors, and all values are escaped."""
    environment = Environment(
        loader=PackageLoader("trtconvert.evaluate"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
