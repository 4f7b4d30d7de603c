"""The pages: their links lead to files, and every recipe has its page and its rows."""

import re
from collections import Counter
from pathlib import Path

import pytest

from gptscale.recipes import RECIPES
from tools import api, drawings, promises, site_pages

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("skills/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page):
    targets = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_readme_fits_a_screen_or_two():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80


def test_the_page_of_public_names_is_that_of_the_docstrings():
    assert api.PAGE.read_text() == api.page(), "python -m tools.api writes it anew"


def test_the_site_has_every_page_in_its_menu_and_no_link_without_an_end(tmp_path):
    site_pages.main(tmp_path)
    menu = (tmp_path / "mkdocs.yml").read_text()
    assert [place for place in site_pages.places().values() if f"- {place}\n" not in menu] == []
    pages = [(page, LINK.findall(page.read_text())) for page in tmp_path.rglob("*.md")]
    links = [page.parent / link.partition("#")[0] for page, links in pages for link in links if "://" not in link]
    assert [link for link in links if not link.exists()] == []


def test_setup_cfg_alone_says_the_version_and_the_pythons():
    names = ("setup.cfg", "CITATION.cff", "CHANGELOG.md", ".github/workflows/quick.yml", "README.md")
    cfg, citation, changes, workflow, readme = ((ROOT / name).read_text() for name in names)
    version = re.search(r"(?m)^version = (.+)", cfg)[1]
    assert re.search(r"(?m)^version: (.+)", citation)[1] == re.search(r"(?m)^## \[(.+)\]", changes)[1] == version
    pythons = re.findall(r":: Python :: (3\.\d+)", cfg)
    assert re.findall(r'"(3\.\d+)"', workflow) == pythons
    assert f"Python {pythons[0]} to {pythons[-1]}" in readme
    bounds = re.search(r"(?m)^python_requires = >=3\.(\d+),<3\.(\d+)", cfg).groups()
    assert bounds == (pythons[0][2:], str(int(pythons[-1][2:]) + 1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_page_and_its_rows(recipe):
    titles = [page.read_text().partition("\n")[0] for page in (ROOT / "docs" / "recipes").glob("*.md")]
    assert any(recipe in re.findall(r"\w+", title) for title in titles)
    readme, status = (re.findall(r"(?m)^\|.*", (ROOT / name).read_text()) for name in ("README.md", "docs/status.md"))
    assert any(f"[{recipe}](docs/recipes/" in row for row in readme)
    assert any(f"`{recipe}`" in row for row in status)


def test_the_fault_page_has_the_promises_of_the_tests():
    text, numbers = promises.PAGE.read_text(), list(promises.rows(ROOT / "tests"))
    assert promises.page(text) == text, "python -m tools.promises writes the tables anew"
    counts = Counter(number[0] for number in numbers)
    assert numbers == [f"{part}{i}" for part, count in counts.items() for i in range(1, count + 1)]
    assert all(f"\n| {number} |" in text for number in numbers)
    # The words above the tables name rows that hold them.
    for bullet in re.findall(r"(?s)\n\* \*\*.*?(?=\n\n|\n\*)", text):
        named = re.findall(r"[A-Z]\d+", bullet.rpartition("(")[2])
        assert named, bullet
        assert set(named) <= set(numbers), bullet


def test_every_drawing_is_drawn_by_the_script_and_shown_on_a_page(tmp_path):
    folder = ROOT / "docs" / "images" / "drawings"
    drawings.main(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir() if path.stat().st_size > 10_000}
    shown = {Path(link).name for page in PAGES for link in LINK.findall(page.read_text()) if "/drawings/" in link}
    assert drawn == {path.name for path in folder.glob("*.svg")} == shown
