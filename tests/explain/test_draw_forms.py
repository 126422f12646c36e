"""The forms that a drawing takes: SVG, page, DOT, a line of text, a file."""

import json
import re
import sys
from xml.etree import ElementTree as ET

import jax
import jax.numpy as jnp
import pytest
from tests.explain.drawn import PROGRAMS, long_line, mlp, transformer

import onward as ow
from onward.core.program import Program
from onward.explain.draw.details import variables_details
from onward.explain.draw.dot import dot_of
from onward.explain.draw.draw import draw

EVERY = pytest.mark.parametrize("name", PROGRAMS)
_DRAWN = {}


def drawing(name):
    if name not in _DRAWN:
        _DRAWN[name] = draw(PROGRAMS[name]())
    return _DRAWN[name]


def data_of(html):
    return json.loads(re.search(r'class="ow-data">(.*?)</script>', html, re.DOTALL).group(1))


def hostile():
    name = '<script>alert("x & y")</script>'

    def loss(w, x):
        with jax.named_scope("<i>&\"'"):
            return jnp.sum(jnp.sin(w * x))

    return ow.SGD(0.1).minimize(loss, jnp.ones(2), jnp.ones(2), name=name)


@EVERY
def test_svg_is_xml_with_a_box_for_every_box(name):
    tree = ET.fromstring(drawing(name).svg)
    kinds = [g.get("class").split()[0] for g in tree.iter("{http://www.w3.org/2000/svg}g")]
    assert kinds.count("box") == len(drawing(name).scene.boxes)
    assert kinds.count("frame") == len(drawing(name).scene.frames)


@EVERY
def test_nothing_refers_to_anything_outside(name):
    for text in (drawing(name).html, drawing(name)._repr_html_(), drawing(name).svg):
        without = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|//\w+\.\w|@import|url\(|src=|href=", without)


@EVERY
def test_every_picture_of_a_page_is_whole(name):
    data = data_of(drawing(name).html)
    for view in data["views"]:
        tree = ET.fromstring(f'<svg xmlns="http://www.w3.org/2000/svg">{view["svg"]}</svg>')
        keys = {g.get("data-key") for g in tree.iter() if g.get("data-key")}
        assert keys <= view["says"].keys()
        assert set(view["says"].values()) <= set(range(len(data["details"])))
        assert set(view["goes"].values()) <= set(range(len(data["views"])))
        assert {number for _, number in view["path"]} <= set(range(len(data["views"])))


@pytest.mark.parametrize("name", ["convolutional", "forward", "mlp", "transformer", "without scopes"])
def test_every_op_has_a_box_of_its_own_in_some_picture(name):
    album = drawing(name)._album
    shown = {box.ops for view in album.views() for box in view.scene.boxes if box.form in ("op", "chip")}
    layer = album.tree.layer
    drawn = [i for i, op in enumerate(album.program.ops) if layer.get(op, (None, 0))[1] == 0]
    assert {place for places in shown for place in places} >= set(drawn)


def test_a_click_on_a_closed_scope_opens_it_and_another_one_closes_it():
    views = drawing("transformer")._album.views()
    for view in views:
        for node, number in view.goes.items():
            after = views[number].scene
            was_open = node in view.scene.opens
            assert (node in after.opens) is not was_open


def test_a_scope_of_a_vast_program_fills_a_picture_alone(monkeypatch):
    monkeypatch.setattr("onward.explain.draw.views._VAST", 1)
    made = draw(transformer(4), depth=1)
    views = made._album.views()
    alone = [view for view in views if len(view.path) > 1]
    assert [name for name, _ in alone[0].path] == ["loss", "embed"]
    assert alone[0].path[0][1] == 0
    layer = made._album.tree.layer
    shown = {i for view in views for box in view.scene.boxes if box.form != "fold" for i in box.ops}
    first = {i for i, op in enumerate(transformer(4).ops) if layer.get(op, (None, 0))[1] == 0}
    assert shown >= first


def test_what_a_click_says():
    details = data_of(drawing("mlp").html)["details"]
    gradient = next(d for d in details if d["title"] == "relu_grad")
    rows = dict(gradient["rows"])
    assert rows["pass"] == "backward"
    assert rows["scope"] == "hidden"
    assert re.fullmatch(r".*drawn\.py:\d+ in .*loss", rows["line"])
    assert rows["FLOPs"] == "24"
    assert ["computes", [["grad(hidden/add)", "f32[8,3]"]]] in gradient["lists"]
    adam = next(d for d in details if d["title"] == "adam")
    assert ["learning_rate", "f32[]"] in dict(adam["lists"])["reads"]


def test_the_inside_of_a_loop_is_a_picture_of_its_own():
    data = data_of(drawing("rolled").html)
    scan = next(d for d in data["details"] if d["title"] == "scan")
    inside = data["views"][scan["inside"][0][1]]
    assert "tanh" in inside["svg"]
    assert [name for name, _ in inside["path"]][:2] == ["loss", "scan × 4: jaxpr"]
    assert "× 4" in drawing("rolled").svg


def test_names_are_escaped_everywhere():
    made = draw(hostile())
    for text in (made.svg, made.html, made._repr_html_()):
        assert "<script>alert" not in text
        assert "<i>&" not in text
    ET.fromstring(made.svg)
    data_of(made.html)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["accumulated", "empty", "hostile", "mlp", "replicated"])
def test_dot_is_understood_by_another_parser(name):
    pydot = pytest.importorskip("pydot")
    program = hostile() if name == "hostile" else PROGRAMS[name]()
    (graph,) = pydot.graph_from_dot_data(dot_of(program))
    nodes, edges, waiting = [], list(graph.get_edges()), [graph]
    while waiting:
        part = waiting.pop()
        nodes += [n.get_name() for n in part.get_nodes() if re.fullmatch(r"op\d+", n.get_name())]
        waiting += part.get_subgraphs()
    assert sorted(nodes) == sorted(f"op{i}" for i in range(len(program.ops)))
    makers = {v: i for i, op in enumerate(program.ops) for v in op.outputs}
    expected = {
        (f"op{makers[v]}", f"op{i}") for i, op in enumerate(program.ops) for v in op.inputs if v in makers
    }
    found = {(e.get_source(), e.get_destination()) for e in edges}
    assert {(a, b) for a, b in found if a.startswith("op")} == expected


def test_a_page_grows_with_what_differs_and_not_with_the_layers():
    few, many = draw(transformer(4)), draw(transformer(24))
    assert len(many.svg) < 1.1 * len(few.svg)
    assert len(many.html) < 1.3 * len(few.html)


def test_a_program_that_is_too_large_says_so():
    made = draw(long_line())
    assert re.search(r"'loss': \d+ of 302 ops are in \d+ folded box", repr(made))
    assert "folded box" in made.svg
    assert len(draw(long_line(), depth=2).scene.boxes) > 300


def test_depth_says_how_many_levels_are_drawn():
    closed, opened, all_open = (draw(transformer(4), depth=n) for n in (1, 2, 9))
    assert not closed.scene.frames
    assert {frame.lines for frame in opened.scene.frames} >= {("embed",), ("layer_0 … layer_3",)}
    assert len(closed.scene.boxes) < len(opened.scene.boxes) < len(all_open.scene.boxes)
    assert repr(all_open) == "Drawing of Program 'loss': all 206 ops"


@pytest.mark.parametrize("depth", [0, -1, 1.5, True, "all"])
def test_a_depth_that_is_none(depth):
    with pytest.raises(ow.ArgumentError, match=r"depth is .*whole number above 0"):
        draw(mlp(), depth=depth)


def test_one_line_of_text():
    assert repr(drawing("mlp")) == "Drawing of Program 'loss': all 28 ops"
    assert str(drawing("empty")) == "Drawing of Program 'empty': all 0 ops"


@pytest.mark.parametrize("ending", ["svg", "html", "dot"])
def test_files_hold_what_the_drawing_says(ending, tmp_path):
    path = drawing("mlp").save(tmp_path / f"mlp.{ending}")
    assert path.read_text(encoding="utf-8") == getattr(drawing("mlp"), ending)


def test_a_file_of_another_kind(tmp_path):
    with pytest.raises(ow.ArgumentError, match=r"'mlp\.gif'.*'\.gif'.*\.svg, \.html, \.png, \.dot"):
        drawing("mlp").save(tmp_path / "mlp.gif")


def test_without_the_layout_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "igraph", None)
    with pytest.raises(ow.MissingExtraError, match=r"igraph.*onward\[plot\]"):
        draw(mlp()).svg  # noqa: B018


def test_a_program_of_nothing():
    made = draw(Program("nothing"))
    assert made.scene.boxes == ()
    ET.fromstring(made.svg)


def test_the_same_program_gives_the_same_drawing():
    assert draw(mlp()).html == draw(mlp()).html


def test_feeds_belong_to_the_forward_lane_and_parameters_to_the_state():
    program = ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2))
    assert variables_details(program.inputs, program)["lane"] == "forward"
    assert variables_details(program.parameters, program)["lane"] == "state"
