import os
import random
import shutil
import subprocess
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import PlacementError
from samestep.placement.nodelist import expand_nodes, tasks_per_node


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", "node1"),
        ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
        ("a[1-2]b[3-4]c[5-6]", "a1b3c5 a1b3c6 a2b3c5 a2b3c6 a1b4c5 a1b4c6 a2b4c5 a2b4c6"),
        ("node[01-03,07],gpu5", "node01 node02 node03 node07 gpu5"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[09-11]", "n09 n10 n11"),
        ("n[009-011],n8", "n009 n010 n011 n8"),
        ("b2,a1,b[1,3]", "b2 a1 b1 b3"),
        ("r1i[0-1]n[2,4].site.org", "r1i0n2.site.org r1i0n4.site.org r1i1n2.site.org r1i1n4.site.org"),
        ("n[1-2],,x,", "n1 n2 x"),
    ],
)
def test_node_lists_are_written_out_in_slurms_order(text, names):
    assert expand_nodes(text) == names.split()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "names no node"),
        (",,", "names no node"),
        ("n[1", "has n[1, which is not a host name"),
        ("n1]", "has n1], which is not a host name"),
        ("n[[1-2]]", "has n[[1-2]], which is not a host name"),
        ("n[]", "has nothing in brackets, which is not a range"),
        ("n[2-1]", "has 2-1 in brackets, which is not a range"),
        ("n[a-b]", "has a-b in brackets, which is not a range"),
        ("n[1-2-3]", "has 1-2-3 in brackets, which is not a range"),
        ("{0}", "has {0}, which is not a host name"),
        ("n 1", "has n 1, which is not a host name"),
        ("n\n1", r"has n\n1, which is not a host name"),
        ("nœud", r"has nœud, which is not a host name"),
        ("n[0-65536]", "names more than 65536 nodes"),
        ("n[1-99999999999999999]", "names more than 65536 nodes"),
        ("n[0-255][0-255],n[1]", "names more than 65536 nodes"),
        ("n" * 256, "has a name longer than 255 characters"),
    ],
)
def test_what_is_no_node_list_is_refused_in_one_sentence(text, why):
    with pytest.raises(PlacementError) as raised:
        expand_nodes(text)
    assert why in str(raised.value)
    assert str(raised.value).isprintable()
    assert str(raised.value).endswith("; write it like node[01-03,07],gpu5")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 99_999,
        "," * 99_999,
        "[a," * 33_333,
        "[1]" * 33_333,
        "[0-65535]" * 9_999,
        "n" * 99_999 + "[0-9999]",
    ],
    ids=lambda text: text[:9],
)
@pytest.mark.timeout(10)
def test_a_hostile_node_list_costs_neither_time_nor_memory(text):
    with pytest.raises(PlacementError, match="; write it like node"):
        expand_nodes(text)


@pytest.mark.parametrize(
    ("text", "tasks"), [("4", [4]), ("4(x2),3", [4, 4, 3]), ("2,1(x2)", [2, 1, 1]), ("1,2,3", [1, 2, 3])]
)
def test_tasks_are_read_node_by_node(text, tasks):
    assert tasks_per_node(text) == tasks


@pytest.mark.parametrize(
    "text", ["", "4(x2", "4(2)", "-1", "4,,3", "4 3", "1(x65537)", "٣", "4(x99999999999)", "a"]
)
def test_what_does_not_count_tasks_is_refused_in_one_sentence(text):
    with pytest.raises(
        PlacementError, match=r"does not say how many tasks each node has; write it like 4\(x2\),3"
    ):
        tasks_per_node(text)


LETTERS = st.text("abcxyz-.", min_size=1, max_size=4)


@st.composite
def ranges(draw):
    """What stands in one pair of brackets, and the numbers it means, worked out from its parts."""
    parts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        low, width = draw(st.integers(0, 120)), draw(st.integers(1, 4))
        high = low + draw(st.integers(0, 4))
        alone = low == high and draw(st.booleans())
        first = str(low).zfill(width)
        parts.append(first if alone else f"{first}-{high}")
        numbers += [str(number).zfill(len(first)) for number in range(low, high + 1)]
    return ",".join(parts), numbers


@st.composite
def node_lists(draw):
    text, names = [], []
    for _ in range(draw(st.integers(1, 4))):
        literals = draw(st.lists(LETTERS, min_size=1, max_size=4))
        brackets = [draw(ranges()) for _ in literals[1:]]
        text.append(
            literals[0] + "".join(f"[{b}]{n}" for (b, _), n in zip(brackets, literals[1:], strict=True))
        )
        places = list(product(*(range(len(numbers)) for _, numbers in brackets)))
        # the last bracket turns fastest, then the first, then the second
        for place in sorted(places, key=lambda place: (*reversed(place[:-1]), *place[-1:])):
            chosen = [numbers[at] for (_, numbers), at in zip(brackets, place, strict=True)]
            names.append(literals[0] + "".join(c + n for c, n in zip(chosen, literals[1:], strict=True)))
    return ",".join(text), names


@settings(max_examples=300, deadline=None)
@given(node_lists())
def test_any_node_list_that_is_printed_is_read_back(printed):
    text, names = printed
    if len(names) <= 65536:
        assert expand_nodes(text) == names


@settings(max_examples=300, deadline=None)
@given(st.text("na019-[],. {}(x", max_size=40))
def test_any_text_is_a_list_of_names_or_one_sentence(text):
    names, sentence = [], ""
    try:
        names = expand_nodes(text)
    except PlacementError as refused:
        sentence = str(refused)
    assert all(names)
    assert bool(names) != bool(sentence.isprintable() and sentence)
    assert not any(set(name) & set("[], {}(") for name in names)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 128), st.integers(1, 40)), min_size=1, max_size=6))
def test_any_tasks_per_node_that_are_printed_are_read_back(groups):
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in groups)
    assert tasks_per_node(text) == [tasks for tasks, nodes in groups for _ in range(nodes)]


@pytest.mark.slurm
def test_three_hundred_random_node_lists_read_as_slurm_reads_them(tmp_path):
    if shutil.which("scontrol") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("scontrol is not installed; install slurm-client")
        pytest.skip("scontrol is not installed")
    settings = tmp_path / "slurm.conf"
    settings.write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    chance = random.Random(0)
    for _ in range(300):
        text = ",".join(_random_item(chance) for _ in range(chance.randint(1, 3)))
        asked = ["scontrol", "show", "hostnames", text]
        names = subprocess.check_output(
            asked, text=True, env=os.environ | {"SLURM_CONF": str(settings)}
        ).split()
        assert expand_nodes(text) == names, text


def _random_item(chance):
    item = chance.choice(["n", "gpu-", "r1i", "x0a"])
    for following in chance.sample(["", "b", "-c", "s3d"], chance.randint(0, 3)):
        spans = []
        for _ in range(chance.randint(1, 3)):
            low = chance.randint(0, 110)
            first = str(low).zfill(chance.randint(1, 3))
            spans.append(chance.choice([first, f"{first}-{low + chance.randint(0, 5):03}"]))
        item += f"{following}[{','.join(spans)}]"
    return item
