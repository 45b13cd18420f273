"""Find tables of the built site that are cut off, in a browser, at the widths of a desk and of a telephone.

    python docs/widths.py        exit with 1 if a table of build/site is wider than its page

Needs Chromium or Chrome. Every page is shown in a frame of each width, and says how far its tables reach.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SITE = Path(__file__).resolve().parent.parent / "build" / "site"
WIDTHS = 1400, 400
BROWSERS = "chromium", "chromium-browser", "google-chrome"

# In each page: the headings of tables that leave it, or hold a cell that does not show all of its text.
_LOOK = """<script>addEventListener("load", () => {
  const wide = [...document.querySelectorAll("article table")].filter(table => {
    const cells = [...table.querySelectorAll("th, td")];
    return table.getBoundingClientRect().right > table.closest("article").getBoundingClientRect().right + 1
      || cells.some(cell => cell.scrollWidth > cell.clientWidth + 1);
  });
  parent.postMessage([location.pathname, innerWidth, wide.map(table => table.rows[0].innerText)], "*");
});</script></head>"""
_COLLECT = """<script>
const seen = [];
addEventListener("message", event => {
  seen.push(event.data);
  document.documentElement.setAttribute("data-seen", JSON.stringify(seen));
});</script>"""


def main() -> int:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or not SITE.is_dir():
        print(f"widths: needs one of {', '.join(BROWSERS)} and a site in {SITE} (make docs)")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "site"
        shutil.copytree(SITE, copy)
        pages = [page for page in sorted(copy.glob("**/index.html")) if "notebook" not in page.parts]
        for page in pages:
            page.write_text(page.read_text(encoding="utf-8").replace("</head>", _LOOK, 1), encoding="utf-8")
        frames = [f'<iframe width={w} height=800 src="{page.as_uri()}"></iframe>' for page in pages for w in WIDTHS]
        outer = copy / "widths.html"
        outer.write_text(_COLLECT + "".join(frames), encoding="utf-8")
        options = "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000", "--dump-dom"
        shown = subprocess.run([browser, *options, outer.as_uri()], capture_output=True, text=True, check=True).stdout
        found = re.search(r'data-seen="([^"]*)"', shown)
        seen = json.loads(html.unescape(found[1])) if found else []
        wide = [(Path(path).relative_to(copy).parent, width, tables) for path, width, tables in seen if tables]
    for page, width, tables in wide:
        print(f"{page} at {width}: " + "; ".join(" | ".join(row.split("\t")) for row in tables))
    print(f"widths: {len(seen)} of {len(frames)} pages seen, {len(wide)} with a table that is cut off")
    return int(bool(wide) or len(seen) != len(frames))


if __name__ == "__main__":
    sys.exit(main())
