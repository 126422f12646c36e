"""What stands where in a drawing."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from tests.explain.drawn import PROGRAMS, convolutional, long_line, mlp, transformer, without_scopes

import onward as ow
from onward.core.words import Pass
from onward.explain.draw.scene import SMALL_WIDTH, TITLE_WIDTH
from onward.explain.draw.views import Album

EVERY = pytest.mark.parametrize("name", PROGRAMS)
FORMS = pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
_ALBUMS = {}


def album(name):
    if name not in _ALBUMS:
        _ALBUMS[name] = Album(PROGRAMS[name]())
    return _ALBUMS[name]


def scene(name, is_open=True):
    made = album(name)
    return made.scene(frozenset(n for n in made.tree.nodes if n.children) if is_open else frozenset())


def overlap(a, b):
    return a.x < b.right and b.x < a.right and a.y < b.bottom and b.y < a.bottom


def inside(a, b):
    return b.x <= a.x and a.right <= b.right and b.y <= a.y and a.bottom <= b.bottom


def edges_of_types(made, lane):
    title = {b.key: b.lines[0] for b in made.boxes}
    return Counter((title[e.source], title[e.target]) for e in made.edges if e.lane == lane)


@EVERY
def test_every_op_is_in_exactly_one_box_when_all_scopes_are_closed(name):
    counted = Counter(place for box in scene(name, False).boxes for place in box.ops)
    assert counted == Counter(range(len(album(name).program.ops)))


@EVERY
def test_every_op_but_those_of_equal_layers_has_a_box_when_all_scopes_are_open(name):
    counted = Counter(place for box in scene(name).boxes for place in box.ops)
    layer = album(name).tree.layer
    drawn = [i for i, op in enumerate(album(name).program.ops) if layer.get(op, (None, 0))[1] == 0]
    assert counted == Counter(drawn)


@EVERY
@FORMS
def test_no_two_boxes_overlap(name, is_open):
    boxes = scene(name, is_open).boxes
    touching = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if overlap(a, b)]
    assert touching == []


@EVERY
def test_frames_hold_their_boxes_whole_or_not_at_all(name):
    made = scene(name)
    for frame in made.frames:
        for box in (*made.boxes, *made.frames):
            whole = inside(box, frame) or inside(frame, box) or not overlap(box, frame)
            assert whole, (frame.lines, box.lines)


@EVERY
@FORMS
def test_everything_is_within_the_picture(name, is_open):
    made = scene(name, is_open)
    for box in (*made.boxes, *made.frames):
        assert box.x >= 0
        assert box.y >= 0
        assert box.right <= made.width
        assert box.bottom <= made.height


@EVERY
@FORMS
def test_text_fits_its_box(name, is_open):
    made = scene(name, is_open)
    for box in made.boxes:
        if box.form == "gate":
            assert len(box.lines[0]) * SMALL_WIDTH + 10 <= box.height
        elif box.form in ("pill", "chip"):
            assert len(" ".join(box.lines)) * SMALL_WIDTH + 12 <= box.width + 1e-6, box.lines
        else:
            title = box.lines[0] + ("   " + box.note if box.note else "")
            assert len(title) * TITLE_WIDTH + 20 * (box.form == "fold") <= box.width, box.lines
            assert all(len(line) * SMALL_WIDTH + 10 <= box.width for line in box.lines[1:]), box.lines
    for frame in made.frames:
        assert sum(map(len, frame.lines)) * TITLE_WIDTH + 20 <= frame.width


@EVERY
@FORMS
def test_edges_begin_and_end_at_boxes(name, is_open):
    made = scene(name, is_open)
    boxes = {box.key: box for box in made.boxes}
    assert len(boxes) == len(made.boxes)
    for edge in made.edges:
        for key, (x, y) in ((edge.source, edge.points[0]), (edge.target, edge.points[-1])):
            box = boxes[key]
            assert box.x - 1e-6 <= x <= box.right + 1e-6
            assert box.y - 1e-6 <= y <= box.bottom + max(box.cards, default=0) + 1e-6


def test_an_arrow_up_to_equal_layers_ends_below_their_cards():
    made = scene("transformer", is_open=False)
    stacks = {box.key: box for box in made.boxes if box.cards}
    points = [e.points for e in made.edges if e.target in stacks and e.lane == "backward" and not e.sideways]
    ends = {box.bottom + 6 for box in stacks.values()}
    assert points
    assert all(end in ends and begin > end for (*_, (_, begin), (_, end)) in points)


@EVERY
def test_a_gradient_op_stands_at_the_height_of_its_forward_op(name):
    made, program = scene(name), album(name).program
    at = {place: box for box in made.boxes for place in box.ops}
    index = {v: i for i, op in enumerate(program.ops) for v in op.outputs}
    ops = [(i, op) for i, op in enumerate(program.ops) if op.of is not None and i in at]
    for i, op in ops:
        forward, gradient = at[index[op.of]], at[i]
        if forward.form == gradient.form == "op":
            assert gradient.y == forward.y
        else:
            assert gradient.y <= forward.bottom + 30
            assert forward.y <= gradient.bottom + 30


@EVERY
def test_forward_leads_down_and_backward_up(name):
    made = scene(name)
    boxes = {box.key: box for box in made.boxes}
    for edge in made.edges:
        if edge.lane in ("forward", "backward") and not edge.sideways and not edge.is_around:
            a, b = boxes[edge.source], boxes[edge.target]
            assert (a.bottom <= b.y) if edge.lane == "forward" else (b.bottom <= a.y + 7)


def test_edges_are_the_flow_of_values():
    program, made = mlp(), scene("mlp")
    makers = {v: op for op in program.ops for v in op.outputs}
    for lane, passes in {
        "forward": (Pass.FORWARD, Pass.FORWARD),
        "backward": (Pass.BACKWARD, Pass.BACKWARD),
        "saved": (Pass.FORWARD, Pass.BACKWARD),
    }.items():
        expected = Counter(
            (makers[v].type, op.type)
            for op in program.ops
            for v in op.inputs
            if v in makers and (makers[v].made_by, op.made_by) == passes
        )
        found = edges_of_types(made, lane)
        to_update = {pair: n for pair, n in found.items() if pair[1] == "adam"}
        assert found - Counter(to_update) == expected
    assert edges_of_types(made, "update") == Counter(
        {("count", "next(step)"): 1, **{("adam", f"next({p.name})"): 1 for p in program.parameters}}
    )


def test_every_parameter_stands_left_of_the_op_that_reads_it():
    made = scene("mlp")
    op = {place: box for box in made.boxes for place in box.ops}
    program = mlp()
    for parameter in program.parameters:
        pill = next(box for box in made.boxes if box.variables == (parameter.name,))
        reader = next(i for i, o in enumerate(program.ops) if parameter in o.inputs)
        assert pill.right <= op[reader].right
        assert abs(pill.y - op[reader].y) <= 24


@EVERY
@FORMS
def test_every_feed_and_parameter_is_shown(name, is_open):
    made, program = scene(name, is_open), album(name).program
    layer = album(name).tree.layer
    drawn = [op for op in program.ops if not is_open or layer.get(op, (None, 0))[1] == 0]
    read = {v.name for op in drawn if op.made_by is not Pass.UPDATE for v in op.inputs}
    shown = {name for box in made.boxes for name in box.variables}
    assert {v.name for v in (*program.inputs, *program.parameters)} & read <= shown


def test_an_update_stands_at_the_height_where_its_parameter_is_read():
    made, program = scene("mlp"), mlp()
    at = {place: box for box in made.boxes for place in box.ops}
    for i, op in enumerate(program.ops):
        if op.type == "adam":
            parameter = next(v for v in op.inputs if v in program.parameters)
            pill = next(box for box in made.boxes if box.variables == (parameter.name,))
            assert abs(at[i].middle[1] - pill.middle[1]) <= 12


def test_what_reads_all_gradients_stands_between_them_and_the_updates():
    made, program = scene("clipped"), album("clipped").program
    gate = next(box for box in made.boxes if box.form == "gate")
    assert program.ops[gate.ops[0]].type == "clip_by_global_norm"
    boxes = {box.key: box for box in made.boxes}
    into = [boxes[e.source] for e in made.edges if e.target == gate.key]
    out = [boxes[e.target] for e in made.edges if e.source == gate.key]
    assert len(into) == len(out) == len(program.parameters)
    assert {box.lane for box in into} == {"backward"}
    assert {box.lines for box in out} == {("adam",)}
    assert all(box.right <= gate.x for box in into)
    assert all(gate.right <= box.x for box in out)


def test_lanes_are_those_of_the_program():
    def names(name):
        return [lane.name for lane in scene(name).lanes]

    assert names("mlp") == ["forward", "backward", "update"]
    assert names("replicated") == ["forward", "backward", "collective", "update"]
    assert names("forward") == ["forward"]


def test_the_loss_is_emphasised():
    loud = [box for box in scene("mlp").boxes if box.emphasis]
    assert [box.lines for box in loud] == [("div", "f32[] · loss")]
    assert loud[0].y == max(box.y for box in scene("mlp").boxes if box.lane == "forward")
    assert [box.lines[0] for box in scene("replicated").boxes if box.emphasis] == ["div"]


def test_equal_layers_are_one_box_whatever_their_number():
    few, many = (Album(transformer(n)).scene(frozenset()) for n in (4, 24))
    assert len(few.boxes) == len(many.boxes)
    assert [box.note for box in many.boxes if box.note] == ["× 24", "× 24"]
    assert any("120 parameters" in box.lines for box in many.boxes)
    forward = next(box for box in many.boxes if box.note and box.lane == "forward")
    assert forward.lines[0] == "layer_0 … layer_23"


def test_layers_are_found_by_structure_and_not_by_name():
    def loss(params, x):
        for scope, w in zip(["red", "blue", "green", "black", "white"], params, strict=True):
            with jax.named_scope(scope):
                x = x + jnp.sin(x @ w) * 2
        return jnp.sum(x)

    forward = ow.trace(loss, [jnp.eye(3)] * 5, jnp.ones((2, 3)))
    found = [box for box in Album(forward).scene(frozenset()).boxes if box.note]
    assert [(box.lines[0], box.note, len(box.ops)) for box in found] == [("red … white", "× 5", 20)]


def test_an_open_layer_shows_no_line_from_one_layer_to_the_next():
    made = scene("transformer")
    boxes = {box.key: box for box in made.boxes}
    lines = [e for e in made.edges if e.lane == "forward" and not e.sideways]
    assert [e for e in lines if boxes[e.target].y < boxes[e.source].bottom] == []


def test_branches_stand_side_by_side():
    made = scene("transformer")
    tops = Counter(box.y for box in made.boxes if box.lines[0] == "dot_general" and box.lane == "forward")
    assert 3 in tops.values()


def test_many_ops_without_scopes_are_folded_to_parts():
    made = Album(long_line())
    assert len(made.first().boxes) < 30
    assert "of 302 ops are in" in made.first().caption
    parts = [box for box in made.scene(frozenset()).boxes if box.form == "fold"]
    assert [box.lines[0] for box in parts] == [f"part {i + 1}" for i in range(len(parts))]
    assert sum(len(box.ops) for box in parts) + sum(
        len(box.ops) for box in made.scene(frozenset()).boxes if box.form == "op"
    ) <= len(long_line().ops)


def test_what_a_closed_scope_says_adds_up():
    program = convolutional()
    made = Album(program).scene(frozenset())
    batch_norm = next(b for b in made.boxes if b.lines[0] == "batch_norm_0" and b.lane == "forward")
    ops = [op for op in program.ops if op.made_by is Pass.FORWARD and op.scope == "batch_norm_0"]
    assert batch_norm.lines[1] == f"{len(ops)} ops"
    assert [program.ops[i] for i in batch_norm.ops] == ops


def test_gradient_ops_that_say_nothing_stand_where_values_flow():
    program = mlp()
    ops = tuple(replace(op, of=None, scope="" if op.of else op.scope) for op in program.ops)
    silent = Album(replace(program, ops=ops))
    made = silent.scene(frozenset(n for n in silent.tree.nodes if n.children))
    told = scene("mlp")
    assert Counter(p for b in made.boxes for p in b.ops) == Counter(range(len(ops)))
    height = {place: box.y for box in told.boxes for place in box.ops}
    found = {place: box.y for box in made.boxes for place in box.ops}
    order = [i for i, op in enumerate(program.ops) if op.made_by is Pass.BACKWARD]
    assert max(abs(found[i] - height[i]) for i in order) <= 140


def test_shared_parameters_are_shown_wherever_they_are_read():
    pills = [box for box in scene("transformer").boxes if box.variables == ("embed",)]
    assert len(pills) == 2
    following = [box for box in scene("transformer").boxes if "next(embed)" in box.lines]
    assert len(following) == 1


def test_layers_without_scopes_are_called_layers():
    made = Album(without_scopes()).scene(frozenset())
    assert [(box.lines[0], box.note) for box in made.boxes if box.note] == [("layer", "× 5")] * 2
