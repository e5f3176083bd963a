"""Links between the pages lead to a heading that is there. (The build checks the site itself.)"""

import re

import pytest
from test_readme import PAGES, ROOT


def anchors(page):
    """The ids of a page's headings: those of docutils and those of MyST."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    docutils = {re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") for heading in headings}
    return docutils | {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES)
def test_anchors(page):
    source = ROOT / page
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", source.read_text()):
        file = (source.parent / target).resolve() if target else source
        assert anchor in anchors(file), f"{page} links to {target}#{anchor}"
