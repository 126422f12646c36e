"""Parameters in safetensors files of others, against the library of Hugging Face."""

import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors import deserialize, safe_open
from safetensors.numpy import load_file, save_file

import onward as ow
from onward.execute.exchange.tensor_files import _holds

NAMES = {
    "wte.weight": "embedding",
    "h.{n}.{part}.weight": ("layers/{n}/{part}/w", (1, 0)),
    "h.{n}.{part}.bias": "layers/{n}/{part}/b",
    "h.{n}.mask": None,
}
THEIRS = {
    "wte.weight": np.arange(12, dtype="float32").reshape(6, 2),
    "h.0.fc.weight": np.arange(6, dtype="float32").reshape(3, 2),
    "h.0.fc.bias": np.arange(3, dtype="float32"),
    "h.0.mask": np.ones((4, 4), bool),
    "scale": np.array(2, "float16"),
}
LIKE = {
    "embedding": jax.ShapeDtypeStruct((6, 2), "float32"),
    "layers": [{"fc": {"w": np.zeros((2, 3), "float32"), "b": np.zeros(3, "float32")}}],
    "scale": jnp.float32(0),
    "activation": "relu",
}


@pytest.fixture
def theirs(tmp_path):
    def write(**changes):
        arrays = {name: x for name, x in (THEIRS | changes).items() if x is not None}
        save_file(arrays, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors"

    return write


def test_a_table_names_transposes_and_leaves_out(theirs):
    found = ow.load_safetensors(theirs(), LIKE, NAMES)
    np.testing.assert_array_equal(found["layers"][0]["fc"]["w"], THEIRS["h.0.fc.weight"].T)
    np.testing.assert_array_equal(found["layers"][0]["fc"]["b"], THEIRS["h.0.fc.bias"])
    np.testing.assert_array_equal(found["embedding"], THEIRS["wte.weight"])
    assert (found["scale"].dtype, float(found["scale"]), found["activation"]) == ("float32", 2.0, "relu")
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(found) if x != "relu")


def test_the_same_table_writes(theirs, tmp_path):
    found = ow.load_safetensors(theirs(), LIKE, NAMES)
    del found["activation"]
    ow.save_safetensors(tmp_path / "new" / "again.safetensors", found, NAMES)
    again = load_file(tmp_path / "new" / "again.safetensors")
    assert again.keys() == THEIRS.keys() - {"h.0.mask"}
    for name, value in again.items():
        np.testing.assert_array_equal(value, THEIRS[name])
    with safe_open(tmp_path / "new" / "again.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_bfloat16_is_bfloat16_for_the_library(tmp_path):
    path, w = tmp_path / "half.safetensors", np.linspace(-3, 7, 6).astype(bfloat16).reshape(3, 2)
    half = {"w": jnp.asarray(w), "small": jnp.ones(4, jnp.float8_e4m3fn)}
    ow.save_safetensors(path, half, {"W": ("w", (1, 0))})
    with safe_open(path, framework="np") as file:
        assert [file.get_slice(name).get_dtype() for name in ("W", "small")] == ["BF16", "F8_E4M3"]
    told = dict(deserialize(path.read_bytes()))["W"]
    assert (told["shape"], bytes(told["data"])) == ([2, 3], np.ascontiguousarray(w.T).tobytes())
    assert_same(ow.load_safetensors(path, half, {"W": ("w", (1, 0))}), half)
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "float32"), half)
    found = ow.load_safetensors(path, wide, {"W": ("w", (1, 0))})
    assert_same(found, jax.tree.map(lambda x: x.astype("float32"), half))


def assert_same(found, expected):
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_file_whose_bytes_are_written_by_hand(tmp_path):
    entries = {"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
    head = json.dumps(entries).encode()
    numbers = np.array([1.5, -2.0], bfloat16).tobytes()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + numbers)
    found = ow.load_safetensors(tmp_path, {"w": jnp.zeros(2, jnp.bfloat16)})
    assert (found["w"].dtype, found["w"].tolist()) == (jnp.bfloat16, [1.5, -2.0])


def test_several_files_are_one_model(tmp_path):
    shards = [tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for path, name in zip(shards, "ab", strict=True):
        save_file({name: np.ones(2, "float32")}, path)
    like = {"a": np.zeros(2, "float32"), "b": np.zeros(2, "float32")}
    for given in (tmp_path, shards, str(tmp_path)):
        assert_same(ow.load_safetensors(given, like), jax.tree.map(jnp.ones_like, like))
    with pytest.raises(ow.CheckpointError, match=r"'a' \(model-00001.*and 'a' .*would both be 'a'"):
        ow.load_safetensors([*shards, shards[0]], like)


def test_all_that_does_not_fit_is_named(theirs):
    path = theirs(**{"wte.weight": None, "h.1.fc.bias": np.ones(3, "float32"), "scale": np.array(2.0)})
    with pytest.raises(ow.CheckpointError) as error:
        ow.load_safetensors(path, LIKE, NAMES | {"h.{n}.{part}.weight": "layers/{n}/{part}/w"})
    text = str(error.value)
    assert "'embedding' float32[6, 2] is missing: the files hold no 'wte.weight'" in text
    assert "'h.1.fc.bias', 'layers/1/fc/b' here, float32[3] is in the file and not in the tree" in text
    assert "'layers/0/fc/w' is float32[2, 3] in the tree; 'h.0.fc.weight' is float32[3, 2]" in text
    assert "'scale' is float32[] in the tree; 'scale' is float64[]. cast=True rounds it" in text
    assert len(text.split("\n")) == 5


def test_numbers_are_rounded_where_that_is_asked_for_and_never_lost(tmp_path):
    path = tmp_path / "w.safetensors"
    like = {"w": jnp.zeros(2, jnp.float16)}
    save_file({"w": np.array([1 + 2**-20, np.inf], "float32")}, path)
    assert ow.load_safetensors(path, like, cast=True)["w"].tolist() == [1.0, np.inf]
    save_file({"w": np.array([1.0, 1e6], "float32")}, path)
    with pytest.raises(ow.CheckpointError, match="'w': 1 numbers are too large for float16"):
        ow.load_safetensors(path, like, cast=True)
    save_file({"w": np.array([1, 2**40])}, path)
    for dtype in ("int32", "float32"):
        with pytest.raises(ow.CheckpointError, match=r"'w' is int64\[2\], which it does not hold"):
            ow.load_safetensors(path, {"w": jax.ShapeDtypeStruct((2,), dtype)}, cast=True)


def test_whole_numbers_that_a_float_does_not_hold_are_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    with jax.enable_x64(True):
        for number, dtype in ((2**60 + 1, "float64"), (np.int8(127), jnp.float8_e4m3fn)):
            save_file({"w": np.array([number])}, path)
            with pytest.raises(ow.CheckpointError, match=r"'w' is u?int\d+\[1\], which it does not hold"):
                ow.load_safetensors(path, {"w": jnp.zeros(1, dtype)}, cast=True)
        for number, dtype in ((np.uint8(255), "bfloat16"), (np.int32(2**31 - 1), "float64")):
            save_file({"w": np.array([number])}, path)
            assert ow.load_safetensors(path, {"w": jnp.zeros(1, dtype)})["w"].tolist() == [int(number)]


def test_the_other_order_of_bytes_and_float64(tmp_path):
    path, numbers = tmp_path / "w.safetensors", np.array([1.0, 1e-3])
    ow.save_safetensors(path, {"big": numbers.astype(">f4"), "w": numbers})
    assert load_file(path)["big"].tolist() == numbers.astype("float32").tolist()
    assert load_file(path)["w"].tolist() == numbers.tolist()
    like = {"big": jnp.zeros(2), "w": jax.ShapeDtypeStruct((2,), "float64")}
    with pytest.raises(ow.CheckpointError, match=r"'w' is float32\[2\] in the tree; 'w' is float64"):
        ow.load_safetensors(path, like)
    big = {"big": np.zeros(2, ">f4")}
    assert ow.load_safetensors(path, big, {"w": None})["big"].tolist() == numbers.astype("float32").tolist()
    with jax.enable_x64(True):
        assert ow.load_safetensors(path, like)["w"].tolist() == numbers.tolist()


def test_many_problems_are_counted(tmp_path):
    save_file({f"a{i}": np.ones(1) for i in range(50)}, tmp_path / "w.safetensors")
    with pytest.raises(ow.CheckpointError, match=r"and 10 more$"):
        ow.load_safetensors(tmp_path, {})


def test_metadata_is_text(tmp_path):
    for metadata in ({"step": 3}, {3: "step"}, "pt"):
        with pytest.raises(ow.ArgumentError, match="expected texts by name"):
            ow.save_safetensors(tmp_path / "w.safetensors", {"w": np.ones(1)}, metadata=metadata)
    assert not list(tmp_path.iterdir())


def test_a_transposed_shape_is_shown_both_ways(theirs):
    like = LIKE | {"layers": [{"fc": {"w": np.zeros((3, 2), "float32"), "b": np.zeros(3, "float32")}}]}
    with pytest.raises(ow.CheckpointError, match=r"is float32\[2, 3\] \(\[3, 2\] in the file\)"):
        ow.load_safetensors(theirs(), like, NAMES)
    with pytest.raises(ow.CheckpointError, match=r"has shape \[3\], and names transposes it by \(1, 0\)"):
        ow.load_safetensors(theirs(), LIKE, NAMES | {"h.{n}.{part}.bias": ("layers/{n}/{part}/b", (1, 0))})


@pytest.mark.parametrize(
    "row",
    [
        *({"a": 3}, {"a": ("b", (0, 2))}, {"a": ("b", "10")}, {"a.{n}": "b"}, {"{n}.{n}": "{n}"}),
        *({"{n}.{n}": None}, {"a.{}": "b/{}"}, {"a.{0}": "b/{0}"}, [("a", "b")]),
    ],
    ids=str,
)
def test_a_table_of_another_form_is_refused(row):
    with pytest.raises(ow.ArgumentError, match=r"^names"):
        ow.load_safetensors("none", {}, row)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"w": "relu"}, "'w' is 'relu'"),
        ({"w": jax.ShapeDtypeStruct((2,), "float32")}, "expected an array of numbers"),
        ({"w": np.ones(2, "complex64")}, r"'w' is an array of shape \(2,\) of complex64"),
        ({"w": jax.random.key(0)}, "'w' is an array of shape"),
        ({"a": {"b": np.ones(1)}, "a/b": np.ones(1)}, "a/b stands for two places"),
        ({"a": np.ones(1), "b": np.ones(1)}, "would be the name of 'b' and of another"),
        ({"a": np.ones(1)}, r"names transposes it by \(1, 0\)"),
    ],
)
def test_a_tree_that_cannot_be_written_is_refused(tree, message, tmp_path):
    names = {"b": "a"} if len(tree) == 2 else {"a": ("a", (1, 0))}
    with pytest.raises(ow.ArgumentError, match=message):
        ow.save_safetensors(tmp_path / "w.safetensors", tree, names)
    assert not list(tmp_path.iterdir())


def test_what_is_not_such_a_file_is_refused(tmp_path, theirs):
    with pytest.raises(ow.CheckpointError, match=r"there is no \*.safetensors file"):
        ow.load_safetensors(tmp_path, {})
    with pytest.raises(ow.CheckpointError, match=r"none\.safetensors cannot be read"):
        ow.load_safetensors(tmp_path / "none.safetensors", {})
    path = theirs()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ow.CheckpointError, match=r"model.safetensors cannot be read as safetensors"):
        ow.load_safetensors(path, LIKE, NAMES)


def test_a_state_offers_its_parameters(theirs):
    def loss(params, x):
        return jnp.sum(x @ params["w"])

    step = ow.compile(ow.SGD(0.1).minimize(loss, {"w": jnp.ones((3, 2))}, jnp.ones((4, 3))))
    state = step.init({"w": jnp.ones((3, 2))})
    with pytest.raises(ow.ArgumentError, match=r"is a State; pass its parameters, state.parameters"):
        ow.load_safetensors(theirs(), state)
    path = theirs(**dict.fromkeys(THEIRS), **{"fc.weight": np.ones((2, 3), "float32")})
    params = ow.load_safetensors(path, state.parameters, {"fc.weight": ("w", (1, 0))})
    state, _ = step(step.init(params), jnp.ones((4, 3)))
    np.testing.assert_allclose(state["w"], 0.6, rtol=1e-6)


def test_a_dtype_holds_every_whole_number_of_another():
    """Counted out, for all integers of up to 8 bits."""
    floats = [jnp.dtype(name) for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32")]
    for name in ("int4", "uint4", "int8", "uint8"):
        limits = jnp.iinfo(name)
        numbers = np.arange(limits.min, limits.max + 1, dtype="float32")
        for wide in floats:
            is_held = np.array_equal(numbers.astype(wide).astype("float32"), numbers)
            assert _holds(wide, jnp.dtype(name)) == is_held, (wide, name)
