"""Check the links of the built site without a network, and that no page loads from one."""

import html.parser
import pathlib
import urllib.parse

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


class _Page(html.parser.HTMLParser):
    """What one page has: ids to link to, links, and files that a browser loads."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag's id, link and source."""
        found = {name: value for name, value in attrs if value}
        self.ids.add(found.get("id", ""))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("script", "img", "link", "iframe"):
            self.loads += [found[name] for name in ("src", "href") if name in found]


def check(app: Sphinx, exception: Exception | None) -> None:
    """Warn of each link that leads nowhere and each file that is loaded from elsewhere."""
    if exception or app.builder.format != "html":
        return
    root = pathlib.Path(app.outdir)
    names = [app.builder.get_target_uri(name) for name in sorted(app.env.found_docs)]
    pages = {root / name: _Page(root / name) for name in names}
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            url = urllib.parse.urlsplit(link)
            if url.scheme in ("http", "https") or url.netloc:
                if link in page.loads:
                    logger.warning("%s loads %s from the network", path.name, link)
                continue
            if url.scheme:  # data: and the like
                continue
            target = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            anchor = urllib.parse.unquote(url.fragment)
            if not target.exists():
                logger.warning("%s links to %s, which does not exist", path.name, link)
            elif anchor and target in pages and anchor not in pages[target].ids:
                logger.warning("%s links to %s, which has no such anchor", path.name, link)


def setup(app: Sphinx) -> dict[str, bool]:
    """Check when all pages are written."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
