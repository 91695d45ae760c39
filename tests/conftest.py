"""What every test run needs, whichever part of the suite it selects."""

import ctypes
import importlib.util
import signal
import sys

from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair, and no test asserts a wall time.
settings.register_profile(
    "toolgap", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("toolgap")

# They need the agent libraries, which SGLang's environment cannot hold: `make test-hooks` runs them in theirs.
collect_ignore = ["hooks"] if importlib.util.find_spec("agents") is None else []


def pytest_configure() -> None:
    """End on SIGTERM as on Ctrl-C: the fixtures end the servers that they have started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """Keep what sentencepiece, which SGLang loads, cannot survive losing.

    SWIG's table of types is freed as the interpreter ends, and its destructor makes an object of a
    type that may be gone by then: after all tests have passed, the run ends with a segmentation fault.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("swig_runtime_data"):
            for table in vars(module).values():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(table))
