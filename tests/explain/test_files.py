"""Everything that is drawn or printed as a file, in colours that any viewer knows."""

from functools import partial
from importlib.util import find_spec
from xml.etree import ElementTree as ET

import jax.numpy as jnp
import pytest

import onward as ow
from onward.distribute.pipeline.schedule import schedule_of
from onward.explain.files import text_svg
from onward.explain.style import DARK, LIGHT

PROGRAM = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(jnp.tanh(w * x)), jnp.ones(3), jnp.ones(3))


def shown():
    return {
        "draw": ow.draw(PROGRAM, depth=1),
        "summary": ow.summary(PROGRAM),
        "memory": ow.memory(PROGRAM),
        "memories": ow.memory(PROGRAM).beside(PROGRAM),
        "plot": ow.memory(PROGRAM).plot(),
        "diff": ow.diff(PROGRAM, ow.guard(PROGRAM)),
        "program": PROGRAM,
        "schedule": schedule_of("zero_bubble", 3, 4),
    }


def test_pictures_and_tables_are_files(tmp_path):
    for name, found in shown().items():
        light = ow.save_picture(found, tmp_path / f"{name}.svg").read_text()
        dark = ow.save_picture(found, str(tmp_path / f"{name}-dark.svg"), dark=True).read_text()
        page = ow.save_picture(found, tmp_path / f"{name}.html", dark=True).read_text()
        assert ET.fromstring(light).attrib["width"], name
        assert "var(" not in light, name
        assert LIGHT["page"] in light, name
        assert DARK["page"] in dark, name
        assert not [ink for ink in LIGHT.values() if ink in dark + page], name
        assert page.startswith("<!DOCTYPE html>"), name
        assert ("main { padding" in page) != (name == "draw"), name


def test_words_stand_where_the_columns_are():
    text = text_svg("left      middle    x < y\n\n          │ it is")
    places = {node.text: node.attrib for node in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}text")}
    left, middle, right, below = (float(places[t]["x"]) for t in ("left", "middle", "x < y", "│ it is"))
    assert right - middle == pytest.approx(middle - left, abs=0.2)
    assert below == middle
    assert float(places["│ it is"]["textLength"]) == pytest.approx((middle - left) * 0.7, abs=0.2)


def test_a_png_is_drawn_by_resvg(tmp_path):
    if find_spec("resvg_py") is None:
        with pytest.raises(ow.MissingExtraError, match=r"pip install 'onward\[png\]'"):
            ow.save_picture(PROGRAM, tmp_path / "a.png")
        return
    assert ow.draw(PROGRAM).save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_new_folder_capital_letters_and_letters_that_xml_has_not(tmp_path):
    path = ow.save_picture("a\x1b[31m\x00b\udc80 é😀", tmp_path / "new" / "folder" / "A.SVG")
    (word, *_) = ET.parse(path).iter("{http://www.w3.org/2000/svg}text")
    assert word.text == "a\ufffd[31m\ufffdb\ufffd é😀"


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ow.ArgumentError, match=r"'a.gif': the name ends in '.gif'. End it in one of .svg, "):
        ow.save_picture(PROGRAM, tmp_path / "a.gif")


@pytest.mark.parametrize("path", [3, None, b"a.svg"], ids=repr)
def test_what_is_no_path_is_refused(path):
    for save in (ow.draw(PROGRAM).save, partial(ow.save_picture, PROGRAM)):
        with pytest.raises(ow.ArgumentError, match=r"cannot be saved as .*; expected the name of a file"):
            save(path)
