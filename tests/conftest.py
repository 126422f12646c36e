"""What every test finds: eight devices on the host, a cache of compiled programs, signals as in a terminal.

It is read before JAX is imported, in each worker too.
"""

import gc
import os
import shutil
import signal
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.cases import Cases
from tests.quick import Quick

DEVICES = "--xla_force_host_platform_device_count"

if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()

# jaxlib 0.10 still has the emitters of kernels that came before MLIR's, and compiles with them in half of the
# time. Later ones have only MLIR's, which the run on a newer Python is compiled with.
EMITTERS = "--xla_cpu_use_fusion_emitters"
if version("jaxlib").startswith("0.10.") and EMITTERS not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += f" {EMITTERS}=false --xla_cpu_parallel_codegen_split_count=1"

# What a worker has compiled is read by the processes that its tests start. The folder is made by the process
# that starts the workers and goes with it, so that every run begins with nothing. Each worker has its own:
# JAX writes without a lock, and what one reads while another one writes it is a warning, an error here.
FOLDER = "ONWARD_TESTS_COMPILED"
MADE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    MADE = os.environ[FOLDER] = tempfile.mkdtemp(prefix="onward-compiled-")
if FOLDER in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
        Path(os.environ[FOLDER]) / os.environ.get("PYTEST_XDIST_WORKER", "alone")
    )
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Most of the time goes into compiling what runs for a moment: XLA leaves out most of its optimizations, here
# and in the processes that tests start. What users run, and what has pooling in it, takes ``optimized``.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# The threads of NumPy's OpenBLAS run in circles while they wait, 0.06 seconds in each process that starts.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Where bytecode is forbidden each process that a test starts compiles the house, in a quarter of its time.
# The faults that are planted come with a cache of their own, and want their files read anew.
if MADE is not None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Imported whole before its files are collected: pytest would make a package whose folder comes first a second
# time, without its modules. A name is loaded when it is first asked for, so each of them is.
import onward  # noqa: E402

for name in onward.__all__:
    getattr(onward, name)

# A shell that starts the tests in the background has SIGINT ignored, nohup SIGHUP; tests are about these two.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_addoption(parser):
    parser.addoption("--list-not-quick", action="store_true", help="measure which tests are not quick")
    parser.addoption("--all-cases", action="store_true", help="also the cases that take no way of their own")


def pytest_configure(config):
    config.pluginmanager.register(Quick(config), "quick")
    config.pluginmanager.register(Cases(config), "cases")


def pytest_unconfigure():
    if MADE is not None:
        shutil.rmtree(MADE, ignore_errors=True)


# They take a third of the time. The rest are files of seconds, with which the workers end at the same time.
# The first one looks through all objects there are, of which later there are ten times as many.
LONGEST = (
    "tests/define/test_purity.py",
    "tests/test_notebooks.py",
    "tests/test_docs.py",
    "tests/test_benchmarks.py",
    "tests/test_cookbook.py",
    "tests/shell/test_launch.py",
    "tests/derive/test_gradient_table.py",
    "tests/test_foreign_models.py",
    "tests/test_house.py",
    "tests/fleet/test_faults.py",
    "tests/fleet/test_engine.py",
    "tests/test_typing.py",
    "tests/develop/test_accumulate.py",
    "tests/test_parameter_server_benchmark.py",
)


def pytest_collection_modifyitems(items):
    """The longest files go to the workers first, so that no other waits for one in the end."""
    place = {file: i for i, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """All that is imported and rewritten stays, so nothing is looked through before it is there."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    """What is there before the first test is not looked through in every collection of garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 5, 5)  # the youngest of what tests leave is looked through rarely


@pytest.fixture
def signals_of_a_new_process():
    """Ctrl-C and SIGTERM as Python has them: a step that ran before leaves its own handler."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def optimized():
    """What the module and the processes it starts compile is compiled as users compile it.

    Every module with pooling has to take it, which ``test_house`` looks after: without its optimizations XLA
    of JAX 0.10.2 once computed -0.238 as the gradient of relu and max pooling where finite differences say
    -0.415.
    """
    from tests import compiled  # noqa: PLC0415  it imports JAX, which reads what is set above

    with compiled.optimized():
        yield


@pytest.fixture(scope="module")
def earlier_objects_frozen():
    """What tests before left behind is not looked through again: benchmarks collect garbage in each round."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def nothing_frozen():
    """Who looks for what refers to an array finds nothing among frozen objects."""
    gc.unfreeze()
    yield
    gc.freeze()
