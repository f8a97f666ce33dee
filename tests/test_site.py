"""The site of docs/ holds together: every page is reached, every link exists, nothing comes from elsewhere."""

import ast
import difflib
import inspect
import re
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import samestep
from samestep import cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
PICTURES = sorted(DOCS.glob("pictures/*.svg"))
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# `<!-- not run here: FILE -->` or `<!-- FILE to FILE -->` above a block says what it shows.
SHOWN = re.compile(
    r"^<!-- (?:not run here: (?P<file>\S+)|(?P<before>\S+\.\w+) to (?P<after>\S+)) -->\n"
    r"```\w+\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
GENERATED = {
    "cli.md": {f"samestep-{verb}" for verbs in cli._VERBS.values() for verb in verbs},
    "reference.md": {f"samestep.{name}" for name in samestep.__all__},
}


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown makes them."""
    found = set(GENERATED.get(page.name, ()))
    for heading in re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        if explicit := re.search(r"\{#([\w-]+)\}$", heading):
            found.add(explicit[1])
            continue
        plain = re.sub(r"[`*]|\]\([^)]*\)", "", heading)
        plain = re.sub(r"[^\w\s-]", "", plain.encode("ascii", "ignore").decode()).strip().lower()
        anchor = re.sub(r"[-\s]+", "-", plain)
        found.add(anchor if anchor not in found else f"{anchor}_1")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_page_and_a_heading_of_the_site(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    links = re.findall(r"\]\(([^)\s]*?)(?:#([^)\s]+))?\)", text)
    for link, anchor in links:
        assert "://" not in link, f"{link}: the site has no link to the net"
        target = (page.parent / link).resolve() if link else page
        assert target.exists(), link
        assert target.is_relative_to(DOCS), f"{link} is not part of the site"
        if anchor:
            assert anchor in anchors(target), f"{link}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_one_title_and_takes_nothing_from_elsewhere(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    assert text.startswith("# ")
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    assert re.findall(r"<script|<iframe|<link|src=.?https?:|!\[[^]]*\]\(https?:", text) == []
    assert "![](" not in text, "a picture says in words what it shows"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_says_what_it_shows_and_takes_nothing_from_elsewhere(picture: Path) -> None:
    root = ET.parse(picture).getroot()
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    text = picture.read_text().replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?:|@import|url\((?!#)|<script|<image", text) == []
    assert any(f"(pictures/{picture.name})" in page.read_text() for page in PAGES)


def test_a_default_in_the_reference_is_a_value_and_no_private_name() -> None:
    for name in samestep.__all__:
        tree = ast.parse(inspect.getsource(getattr(samestep, name)))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            if function.name == "__init__" or not function.name.startswith("_"):
                defaults = [*function.args.defaults, *filter(None, function.args.kw_defaults)]
                names = [each.id for each in defaults if isinstance(each, ast.Name)]
                assert not [each for each in names if each.startswith("_")], f"{name}: {names}"


def test_the_pictures_are_what_their_program_draws() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures" / "draw.py"))["pictures"]()
    assert {picture.name: picture.read_text() for picture in PICTURES} == drawn, "run docs/pictures/draw.py"


def shown(page: Path) -> list[tuple[str, str, str]]:
    """For each block of a page that shows a file or a difference: what, its text in the page, its text in truth."""
    found = []
    for block in SHOWN.finditer(page.read_text()):
        if block["file"]:
            found.append((block["file"], block["text"], (ROOT / block["file"]).read_text()))
        else:
            before, after = ((ROOT / block[name]).read_text().splitlines() for name in ("before", "after"))
            lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
            truth = "".join(f"{line}\n" for line in lines if not line.startswith("@@"))
            found.append((block["after"], block["text"], truth))
    return found


def test_a_block_that_shows_a_file_or_a_difference_is_equal_to_it() -> None:
    blocks = [block for page in PAGES for block in shown(page)]
    assert len(blocks) > 5
    for name, text, truth in blocks:
        assert text == truth, name


@pytest.mark.slow
def test_every_message_of_samestep_on_the_page_of_troubles_is_in_its_source() -> None:
    package = ROOT / "src" / "samestep"
    constants = [
        node.value
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    table = (DOCS / "troubleshooting.md").read_text().split("## Messages of samestep\n")[1].split("\n## ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(messages) > 15
    pieces = [piece.strip() for message in messages for piece in re.split(r"…", message)]
    missing = [piece for piece in pieces if not any(piece in constant for constant in constants)]
    assert missing == []
