"""The contest of optimizers: what it reads, what it keeps equal, and what it says; who wins is not asked."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import log
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import steps_to_loss, token_files
from benchmarks.curves import Curve, Result, table
from benchmarks.optimizer_rows import PUBLISHED, ROWS
from benchmarks.steps_to_loss import following, main
from benchmarks.token_files import Data, DataError
from benchmarks.track_gpt import Size, init, loss_of

import onward as ow

TINY = Size(layers=1, d=8, heads=2, seq=4, words=16)


# Token files -----------------------------------------------------------------------------------------------


def speedrun_file(path: Path, tokens: list[int], magic: int = 20240520, version: int = 1) -> Path:
    """As ``write_datafile`` of the speedrun writes it."""
    header = np.zeros(256, dtype=np.int32)
    header[0], header[1], header[2] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + np.array(tokens, dtype=np.uint16).tobytes())
    return path


def test_token_files_are_those_of_the_speedrun(tmp_path: Path) -> None:
    tokens = [7, 50_256, 0, 65_535]
    theirs = speedrun_file(tmp_path / "theirs.bin", tokens)
    token_files.write(tmp_path / "ours.bin", tokens)
    assert theirs.read_bytes() == (tmp_path / "ours.bin").read_bytes()
    assert token_files.read(theirs).tolist() == tokens


def test_batches_are_those_of_the_speedrun(tmp_path: Path) -> None:
    """File after file, without a gap; what is left of a file is passed over."""
    for i, count in enumerate([14, 6, 13]):
        speedrun_file(tmp_path / f"some_train_{i:06}.bin", list(range(100 * i, 100 * i + count)))
    speedrun_file(tmp_path / "some_val_000000.bin", list(range(20)))
    data = token_files.folder(tmp_path)
    got = list(data.batches(rows=2, seq=3))
    begins = [0, 6, 200, 206]
    assert [x.ravel().tolist() for x, _ in got] == [[*range(b, b + 6)] for b in begins]
    assert [y.ravel().tolist() for _, y in got] == [[*range(b + 1, b + 7)] for b in begins]
    assert got[0][0].shape == (2, 3)
    assert data.steps(rows=2, seq=3) == len(got)
    assert len(data.validation(2, 3, count=3)) == 3
    with pytest.raises(DataError, match=r"20 tokens to validate with; expected 4 batches of 2 x 3, .* 25\."):
        data.validation(2, 3, count=4)


BROKEN = {
    "magic": (lambda p: speedrun_file(p, [1], magic=20240801), "begins with 20240801; expected 20240520"),
    "version": (lambda p: speedrun_file(p, [1], version=7), "is of version 7; expected 1"),
    "truncated": (
        lambda p: p.write_bytes(speedrun_file(p, [1, 2, 3]).read_bytes()[:-2]),
        "says that it has 3 tokens, which are 1,030 bytes with the header; it has 1,028",
    ),
    "header": (lambda p: p.write_bytes(b"\0" * 1000), "has 1,000 bytes; expected a header of 1,024 bytes"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_is_none_is_refused(kind: str, tmp_path: Path) -> None:
    make, message = BROKEN[kind]
    make(tmp_path / "some_train_0.bin")
    with pytest.raises(DataError, match=message):
        token_files.read(tmp_path / "some_train_0.bin")


def test_a_token_that_the_model_has_no_row_for_is_refused() -> None:
    data = Data("some", 10, (np.array([1, 2, 10, 3]),), np.arange(3))
    with pytest.raises(DataError, match="A token is 10; expected tokens below 10"):
        next(data.batches(1, 3))
    with pytest.raises(DataError, match=r"Tokens are -1 to 2; expected 0 to 65535"):
        token_files.write("never.bin", [-1, 2])


# The model -------------------------------------------------------------------------------------------------


def test_the_model_is_that_of_the_track() -> None:
    """Its ``train_gpt_simple.py`` written out in NumPy, heads and places one by one."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape), init(TINY, 0))
    words, following = rng.integers(0, 16, (2, 1, 4))

    def rms(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.finfo(np.float32).eps)

    def dense(p, x):
        return x @ p["w"] + p["b"]

    def rotary(x, place):  # [4]: one pair turns, the other stays
        angle = place * np.array([1.0, 0.0])
        a, b = x[:2], x[2:]
        return np.concatenate([a * np.cos(angle) + b * np.sin(angle), b * np.cos(angle) - a * np.sin(angle)])

    x = rms(params["embed"][words[0]]) * params["norm_1"]["gain"]
    for p in params["layers"]:
        h = rms(x) * p["norm_1"]["gain"]
        q, k, v = (dense(p[name], h).reshape(4, 2, 4) for name in ("query", "key", "value"))
        mixed = np.zeros((4, 2, 4))
        for head in range(2):
            for i in range(4):
                seen = [rotary(rms(q[i, head]), i) @ rotary(rms(k[j, head]), j) for j in range(i + 1)]
                weight = np.exp(0.12 * 32 * np.array(seen))
                mixed[i, head] = (weight / weight.sum()) @ v[: i + 1, head]
        x = x + dense(p["out"], mixed.reshape(4, 8))
        x = x + dense(p["down"], np.maximum(dense(p["up"], rms(x) * p["norm_2"]["gain"]), 0) ** 2)
    logits = dense(params["head"], rms(x) * params["norm_2"]["gain"])
    logits = 15 * logits / np.sqrt(logits**2 + 15**2)
    expected = np.mean([np.log(np.exp(z).sum()) - z[n] for z, n in zip(logits, following[0], strict=True)])
    loss = jax.jit(loss_of(TINY))
    assert float(loss(jax.tree.map(jnp.float32, params), words, following)) == pytest.approx(
        expected, rel=1e-5
    )
    assert float(loss(init(TINY, 0), words, following)) == pytest.approx(log(16), rel=1e-5)


# The rows --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forward() -> ow.Program:
    words = np.zeros((1, 4), np.int32)
    return ow.trace(loss_of(TINY), init(TINY, 0), words, words)


def test_each_row_updates_the_matrices_and_adamw_the_rest(forward: ow.Program) -> None:
    for name, row in (ROWS | PUBLISHED).items():
        plan = row.build(row.tuned).plan(forward)
        own = row.build(row.tuned).name
        by = {p.name: plan[p.name].by for p in forward.parameters}
        matrices = {p.name for p in forward.parameters if p.name.startswith("layers") and len(p.shape) == 2}
        assert len(matrices) == 6
        assert {by[p] for p in matrices} == {own}, name
        assert {by[p] for p in by if p not in matrices} == {
            f"adam_w ({group})" for group in ("embed", "head", "vectors")
        }, name


@pytest.mark.parametrize(
    ("name", "peak", "warmup", "rates"),
    [
        ("Adam-published", 0.0015, 250, (0.3, 1 / 320, 0.01)),
        ("Muon-published", 0.025, 0, (0.7, 0.004, 0.015)),
    ],
)
def test_published_rows_have_the_rates_of_the_track(
    name: str, peak: float, warmup: int, rates: tuple[float, ...]
) -> None:
    """``set_hparams`` of the track, written out."""
    row = PUBLISHED[name]
    optimizer, steps = row.build(row.tuned), row.tuned.steps
    given = [optimizer.learning_rate, *(g.optimizer.learning_rate for g in optimizer.groups)]
    n = np.array([0, 100, 249, 250, 1000, int(0.3 * steps) + 1, steps // 2, steps - 1])
    eta = np.minimum(1, (1 - n / steps) / 0.7) * (np.minimum(1, (n + 1) / warmup) if warmup else 1)
    for schedule, first in zip(given, (peak, *rates), strict=True):
        assert schedule(n) == pytest.approx(first * eta, rel=5e-3)


# The contest -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [0.3, 1.0, 5.0])
def test_the_search_for_a_rate_closes_in(least: float) -> None:
    losses: dict[float, float] = {}
    rate = 1.0
    for _ in range(6):
        losses[rate] = abs(log(rate / least))
        rate = following(losses)
    best = min(losses, key=losses.__getitem__)
    assert max(best / least, least / best) < 1.5


def test_what_does_not_reach_the_target_says_so() -> None:
    first, second = Curve((5, 10), (3.0, 2.0)), Curve((5, 10), (3.0, float("nan")))
    results = [
        Result("Adam", ROWS["Adam"].tuned, (first, second)),
        Result("SGD", ROWS["SGD"].tuned, (second,)),
    ]
    assert (first.reaches(2.0), second.reaches(2.0)) == (10, None)
    _, adam, sgd = table(results, 2.0).split("\n")
    assert "not reached  10" in adam
    assert "1 of 2" in adam
    assert "0 of 1" in sgd
    assert adam.endswith("inf")


def test_quick_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is evaluated as it is, one by its average; Sophia takes no micro-batches, and the others go on."""
    monkeypatch.setattr(steps_to_loss, "QUICK", replace(steps_to_loss.QUICK, parts=2))
    paths = {kind: tmp_path / f"found.{kind}" for kind in ("json", "svg")}
    options = ["--json", str(paths["json"]), "--plot", str(paths["svg"]), "--target", "1e-3"]
    found = main(["--quick", "--seeds", "2", "--optimizers", "Sophia,SGD,Schedule-Free", *options])
    sophia, *results = found
    assert "evaluates the loss again" in sophia.failed
    assert not sophia.curves
    assert [result.name for result in results] == ["SGD", "Schedule-Free"]
    for result in results:
        one, other = result.curves
        assert one.steps == other.steps == (2, 4)
        assert one.losses != other.losses
        assert all(0 < x < 7 for x in (*one.losses, *other.losses))
    printed = capsys.readouterr().out
    assert printed.count("not reached") == 2
    assert printed.count("failed: ") == 1
    written = json.loads(paths["json"].read_text())["steps_to_loss"]
    assert [len(result["curves"]) for result in written["results"]] == [0, 2, 2]
    assert written["results"][1]["curves"][0]["losses"] == list(results[0].curves[0].losses)
    assert written["course"]["target"] == 1e-3
    assert b"not reached" in paths["svg"].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizers", "Muon,Adom"], "no optimizer is named Adom; there are SGD, Momentum"),
        (["--data", "nowhere"], "nowhere is not a folder"),
        (["--data", "{empty}"], "has 0 files .train.*bin and 0 .val.*bin; expected at least one of each"),
        (["--data", "{few}"], "tokens for 12 steps of 512 x 1024; expected those for"),
        (["--seeds", "0"], "--seeds is 0; expected at least 1"),
        (["--target", "nan"], "--target is nan; expected a loss above 0"),
    ],
)
def test_wrong_arguments_are_told(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, few = tmp_path / "empty", tmp_path / "few"
    empty.mkdir()
    few.mkdir()
    if "{few}" in arguments:
        token_files.write(few / "a_train_0.bin", np.zeros(12 * 512 * 1024 + 1, np.int64))
        token_files.write(few / "a_val_0.bin", [0])
    with pytest.raises(SystemExit):
        main([a.format(empty=empty, few=few) for a in arguments])
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
