"""`samestep convert` makes the same changes of a script, however it is written."""

import re
from collections import Counter

import pytest
from convert.corpus import SCRIPTS
from convert.styles import STYLES, in_style
from convert.test_convert import _of, _place  # noqa: F401

NAMES = sorted(name for name, path in SCRIPTS.items() if path.stem == name)


def _changes(text):
    """How often each function of samestep is called after the conversion, and how many places are left."""
    conversion = _of(text)
    after = "".join(after.decode() for _, after in conversion.files.values())
    return Counter(re.findall(r"samestep\.(loader|replicate|sum|mean|gather|save)\(", after)), len(
        conversion.gaps
    )


def _differing(name, styles):
    text = SCRIPTS[name].read_text()
    first = _changes(text)
    return {style: found for style in styles if (found := _changes(in_style(text, style))) != first}


@pytest.mark.parametrize("style", STYLES)
def test_a_script_in_another_style_is_converted_alike(style):
    for name in NAMES[list(STYLES).index(style) :: 3 * len(STYLES)]:
        assert not _differing(name, [style]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_script_in_each_style_is_converted_alike(name):
    assert not _differing(name, STYLES)
