"""Copy the pages for the site, which `make site` builds: `python -m tools.site_pages`.

The front page is the README, and the menu is the index of docs/. A link to a file that is no page leads to the home of the
repository, if setup.cfg has one, and is plain words otherwise. Only the standard library is needed.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "site"
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?://)([^)#\s]*)(#[^)\s]*)?\)")
INDEX = Path("docs/README.md")


def main(out: Path = OUT) -> None:
    """Write the pages, what they show, and mkdocs.yml with the menu."""
    shutil.rmtree(out / "pages", ignore_errors=True)
    shutil.copytree(ROOT / "docs", out / "pages", ignore=shutil.ignore_patterns("*.md"))
    for source, place in places().items():
        target = out / "pages" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(rewritten((ROOT / source).read_text(), source))
    shutil.copy(ROOT / "tools" / "site.css", out / "pages")
    (out / "mkdocs.yml").write_text("INHERIT: ../../mkdocs.yml\ndocs_dir: pages\nsite_dir: html\nnav:\n" + menu())


def places() -> dict[Path, Path]:
    """Return the place on the site of each page of the checkout."""
    pages = [path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))]
    special = {Path("README.md"): Path("index.md"), INDEX: Path("pages.md")}
    return {path: special.get(path, path.relative_to("docs") if path.parts[0] == "docs" else path) for path in pages}


def rewritten(text: str, source: Path) -> str:
    """Return the text of the page `source` with links between the places of the site."""
    table, home = places(), repository()

    def link(match: re.Match[str]) -> str:
        image, words, path, anchor = match[1], match[2], match[3], match[4] or ""
        if not path:
            return match[0]
        file = Path(os.path.normpath(source.parent / path))
        place = table.get(file) or (file.relative_to("docs") if file.parts[0] == "docs" else None)
        if place and (ROOT / file).is_file():
            return f"{image}[{words}]({os.path.relpath(place, table[source].parent)}{anchor})"
        return f"[{words}]({home}/blob/main/{file}{anchor})" if home else words

    return LINK.sub(link, text)


def repository() -> str | None:
    """Return the address of the repository, as setup.cfg has it."""
    cfg = configparser.ConfigParser()
    cfg.read(ROOT / "setup.cfg")
    return cfg["metadata"].get("url")


def menu() -> str:
    """Return the menu: a part for each heading of the index, with the pages that its lines begin with."""
    lines, table, seen = ["  - index.md\n", "  - pages.md\n"], places(), {Path("README.md"), INDEX}
    for line in (ROOT / INDEX).read_text().splitlines():
        if line.startswith("## "):
            lines.append(f"  - {line.removeprefix('## ')}:\n")
        elif link := re.match(r"\* \[[^]]*\]\(([^)#]+)", line):
            page = Path(os.path.normpath(INDEX.parent / link[1]))
            lines += [f"    - {table[page]}\n"] if page in table and page not in seen else []
            seen.add(page)
    return "".join(lines)


if __name__ == "__main__":
    main()
