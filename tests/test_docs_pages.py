"""Pages of the documentation that are made of other files."""

from __future__ import annotations

import importlib.util

import pytest
from support import REPOSITORY

pytest.importorskip("mkdocs")
_SPEC = importlib.util.spec_from_file_location("docs_pages", REPOSITORY / "tools" / "docs_pages.py")
assert _SPEC is not None and _SPEC.loader is not None
docs_pages = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(docs_pages)


@pytest.mark.parametrize("page", docs_pages.MEASURED)
def test_a_model_has_its_own_rows_and_no_others(page):
    title, name = docs_pages.MEASURED[page]
    text = docs_pages.model_page(page)
    assert text.startswith(f"# {title}: measurements\n")
    others = [other for _, other in docs_pages.MEASURED.values() if not name.startswith(other)]
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert any(row.strip("| *").startswith(name) for row in rows)
    assert [row for row in rows if row.strip("| *").startswith(tuple(others))] == []
    assert f"measured-{page}.md" in (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")


def test_rows_below_that_leave_out_the_name_belong_to_the_one_above():
    rows = [
        "| model | engine | ms |", "| --- | --- | --- |", "| Flux, small | a | 1 |", "| | b | 2 |", "| the same, large | a | 3 |",
        "| Wan | a | 4 |", "| | b | 5 |",
    ]  # fmt: skip
    assert docs_pages._rows_of("Flux", rows) == rows[2:5]
    assert docs_pages._rows_of("Wan", rows) == rows[5:]
    assert docs_pages._rows_of("model", rows) == rows[2:]


def test_a_table_keeps_the_paragraph_that_says_how_it_was_measured():
    code = "```\n| no | table |\n\n| a | b |\n```"
    page = f"# Page\n\nOne H100,\n2026.\n\n{code}\n\n| a | b |\n| --- | --- |\n| Flux | 1 |\n\n## Next\n\nText.\n"
    (table,) = docs_pages._tables(page)
    assert table.heading == "Page" and table.before == ["One H100,", "2026."] and table.rows[2] == "| Flux | 1 |"
