"""The benchmark of many devices runs and says what it measured; how fast is never asked here."""

import json

import jax
import pytest
from benchmarks import models, multi_device
from benchmarks.by_hand import Case
from benchmarks.multi_device import main

import onward as ow

pytestmark = pytest.mark.usefixtures("earlier_objects_frozen")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One layer, and one rate for what is compared and what is timed: the steps by hand are compiled once."""
    folder = tmp_path_factory.mktemp("benchmark")
    chosen = ["--devices", "1,2", "--model", "mlp", "--merge", "average", "--quick", "--rounds", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_device, "RATE", multi_device._VISIBLE_RATE)
        patch.setitem(multi_device._MODELS, "mlp", lambda n, quick: models.mlp((8, 4), 2 * n))
        results = main([*chosen, "--json", str(folder / "r.json"), "--plot", str(folder / "r.png")])
    return results, json.loads((folder / "r.json").read_text()), folder / "r.png"


def test_every_combination_is_measured_and_written(written):
    results, found, picture = written
    combinations = [(r.model, r.merge, r.devices) for r in results]
    assert combinations == [("mlp", "average", 1), ("mlp", "average", 2)]
    assert [(r["model"], r["merge"], r["devices"]) for r in found["results"]] == combinations
    assert {"python", "jax", "cores"} <= set(found["environment"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_numbers_are_what_they_say(written):
    for r in written[0]:
        assert r.batch == 2 * r.devices
        assert min(r.seconds, r.throughput, r.efficiency, r.merging) > 0
        peers = ["by pmap", "sharded jit", *(["one device"] if r.devices == 1 else [])]
        assert [row.against for row in r.rows] == peers
        assert all(0 < row.low <= row.ratio <= row.high for row in r.rows)


def test_bytes_sent_are_near_the_bound(written):
    one, two = written[0]
    numbers = 8 * 4 + 4
    assert one.sent == one.bound == 0
    assert two.bound == 4 * numbers
    assert two.sent == 4 * numbers + 4  # and the loss
    assert two.state == one.state > 3 * 4 * numbers


def test_the_tables_show_every_result(written):
    text = multi_device.scaling(written[0])
    assert len(text.splitlines()) == 1 + len(written[0])
    assert text.split()[:3] == ["model", "merge", "devices"]


def sides(case, rate, merge):
    return case, multi_device._replicated(case, rate, 2, merge), multi_device._pmapped(case, rate, 2)


def sgd(params, gradient, slots, t, rate):
    return jax.tree.map(lambda w, g: w - rate * g, params, gradient), slots


def test_a_resnet_agrees_with_the_step_by_hand():
    """Of one block, by SGD; Adam moves the dense layers of the other tests."""
    case = Case("resnet", models.resnet((4,), 8, 4), ow.SGD, sgd, 0)
    multi_device.check_agreement(*sides(case, 0.1, "average"))


def test_a_merge_that_is_not_exact_is_caught():
    case = multi_device.adam_case("mlp", models.mlp((8, 4), 4))
    with pytest.raises(AssertionError, match="apart"):
        multi_device.check_agreement(*sides(case, 1e-3, "power_sgd"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--devices 1,16", "JAX shows 8 (cpu). To try more on the host, set XLA_FLAGS"),
        ("--merge mean", "no mean; there are average, bucketed, sharded"),
        ("--model vgg", "no vgg; there are mlp, resnet, transformer"),
    ],
)
def test_choices_that_do_not_exist(arguments, words, capsys):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert words in " ".join(capsys.readouterr().err.split())
