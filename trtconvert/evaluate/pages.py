"""HTML pages: one environment for all templates of `trtconvert.evaluate`."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


def template(name: str) -> Template:
    """One of the folder `templates`; what it is not given is an error, and what it is given is escaped."""
    environment = Environment(
        loader=PackageLoader("trtconvert.evaluate"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
