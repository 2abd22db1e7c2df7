"""A page that was renamed is found at its old address, and a claim at its own."""

import re
import shutil
import subprocess

import pytest

from lowprec import UserError
from lowprec.publish import addresses

PAGES = ["intro", "executed/explosion", "executed/laboratory/calibration", "take_it_home"]
NODE = shutil.which("node")


@pytest.fixture
def book(tmp_path):
    def write(text):
        (tmp_path / "redirects.yml").write_text(text)
        return tmp_path

    return write


def test_a_table_leads_from_pages_that_are_gone_to_pages_that_are_there(book, tmp_path):
    assert addresses.redirects(tmp_path, PAGES) == {}
    assert addresses.redirects(book("# No page yet."), PAGES) == {}
    table = addresses.redirects(book("executed/11_it: executed/explosion\n"), PAGES)
    assert table == {"executed/11_it": "executed/explosion"}


@pytest.mark.parametrize(
    "text, said",
    [
        ("a: b: c", "redirects.yml is not valid YAML: mapping values"),
        ("- a", "must have lines `old page: new page`"),
        ("executed/explosion: intro", "leads away from executed/explosion, which is a page"),
        ("a: executed/explosoin", "leads from a to executed/explosoin, which is no page"),
        ("a: b\nb: intro", "leads from a to b, which is no page"),
    ],
)
def test_a_table_that_leads_nowhere_is_refused(book, text, said):
    with pytest.raises(UserError, match=said):
        addresses.redirects(book(text), PAGES)


OLD = {
    "executed/11_it": "executed/explosion",
    "executed/laboratory/11_it": "executed/laboratory/calibration",
    "take_home": "take_it_home",
}
STUBS = addresses.stubs(OLD, {"low-fails": "explosion", "scale": "laboratory/calibration"})


@pytest.mark.parametrize(
    "page, to",
    [
        ("executed/11_it", "../executed/explosion.html"),
        ("executed/laboratory/11_it", "../../executed/laboratory/calibration.html"),
        ("take_home", "take_it_home.html"),
        ("claim/low-fails", "../executed/explosion.html#claim-low-fails"),
        ("claim/scale", "../executed/laboratory/calibration.html#claim-scale"),
    ],
)
def test_a_stub_leads_on_without_scripts_as_well(page, to):
    stub = STUBS[f"{page}.html"]
    assert re.findall('href="(.*?)"', stub) == [to, to]
    assert f'<noscript><meta http-equiv="refresh" content="0; url={to}"></noscript>' in stub


def test_nothing_but_old_pages_and_claims_has_a_stub():
    assert len(STUBS) == 5


def followed(page, anchor):
    """Where the script of a stub leads who asks for an anchor."""
    [script] = re.findall("<script>(.*?)</script>", STUBS[f"{page}.html"], re.DOTALL)
    location = f"const location = {{hash: '{anchor}', replace: to => console.log(to)}};"
    done = subprocess.run([NODE, "-e", location + script], capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize(
    "page, anchor, to",
    [
        ("executed/11_it", "", "../executed/explosion.html"),
        ("executed/11_it", "#figure-loss", "../executed/explosion.html#figure-loss"),
        ("executed/11_it", "#claim-scale", "../claim/scale.html"),
        ("executed/laboratory/11_it", "#claim-scale", "../../claim/scale.html"),
        ("take_home", "#costs", "take_it_home.html#costs"),
        ("claim/scale", "", "../executed/laboratory/calibration.html#claim-scale"),
    ],
)
def test_an_anchor_leads_to_where_it_is_now(page, anchor, to):
    assert followed(page, anchor) == to
