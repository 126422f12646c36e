"""The benchmark of parameter servers runs and says what it measured; how fast is never asked here.

Ray runs the peers. Our servers and trainers are in threads of this process; what would go to a process of
Ray's is pickled as Ray does. That they run on Ray is tested in ``tests/fleet``.
"""

import copyreg
import json
from functools import partial

import pytest

pytest.importorskip("ray")

from benchmarks import models, parameter_server
from benchmarks.parameter_server import main
from ray import cloudpickle
from tests.fleet.hosting import ThreadLink, Threads, release

from onward.fleet.engine import Engine

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("earlier_objects_frozen"),
]


ENGINES = {}


class Pickled(Threads):
    def spawn(self, factory, *arguments, **options):
        ENGINES[id(self)] = self
        factory, arguments = cloudpickle.loads(cloudpickle.dumps((factory, arguments)))
        return super().spawn(factory, *arguments, **options)


def there(engine, number):
    return ThreadLink(ENGINES[engine], number)


def by_number(link):
    return there, (id(link.engine), link.number)


def transformer_without_layers(transformer, **sizes):
    """Words, places, and what tells the next word: all of what travels is of these kinds."""
    return transformer(**{**sizes, "layers": 0})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmark") / "r.json"
    with Engine(memory=300 * 2**20), pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_server, "Engine", Pickled)
        patch.setitem(copyreg.dispatch_table, ThreadLink, by_number)
        patch.setattr(models, "transformer", partial(transformer_without_layers, models.transformer))
        results = main(["--quick", "--rounds", "1", "--json", str(path)])
    release()
    ENGINES.clear()
    return results, json.loads(path.read_text())


def test_every_part_is_measured_and_written(written):
    results, found = written
    cases = [f"0.25 MiB, {way}" for way in ("push", "pull", "both", "record every push")]
    trained = ["transformer, 1 trainer", "transformer of 64 words, 2 trainers"]
    compared = [*cases, *trained, "5 M parameters, Adam, record every push"]
    assert [row.case for row in results.rows] == compared
    assert [row["case"] for row in found["results"]["rows"]] == compared
    assert [sent.case for sent in results.sent] == trained
    assert [touched.batch for touched in results.touched] == [8, 16]
    assert {"python", "jax", "cores"} <= set(found["environment"])
    assert all(0 < row.low <= row.ratio <= row.high for row in results.rows)


def test_bytes_are_those_of_the_plan(written):
    results, _ = written
    assert all((s.up, s.down) == (s.planned_up, s.planned_down) for s in results.sent)
    assert all((t.up, t.down) == (t.planned_up, t.planned_down) for t in results.touched)


def test_bytes_grow_with_the_rows_touched(written):
    few, many = written[0].touched
    rows, d = many.rows - few.rows, 4
    assert many.up - few.up == pytest.approx(rows * (4 + 4 * d))
    assert many.down - few.down == pytest.approx(rows * 4 * d)
    assert 0 < many.record - few.record < rows * 4 * (2 * d + 8)
    assert many.record < many.table


def test_the_tables_show_every_result(written):
    text = parameter_server.tables(written[0])
    heads = 3
    fits = 3
    shown = [line for line in text.splitlines() if line]
    results = written[0]
    moved = sum(mib > 0 for mib in results.mib)
    assert len(shown) == heads + moved + len(results.sent) + len(results.touched) + fits


def test_a_part_that_does_not_exist(capsys):
    with pytest.raises(SystemExit):
        main(["--parts", "speed"])
    assert "no speed; there are moving, training, records, rows" in " ".join(capsys.readouterr().err.split())
