"""The documentation's site: it builds without a warning, and its pages fetch nothing."""

import re

import doppler_jax as dj
from tests.commands import ROOT, printed


def test_the_site_builds_strictly_and_fetches_nothing(tmp_path):
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    assert printed(*words, str(tmp_path), cwd=ROOT, NO_MKDOCS_2_WARNING="1") == ""
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))  # and the one for 404
    for page in pages:
        fetched = re.findall(
            r"<(?:script|link|img|iframe)[^>]*https?://[^>]*>", page.read_text()
        )
        assert not fetched, page


def test_the_reference_has_every_public_name():
    names = re.findall(r"^::: doppler_jax\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.M)
    assert sorted(names) == sorted(dj.__all__)
