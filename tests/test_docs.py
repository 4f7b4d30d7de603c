"""The pages: their links lead to files, and every recipe has its page and its rows."""

import re
from pathlib import Path

import pytest

from gptscale.recipes import RECIPES
from tools import drawings

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page):
    targets = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_readme_fits_a_screen_or_two():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_page_and_its_rows(recipe):
    titles = [page.read_text().partition("\n")[0] for page in (ROOT / "docs" / "recipes").glob("*.md")]
    assert any(recipe in re.findall(r"\w+", title) for title in titles)
    readme, status = (re.findall(r"(?m)^\|.*", (ROOT / name).read_text()) for name in ("README.md", "docs/status.md"))
    assert any(f"[{recipe}](docs/recipes/" in row for row in readme)
    assert any(f"`{recipe}`" in row for row in status)


def test_every_fault_has_its_row_and_every_test_it_names_exists():
    page = (ROOT / "docs" / "guides" / "faults.md").read_text()
    rows = re.findall(r"(?m)^\| ([PSMCNX]\d+) \|(.*)\|$", page)
    counts = {"P": 19, "S": 21, "M": 5, "C": 19, "N": 8, "X": 12}
    assert sorted(row for row, _ in rows) == sorted(f"{part}{i}" for part, n in counts.items() for i in range(1, n + 1))
    for row, text in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
        missing = [name for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
        assert missing == [], row
        assert named or text.rstrip().endswith("no test"), row


def test_every_drawing_is_drawn_by_the_script_and_shown_on_a_page(tmp_path):
    folder = ROOT / "docs" / "images" / "drawings"
    drawings.main(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir() if path.stat().st_size > 10_000}
    shown = {Path(link).name for page in PAGES for link in LINK.findall(page.read_text()) if "/drawings/" in link}
    assert drawn == {path.name for path in folder.glob("*.svg")} == shown
