"""Processes that wait for each other, as threads of one: who is missing, and what is said of it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from ipaddress import ip_address

import numpy as np
import pytest

import onward as ow
from onward.execute.loop.interrupt import Interruptible
from onward.execute.peers import heartbeat
from onward.execute.peers.heartbeat import LastWord, Member, PeerWord, Status, own_host, pack, short, unpack
from onward.execute.peers.peers import SILENCE, Peers
from onward.execute.peers.rendezvous import _own_address, meet, summary
from onward.execute.peers.verdict import PeerView, all_halt, calling, verdict

INTERVAL = 0.05
TOKEN = b"a token"
INT, TERM = signal.SIGINT, signal.SIGTERM
GLOO = "UNKNOWN: Gloo all-reduce failed: [external/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


@pytest.fixture
def company():
    """Makes processes that hear of each other; the host is another one, so that pids mean nothing."""
    made = []

    def make(count=2, interval=INTERVAL, deaf=(), host="spark", pids=range(100, 200)):
        boxes = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
        for box in boxes:
            box.bind(("127.0.0.1", 0))
        members = [Member(box.getsockname(), host, pid) for box, pid in zip(boxes, pids[:count], strict=True)]
        peers = [
            Peers(i, members, box, TOKEN, interval=interval) if i not in deaf else box.close()
            for i, box in enumerate(boxes)
        ]
        made.extend(p for p in peers if p is not None)
        return peers

    yield make
    for peers in made:
        peers.close()


def in_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def never():
    threading.Event().wait()


def failing(error):
    def work():
        raise error

    return work


def until(condition, patience=5.0):
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def fails(peers, work, deadline=10.0, label="", first=""):
    """What the PeerError says."""
    with pytest.raises(ow.PeerError) as raised:
        peers.run(work, deadline, label)
    assert str(raised.value).startswith(first)
    return str(raised.value)


# ---------------------------------------------------------------------------- all end after the same step


def ended(peers, asked, seed=0):
    """After which step each process ended, and by which signal.

    ``asked`` tells which are asked to, after how many seconds and by which signal.
    """
    together, generator, found = threading.Barrier(len(peers)), np.random.default_rng(seed), {}
    own = dict.fromkeys(range(len(peers)), 0)
    pauses = generator.uniform(0, 0.004, (len(peers), 1000))

    def train(one):
        for n, pause in enumerate(pauses[one.index]):
            if number := one.halts(10.0, own[one.index]):
                found[one.index] = n, number
                return
            time.sleep(pause)
            one.run(lambda: together.wait(10.0), 10.0, "a step")

    def ask(i, number):
        own[i] = number
        peers[i].ask_to_halt(number)

    threads = [in_thread(lambda one=one: train(one)) for one in peers]
    timers = [threading.Timer(seconds, ask, (i, number)) for i, (seconds, number) in asked.items()]
    for timer in timers:
        timer.start()
    for thread in (*timers, *threads):
        thread.join(20.0)
    return found


@pytest.mark.parametrize(
    "asked",
    [
        {1: (0.05, INT)},
        {0: (0.05, TERM), 2: (0.055, TERM)},
        {0: (0.04, INT), 1: (0.04, INT), 2: (0.06, INT)},
    ],
    ids=len,
)
def test_all_end_after_the_same_step(company, asked):
    for seed in range(2):
        found = ended(company(3, interval=0.25), asked, seed)
        assert len(found) == 3, found
        assert len(set(found.values())) == 1, found
        assert 0 < found[0][0] < 200
        assert found[0][1] == next(iter(asked.values()))[1]


def test_they_may_go_on_and_be_asked_again(company):
    peers = company(2)
    first, second = (ended(peers, {1: (0.05, TERM)}), ended(peers, {0: (0.05, INT), 1: (0.06, INT)}))
    assert first[0] == first[1] > (0, INT)
    assert second[0] == second[1] > (0, 0)
    assert (first[0][1], second[0][1]) == (TERM, INT)


def is_ended(work):
    """Whether Ctrl-C ends what one of several processes does that make the steps together."""
    try:
        with Interruptible() as interrupts:
            interrupts.uninterrupted.is_shared = True
            work(interrupts.uninterrupted)
    except KeyboardInterrupt:
        return True
    return False


def test_ctrl_c_waits_for_the_others_and_pressed_again_it_does_not(company, monkeypatch):
    one, two = company()
    monkeypatch.setattr(Peers, "met", one)
    done = []

    def work(part):
        signal.raise_signal(INT)
        with part:
            done.append("a step")
        until(lambda: two._heartbeat.heard[0].word.signal == INT)
        signal.raise_signal(INT)
        done.append("never")

    assert is_ended(work)
    assert done == ["a step"]
    assert signal.getsignal(INT) is signal.default_int_handler


def test_who_heard_of_ctrl_c_ends_by_it_too_and_may_go_on(company, monkeypatch):
    one, two = company()
    other = in_thread(lambda: two.halts(10.0, INT))
    until(lambda: one._heartbeat.heard[1].word.signal == INT)
    monkeypatch.setattr(Peers, "met", one)
    assert is_ended(lambda part: part.agree(10.0))
    other.join(10.0)
    assert not is_ended(lambda part: part.agree(10.0))


def test_who_waits_for_one_that_is_gone_ends_by_itself(company):
    one, two = company()
    one.ask_to_halt(TERM)
    two.leave(RuntimeError("gone"))
    until(lambda: one._heartbeat.heard[1].word.status is Status.FAILED)
    assert one.halts(10.0, TERM) == TERM
    assert not one.halts(10.0)


HALTS = {  # the words of two others, before step 18
    "all say so": ([PeerWord(17, 17, halt=18), PeerWord(17, 17, halt=18)], True),
    "one does not know": ([PeerWord(17, 17, halt=18), PeerWord(17, 17)], None),
    "one is still in the step before": ([PeerWord(17, 17, halt=18), PeerWord(17, 16, halt=16)], None),
    "one has begun": ([PeerWord(17, 17, halt=18), PeerWord(18, 17)], False),
    "one has begun because another had": ([PeerWord(18, 17, halt=18), PeerWord(18, 17, halt=17)], False),
    "one went on after all had said so": ([PeerWord(18, 17, halt=18), PeerWord(17, 17, halt=18)], True),
    "one has left": ([PeerWord(17, 17, halt=18), PeerWord(17, 17, Status.FAILED)], True),
    "one has left in the step": ([PeerWord(18, 17, Status.FAILED), PeerWord(17, 17, halt=18)], False),
}


@pytest.mark.parametrize("case", HALTS)
def test_whether_all_end_here(case):
    words, expected = HALTS[case]
    assert all_halt(view(*words)) is expected


# ---------------------------------------------------------------------------- when nothing is wrong


def test_alone_it_only_calls():
    peers = Peers.meet()
    assert Peers.meet() is peers is Peers.met
    assert peers.run(threading.get_ident, 1.0) == threading.get_ident()
    assert (peers.index, len(peers.members), meet(None).mailbox) == (0, 1, None)


def test_what_the_work_returns_comes_from_one_thread(company):
    one, _ = company()
    threads = {one.run(threading.get_ident, 10.0) for _ in range(20)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    assert one.run(lambda: 42, None) == 42


def test_an_error_of_the_work_is_unchanged_and_the_step_counts_as_not_begun(company):
    one, two = company()
    error = ZeroDivisionError("1/0")
    with pytest.raises(ZeroDivisionError) as raised:
        one.run(failing(error), 10.0)
    assert raised.value is error
    assert one.run(lambda: "go on", 10.0) == "go on"
    assert two.run(lambda: "here too", 10.0) == "here too"
    assert one._finished == two._finished == 1


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration()], ids=repr)
def test_any_error_of_the_work_comes_back(company, error):
    one, _ = company()
    with pytest.raises(type(error)):
        one.run(failing(error), 10.0)


def test_nothing_of_a_step_is_kept_once_it_is_over(company):
    one, _ = company()

    def step():
        array = np.zeros(10)
        result = one.run(lambda: array + 1, 10.0)
        return weakref.ref(array), weakref.ref(result)

    known = step()
    until(lambda: [k() for k in known] == [None, None])


def test_a_step_costs_little(company):
    one, _ = company(interval=0.25)
    seconds = []
    for _ in range(500):
        begun = time.perf_counter()
        one.run(lambda: None, 60.0)
        seconds.append(time.perf_counter() - begun)
    assert sorted(seconds)[250] < 5e-4  # 2e-5 on an idle machine


def test_steps_with_labels_begin_together(company):
    trio = company(3)
    begun = []

    def process(peers, pause):
        for step in range(6):
            time.sleep(pause)
            peers.run(lambda s=step: begun.append((s, len(begun))), 10.0, f"batch {step // 2}")

    threads = [in_thread(lambda p=p, i=i: process(p, 0.02 * i)) for i, p in enumerate(trio)]
    for thread in threads:
        thread.join(20)
    assert [peers._finished for peers in trio] == [6, 6, 6]
    for step in (2, 4):  # the label changes: nobody is there before everybody has finished the step before
        assert min(place for s, place in begun if s == step) > max(p for s, p in begun if s == step - 2)


# ---------------------------------------------------------------------------- when one is missing


def test_one_that_falls_silent(company):
    one, two = company()
    for _ in range(3):
        one.run(lambda: None, 10.0)
        two.run(lambda: None, 10.0)
    until(lambda: one._heartbeat.heard[1].word.begun == 3)
    two.close()
    begun = time.monotonic()
    text = fails(
        one, never, 0.6, first="Step 4 did not end within 0.6 s. Process 1 (pid 101 on spark) was last"
    )
    assert time.monotonic() - begun < 0.6 + 3 * SILENCE * INTERVAL
    assert "after step 3: it died or was stopped" in text
    assert "start all again from the last checkpoint. onward launch --restarts 1" in text


def test_one_that_was_silent_from_the_beginning(company):
    one, _ = company(deaf=[1])
    text = fails(
        one, never, 0.3, first="Step 1 did not end within 0.3 s. Nothing was ever heard of process 1"
    )
    assert "no UDP datagrams come through to 127.0.0.1:" in text


def test_one_that_died_on_this_host_ends_the_step_before_its_deadline(company):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    one, two = company(host=own_host(), pids=[os.getpid(), child.pid])
    two.run(lambda: None, 10.0)
    until(lambda: one._heartbeat.heard[1].word.begun == 1)
    two.close()
    text = fails(
        one, never, 60.0, first=f"Step 1 cannot end. Process 1 (pid {child.pid} on {own_host()}) died"
    )
    assert "nothing was heard of it for" in text


def test_one_that_reads_for_too_long(company):
    one, two = company()
    one.run(lambda: None, 10.0)
    two.run(lambda: None, 10.0)
    text = fails(one, never, 0.3)
    assert "Process 1 (pid 101 on spark) is alive and has not begun step 2, which this one waits in" in text
    assert "it reads data, or has none left" in text
    assert "onward launch --deadline 1800, or ONWARD_DEADLINE=1800" in text


def test_all_are_in_the_step(company):
    trio = company(3)
    for peers in trio[1:]:
        in_thread(lambda p=peers: p.run(never, None, "x [4]"))
    text = fails(trio[0], never, 0.5, "x [4]")
    assert text.startswith("Step 1 did not end within 0.5 s. All 3 processes are alive and take part")


def test_one_that_came_to_its_end(company):
    one, two = company()
    one.run(lambda: None, 10.0)
    two.run(lambda: None, 10.0)
    threading.Timer(0.2, two.leave).start()
    begun = time.monotonic()
    text = fails(one, never, 60.0, first="Step 2 cannot end.")
    assert time.monotonic() - begun < 3
    assert "came to its end after step 1, and takes no part in step 2. Give all processes the same n" in text


def test_one_that_left_after_the_step_is_no_reason_to_fail(company):
    one, two = company()
    two.run(lambda: None, 10.0)
    two.leave()
    assert one.run(lambda: time.sleep(5 * INTERVAL) or "done", 10.0) == "done"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("the disk is\nfull"), "was ended before its first step by an error: OSError: the disk is."),
        (ow.PeerError("Step 1 cannot end."), "gave up before its first step: PeerError: Step 1 cannot end."),
    ],
)
def test_one_that_an_error_ended(company, error, words):
    one, two = company()
    two.leave(error)
    assert words in fails(one, never, 60.0, first="Step 1 cannot end. Process 1 (pid 101 on spark)")


def test_one_that_feeds_something_else_is_noticed_before_it_does_harm(company):
    one, two = company()
    for peers in (one, two):
        in_thread(lambda p=peers: p.run(lambda: None, 10.0, "x [32, 784]"))
    until(lambda: one._finished == two._finished == 1)
    errors = []

    def waiting():
        try:
            two.run(never, 60.0, "x [32, 784]")
        except ow.PeerError as error:
            errors.append(str(error))

    thread = in_thread(waiting)
    text = fails(one, lambda: pytest.fail("it was run"), 60.0, "x [30, 784]", first="Step 2 cannot end.")
    assert "Process 1 (pid 101 on spark) feeds x [32, 784] in step 2, and this one x [30, 784]." in text
    assert "Give all processes batches of the same shape" in text
    thread.join(5)
    assert "Process 0 (pid 100 on spark) feeds x [30, 784] in step 2, and this one x [32, 784]." in errors[0]


def test_the_one_to_blame_is_named_and_not_its_victims(company):
    trio = company(3)
    trio[1].leave(ValueError("bad data"))
    trio[2].leave(ow.PeerError("Step 1 cannot end. Process 1 was ended by an error."))
    text = fails(trio[0], never)
    assert "Process 1 (pid 101 on spark) was ended before its first step by an error: ValueError" in text
    assert "Process 2" not in text


# ---------------------------------------------------------------------------- errors of the exchange


def test_an_error_of_the_exchange_waits_until_the_dead_show(company):
    one, two = company()
    until(lambda: one._heartbeat.heard[1].number)
    two.close()
    error = ValueError(GLOO)
    with pytest.raises(ow.PeerError) as raised:
        one.run(failing(error), 60.0)
    text = str(raised.value)
    assert raised.value.__cause__ is error
    assert text.startswith(
        "Step 1 failed in the exchange between the processes. Process 1 (pid 101 on spark)"
    )
    assert "before its first step: it died or was stopped" in text
    assert text.endswith(f"The error was: ValueError: {GLOO}")


def test_an_error_of_the_exchange_among_the_living(company):
    one, _ = company()
    text = fails(one, failing(RuntimeError("Gloo ReduceScatter timed out")), 60.0)
    assert "is alive and has not begun step 1" in text
    assert text.endswith("The error was: RuntimeError: Gloo ReduceScatter timed out")


def test_an_error_when_somebody_is_missing_is_blamed_on_it(company):
    one, two = company()
    two.leave()
    until(lambda: one._heartbeat.heard[1].word.status is Status.FINISHED)
    assert "came to its end" in fails(one, failing(RuntimeError("INTERNAL: something broke")))


def test_our_own_errors_are_never_blamed_on_others(company):
    one, two = company()
    two.leave()
    until(lambda: one._heartbeat.heard[1].word.status is Status.FINISHED)
    with pytest.raises(ow.ArgumentError, match="of another shape, Gloo or not"):
        one.run(failing(ow.ArgumentError("of another shape, Gloo or not")), 10.0)


def test_nothing_runs_after_a_peer_error(company):
    one, two = company()
    two.leave()
    first = fails(one, never)
    begun = time.monotonic()
    again = fails(one, lambda: pytest.fail("it was run"))
    assert again == f"This process can take no further step. {first}"
    assert time.monotonic() - begun < 0.1


def test_ctrl_c_while_it_waits(company):
    one, _ = company()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        one.run(never, None)
    assert time.monotonic() - begun < 2
    assert "Step 1 was interrupted while it waited" in fails(one, lambda: None)


# ---------------------------------------------------------------------------- datagrams


WORDS = [
    PeerWord(),
    PeerWord(2**40, 2**40 - 1, Status.RUNNING, "x [32, 784], y [32]"),
    PeerWord(3, 3, Status.FAILED, "UnicodeError: gr\u00fc\u00dfe \u65e5\u672c"),
    PeerWord(1, 0, Status.GAVE_UP, ""),
]


@pytest.mark.parametrize("word", WORDS, ids=repr)
def test_a_word_survives_its_datagram(word):
    assert unpack(pack(word, 7, 99, TOKEN), TOKEN) == (7, 99, word)


def test_a_long_text_is_cut_between_characters():
    datagram = pack(PeerWord(text="\u65e5" * 1000), 0, 1, TOKEN)
    assert len(datagram) < 1000
    assert unpack(datagram, TOKEN)[2].text == "\u65e5" * 200


def test_long_labels_that_differ_at_their_end_differ_in_a_datagram():
    labels = ["x [4]", *("\u65e5" * 999 + end for end in "ab")]
    assert len({*map(short, labels)}) == 3
    for label in map(short, labels):
        assert unpack(pack(PeerWord(text=label), 0, 1, TOKEN), TOKEN)[2].text == label


def test_whatever_is_damaged_or_forged_is_dropped():
    datagram = pack(WORDS[1], 1, 5, TOKEN)
    generator = np.random.default_rng(0)
    assert unpack(datagram, b"another token") is None
    for size in range(len(datagram)):
        assert unpack(datagram[:size], TOKEN) is None
    for place in range(len(datagram)):
        broken = bytearray(datagram)
        broken[place] ^= 1 << int(generator.integers(8))
        assert unpack(bytes(broken), TOKEN) is None
    for size in (0, 1, 16, 17, 45, 60, 1400):
        assert unpack(generator.bytes(size), TOKEN) is None


def test_a_signed_datagram_that_means_nothing_is_dropped():
    for said in (
        b"",
        b"onw2",
        bytes(heartbeat._HEAD.size),
        heartbeat._HEAD.pack(b"onw3", 1, 1, 1, 1, 0, 9, 0),
    ):
        assert unpack(said + heartbeat._code(said, TOKEN), TOKEN) is None


def test_what_is_replayed_or_comes_late_is_dropped(company):
    one, _ = company(deaf=[1])
    heard = one._heartbeat
    first, second = pack(PeerWord(1, 0), 1, 10, TOKEN), pack(PeerWord(2, 1), 1, 11, TOKEN)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for datagram in (
            second,
            first,
            second,
            b"",
            pack(PeerWord(9), 0, 99, TOKEN),
            pack(PeerWord(9), 2, 99, TOKEN),
        ):
            stranger.sendto(datagram, one.members[0].address)
        stranger.sendto(pack(PeerWord(3, 2), 1, 12, TOKEN), one.members[0].address)
    until(lambda: heard.heard[1].word.begun == 3)
    assert heard.heard[1].number == 12
    assert heard.heard[0].number == 0


def test_a_process_speaks_without_being_asked_and_not_at_every_step(company):
    one, two = company()
    until(lambda: two._heartbeat.heard[0].number >= 5)
    counts = one._heartbeat._count
    for _ in range(200):
        one.run(lambda: None, 10.0)
    assert one._heartbeat._count - counts < 100
    until(lambda: two._heartbeat.heard[0].word.finished == 200)


# ---------------------------------------------------------------------------- judgement, on paper


def view(*words, label="x", step=18, age=0.1):
    members = [Member(("10.0.0.1", 40), f"host{i}", 4240 + i) for i in range(len(words) + 1)]
    heard = [LastWord(0.0), *(LastWord(100.0 - age, 9, word) for word in words)]
    return PeerView(0, members, heard, step, label, 100.0, 2.0)


INSIDE = PeerWord(18, 17, text="x")
JUDGED = {
    "all in it": (view(INSIDE), "All 2 processes are alive and take part"),
    "further on": (view(PeerWord(19, 18)), "All 2 processes are alive and take part"),
    "behind": (view(PeerWord(17, 16)), "All 2 processes are alive and take part"),
    "absent": (view(PeerWord(17, 17)), "Process 1 (pid 4241 on host1) is alive and has not begun step 18"),
    "silent in it": (view(INSIDE, age=12.34), "was last heard of 12.3 s ago, in step 18: it died or was"),
    "silent before": (
        view(PeerWord(17, 16), age=5),
        "last heard of 5.0 s ago, after step 17: it died or was",
    ),
    "silent at first": (view(PeerWord(), step=1, age=5), "ago, before its first step: it died"),
    "silent for a few steps": (view(PeerWord(15, 14), age=5), "5.0 s ago, after step 17: it died"),
    "without a label": (view(PeerWord(18, 17)), "feeds nothing that has a name in step 18, and this one x."),
    "another Program": (
        view(PeerWord(18, 17, text="Program aa, x [4]"), label="Program bb, x [4]"),
        "feeds Program aa, x [4] in step 18, and this one Program bb, x [4]: these are different Programs",
    ),
    "another shape for the same Program": (
        view(PeerWord(18, 17, text="Program aa, x [4]"), label="Program aa, x [8]"),
        "feeds Program aa, x [4] in step 18, and this one Program aa, x [8]. ",
    ),
    "a call and a step": (
        view(PeerWord(18, 17, text="Program aa, x [4]"), label=calling("the test of loss")),
        "feeds Program aa, x [4] in step 18, and this one is in the test of loss. All processes do that toge",
    ),
    "a step and a call": (
        view(PeerWord(18, 17, text=calling("the test of loss")), label="Program aa, x [4]"),
        "is in the test of loss, and this one feeds Program aa, x [4]. All processes do that together",
    ),
    "not in the call": (
        view(PeerWord(17, 17, text="x [4]"), label=calling("the test of loss")),
        "is alive and has not begun the test of loss, which this one waits in: it does something else. All",
    ),
    "the gravest first": (
        view(PeerWord(17, 17), INSIDE, PeerWord(17, 17, Status.FAILED, "OSError: no")),
        "Process 3 (pid 4243 on host3) was ended after step 17 by an error: OSError: no. Process 1 (pid",
    ),
    "silent later": (view(PeerWord(18, 18), age=5), "last heard of 5.0 s ago, after step 18: it died or was"),
    "ended later": (
        view(PeerWord(18, 18, Status.FINISHED), age=5),
        "All 2 processes are alive and take part",
    ),
    "many": (
        view(*[PeerWord(17, 17)] * 9),
        "Process 5 (pid 4245 on host5) is alive and has not begun step 18",
    ),
}


@pytest.mark.parametrize(("found", "words"), JUDGED.values(), ids=JUDGED)
def test_judgement(found, words):
    assert words in verdict(found)


def test_of_many_only_some_are_named():
    text = verdict(view(*[PeerWord(17, 17)] * 9))
    assert "And 4 more." in text
    assert "Process 6" not in text


def test_whoever_woke_up_listens_before_judging():
    found = view(INSIDE, age=60)
    assert found.is_silent(1)
    assert not found.is_settled(since=99.9)
    assert replace(found, now=101.0).is_settled(since=99.9)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\nb"), "ValueError: a"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (KeyError(1), "KeyError: 1"),
    ],
)
def test_an_error_in_one_line(error, line):
    assert summary(error) == line


def test_others_reach_this_host_at_an_address():
    ip_address(_own_address())
