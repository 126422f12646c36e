"""Broken and malicious model files: a named error each time, nothing runs, nothing is written."""

import hashlib
import io
import json
import pickle
import random
import resource
import struct
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from safetensors.numpy import save as safetensors_bytes

import onward as ow
from onward.serve.export import container
from onward.serve.export.executable import calls_in

REFUSED = "is not a whole model file|is sealed, and says what no Onward writes"
SEAL = b'"sha256":"'


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a whole model file."""

    def network():
        return ow.layer.fc(ow.layer.fc(ow.data("x", (None, 4)), 8, act="relu"), 2, name="output")

    path = tmp_path_factory.mktemp("whole") / "trained.model"
    return ow.save(ow.Model(network, seed=1), path).read_bytes()


@pytest.fixture
def refused(tmp_path):
    """Asserts that these bytes are refused by name, and that nothing but the file is in its folder then."""

    def expect(data, text=REFUSED, check=ow.load):
        path = tmp_path / "some.model"
        path.write_bytes(data)
        with pytest.raises(ow.ModelFileError, match=text) as found:
            check(path)
        assert str(path) in str(found.value)
        assert [p.name for p in tmp_path.iterdir()] == ["some.model"]

    return expect


def header_of(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def sealed(data):
    """The bytes with a seal that fits them, as somebody makes who wants to be believed."""
    place = data.index(SEAL) + len(SEAL)
    data = data[:place] + b"0" * 64 + data[place + 64 :]
    return data[:place] + hashlib.sha256(data).hexdigest().encode() + data[place + 64 :]


def rewritten(data, change):
    """The file with another manifest or header, sealed."""
    header, rest = header_of(data)
    about = json.loads(header["__metadata__"]["onward"])
    change(header, about)
    header["__metadata__"]["onward"] = json.dumps(about)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return sealed(struct.pack("<Q", len(text)) + text + rest)


def test_the_seal_of_this_test_is_that_of_the_library(whole, tmp_path):
    path = tmp_path / "same.model"
    path.write_bytes(rewritten(whole, lambda header, about: None))
    assert ow.load(path)


@pytest.mark.parametrize("percent", range(100))
def test_cut_off(whole, refused, percent):
    refused(whole[: len(whole) * percent // 100])


def test_one_byte_more(whole, refused):
    refused(whole + b"\0")


def test_a_thousand_random_bits(whole, tmp_path):
    generator = random.Random(0)
    path = tmp_path / "flipped.model"
    for _ in range(1000):
        data = bytearray(whole)
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
        with pytest.raises(ow.ModelFileError):
            ow.load(path)


def place_of(data, name):
    """Where in a file the bytes of an array are."""
    header, rest = header_of(data)
    return range(*(len(data) - len(rest) + n for n in header[name]["data_offsets"]))


@pytest.mark.parametrize("name", ["onward:executable:0", "onward:graph:0"])
def test_bits_under_a_seal_that_fits(whole, refused, name):
    """JAX itself takes some for other programs, crashes at some, and never comes back from one."""
    generator = random.Random(0)
    for _ in range(100):
        data = bytearray(whole)
        data[generator.choice(place_of(whole, name))] ^= 1 << generator.randrange(8)
        refused(sealed(bytes(data)), f"section '{name}' is not as it was written")


def test_a_section_more_or_less_under_a_seal_that_fits(whole, refused):
    def without(header, about):
        header["__metadata__"]["sections"] = "{}"

    refused(rewritten(whole, without), "section 'onward:executable:0'")
    for damaged in ("3", "[]", "{"):
        refused(rewritten(whole, lambda h, a, d=damaged: h["__metadata__"].update(sections=d)))


def older(data):
    """The file as it was written before sections were named with a SHA-256 each."""
    return rewritten(data, lambda header, about: header["__metadata__"].pop("sections"))


def test_bits_of_the_graph_of_an_older_file_under_a_seal_that_fits(whole, tmp_path):
    """Whatever the graph says then, it is refused by name, or is a graph that agrees with its executable."""
    whole = older(whole)
    begin, end = place_of(whole, "onward:graph:0").start, place_of(whole, "onward:graph:0").stop
    generator = random.Random(0)
    path = tmp_path / "flipped.model"
    refusals = 0
    for _ in range(300):
        data = bytearray(whole)
        data[generator.randrange(begin, end)] ^= 1 << generator.randrange(8)
        path.write_bytes(sealed(bytes(data)))
        try:
            assert ow.check(ow.load(path).topology)
        except ow.ModelFileError:
            refusals += 1
    assert 20 < refusals < 300


class Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


@pytest.mark.parametrize("protocol", [0, 4])
def test_pickle(refused, protocol, monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(folder)
    refused(pickle.dumps(Bomb(), protocol))
    assert list(folder.iterdir()) == []


def test_pickle_in_the_place_of_a_graph_or_an_executable(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = older(whole)
    header, rest = header_of(whole)
    for name in ("onward:graph:0", "onward:executable:0"):
        begin, end = header[name]["data_offsets"]
        bomb = pickle.dumps(Bomb()).ljust(end - begin, b"\0")
        head = whole[: len(whole) - len(rest)]
        (tmp_path / "m").write_bytes(sealed(head + rest[:begin] + bomb + rest[end:]))
        with pytest.raises(ow.ModelFileError):
            ow.load("m")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_archives_with_paths_that_lead_outside(refused):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("../outside", "x")
    refused(archive.getvalue())


@pytest.mark.parametrize("name", ["../../outside", "/outside", "output/../../b", "a\0b", "C:\\x"])
def test_names_that_look_like_paths_are_names(whole, refused, name):
    def rename(header, about):
        header[name] = header.pop("output/b")
        about["arrays"][name] = about["arrays"].pop("output/b")

    refused(rewritten(whole, rename))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 10**9, 0, 1])
def test_absurd_lengths_of_the_header(whole, refused, length):
    refused(struct.pack("<Q", length) + whole[8:])


def grow(shape, offsets=None):
    def change(header, about):
        header["output/w"]["shape"] = shape
        about["arrays"]["output/w"]["shape"] = shape
        if offsets:
            header["output/w"]["data_offsets"] = offsets

    return change


@pytest.mark.parametrize(
    "change",
    [
        grow([2**40, 2**20]),
        grow([8, 2**61]),
        grow([-8, -2]),
        grow([8, 2], [0, 2**50]),
        grow([8, 2], [2**50, 2**50 + 64]),
        grow([8.5, 2]),
        grow("many"),
    ],
)
def test_absurd_arrays_take_no_memory(whole, refused, change):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(rewritten(whole, change))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def deep(header, about):
    about["about"] = json.loads("[" * 900 + "]" * 900)


def lie(**said):
    return lambda header, about: about.update(said)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lie(onward="1.0.0"), "Update Onward"),
        (lie(format=2), "Update Onward"),
        (lie(onward="../../1"), "is not a version"),
        (lie(onward=3), "expected str"),
        (lie(kind="training"), r"load_step\(path\)"),
        (lie(kind="poem"), "holds 'poem'"),
        (lie(variants=[]), "no Program"),
        (lie(variants=[{}]), "sizes"),
        (lie(variants=None), "expected list"),
        (lie(arrays={}), "fc_0"),
        (lambda header, about: about["variants"][0].update(sizes={"b": 10**30}), "length"),
        (lambda header, about: about["variants"][0].update(sizes={}), "is not a length"),
        (lambda header, about: about["arrays"]["output/b"].update(dtype="object"), "output/b|dtype|object"),
        (lambda header, about: header["__metadata__"].pop("onward") and about.clear(), "onward"),
        (lambda header, about: header.pop("onward:executable:0"), "model file"),
        (lie(name=None), "'name' is NoneType; expected str"),
        (lie(jax=3), "'jax' is int; expected str"),
    ],
)
def test_lies_under_a_seal_that_fits(whole, refused, change, text):
    refused(rewritten(whole, change), text)


@pytest.mark.parametrize("name", ["output/b", "__metadata__"])
def test_two_entries_of_one_name(whole, refused, name):
    header, rest = header_of(whole)
    text = json.dumps(header, separators=(",", ":"))
    twin = json.dumps({name: header[name]}, separators=(",", ":"))[1:-1]
    twice = f"{text[:-1]},{twin}}}"
    data = struct.pack("<Q", len(twice)) + twice.encode() + rest
    refused(sealed(data), "same name twice|one seal")


def test_another_major_version_is_told_what_to_do(whole, refused):
    refused(rewritten(whole, lie(onward="7.1.2")), r"Onward 7\.1\.2 .* pip install -U onward")


def test_an_executable_past_the_window_leaves_parameters_and_graph(whole, tmp_path):
    path = tmp_path / "old.model"
    path.write_bytes(rewritten(whole, lambda header, about: about["variants"][0].update(convention=1)))
    model = ow.load(path)
    assert model["output/w"].shape == (8, 2)
    assert "fc_0" in str(model.topology)
    with pytest.raises(ow.ModelFileError, match=r"it runs versions \d+ to \d+.*all here"):
        ow.Evaluator(model).forward(x=np.ones((1, 4), "float32"))


def test_an_executable_that_calls_into_the_process_is_not_run(whole, tmp_path):
    """It is one that ``jax.export`` itself writes and reads, in the place of the model's."""

    def calling(*values):
        return [jax.ffi.ffi_call("anything", jax.ShapeDtypeStruct((3, 2), "float32"))(values[-1])]

    types = [jax.ShapeDtypeStruct(s, "float32") for s in ((4, 8), (8,), (8, 2), (2,), (3, 4))]
    allowed = [export.DisabledSafetyCheck.custom_call("anything")]
    made = export.export(jax.jit(calling), disabled_checks=allowed)(*types)
    path = tmp_path / "calling.model"
    path.write_bytes(whole)
    found = container.read(path)
    executable = np.frombuffer(made.serialize(), np.uint8)
    container.write(path, found.about, {**found.arrays, "onward:executable:0": executable})
    with pytest.raises(ow.ModelFileError, match="calls 'anything' in the process"):
        ow.load(path)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("%0 = stablehlo.custom_call @xla_ffi_python_cpu_callback(%a)", {"xla_ffi_python_cpu_callback"}),
        (
            '%0 = "stablehlo.custom_call"(%0) <{call_target_name = "x"}>',
            {"a function without a readable name"},
        ),
        ("%0 = stablehlo.add %1, %2", set()),
    ],
)
def test_calls_of_a_module_are_found(text, calls):
    assert calls_in(text) == calls


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\x93NUMPY", b"\x7fELF", b"PK\x03\x04", b"<html>", b"\0" * 100]
)
def test_other_files(refused, data):
    refused(data)


OTHERS = "is a safetensors file of other contents: w, and no network"


def test_safetensors_of_others(refused):
    refused(safetensors_bytes({"w": np.ones(3, "float32")}), text=OTHERS)
    refused(safetensors_bytes({"w": np.ones(3, "float32")}, {"onward": "{}", "sha256": "0" * 64}))
    refused(safetensors_bytes({"w": np.ones(3, "float32")}), check=ow.load_step, text=OTHERS)


def test_paths_that_are_no_files(tmp_path):
    for path, text in [
        (tmp_path / "none.model", "does not exist"),
        (tmp_path, "is a folder"),
        ("a\0b", "does not exist"),
    ]:
        with pytest.raises(ow.ModelFileError, match=text):
            ow.load(path)


def test_a_file_in_float64_says_what_to_switch_on(tmp_path):
    with jax.enable_x64(True):
        w = jnp.ones(2, "float64")
        path = ow.save(ow.Model(ow.trace(lambda w, x: x * w, w, np.ones((3, 2))), w), tmp_path / "wide.model")
        assert ow.Evaluator(ow.load(path)).forward(np.ones((1, 2))).value.dtype == jnp.float64
    with pytest.raises(ow.ModelFileError, match="jax_enable_x64"):
        ow.load(path)
