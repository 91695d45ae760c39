"""Environment and arguments that run stock SGLang with HiCache on a CPU without AMX.

Both functions only fill in what is missing: a flag or a variable that the user has set stays as it
is, except the two that *are* CPU mode (``TOOLGAP_CPU`` and the stand-in on ``PYTHONPATH``).

How small the tiers can be. ``--max-total-tokens`` is L1, and ``--hicache-ratio`` times that is L2
(``--hicache-size`` counts whole gigabytes). L1 must hold the longest request, prompt and output. L2
must hold L1 *and* the prefix to restore: SGLang writes through, and evicts from L2 only what L1 no
longer holds, so that with a ratio of 1 a restore finds room for little and lands in part. The
default ratio of 2 therefore goes with an L1 just above the longest prefix. For 4,200 tokens,
``--max-total-tokens 4608`` is enough: L2 then holds 9,216, and some 6,000 tokens of other prompts
push the prefix out of both (L2 less the prefix, and a little). Many short prompts do that fastest,
because attention costs a long prompt its length squared; ``POST /flush_cache`` does it at once.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from toolgap.cpu.plugin import ACTIVE_VARIABLE

STAND_IN = Path(__file__).parent / "stand_in"
"""The folder that makes ``import sgl_kernel`` find the stand-in."""

PLUGIN_NAME = "toolgap_cpu"
"""This package's entry point in the group ``sglang.srt.plugins``."""


class Default(NamedTuple):
    """A flag that a CPU run needs, and why."""

    flag: str
    value: str | None
    """None for a switch."""
    why: str
    yields_to: tuple[str, ...] = ()
    """Other flags that decide the same thing; if the user has one of them, this is left out."""


# ``--disable-radix-cache`` rules out HiCache, so everything about HiCache yields to it.
_NO_CACHE = ("--disable-radix-cache",)

DEFAULTS = (
    Default("--device", "cpu", "Detection would look for an accelerator first."),
    Default("--attention-backend", "torch_native", "The default on x86, intel_amx, needs AMX."),
    Default("--sampling-backend", "pytorch", "The others are GPU kernels."),
    Default(
        "--dtype",
        "float32",
        "Without AMX or AVX512-BF16, bfloat16 takes three times as long and float16 five; "
        "'auto' picks float16 for a float32 model.",
    ),
    Default("--disable-overlap-schedule", None, "Overlap needs device streams."),
    Default(
        "--cuda-graph-backend-decode",
        "disabled",
        "There is nothing to capture.",
        ("--disable-cuda-graph", "--cuda-graph-config"),
    ),
    Default(
        "--cuda-graph-backend-prefill",
        "disabled",
        "There is nothing to capture.",
        ("--disable-cuda-graph", "--cuda-graph-config"),
    ),
    Default(
        "--page-size",
        "16",
        "L3 reads and prefix matches go by whole pages; 16 loses few tokens and keeps files few.",
    ),
    Default(
        "--max-total-tokens",
        "16384",
        "Sized from memory, L1 would take most of RAM, and filling it dominates the start.",
    ),
    Default(
        "--max-running-requests",
        "16",
        "The default reserves rows for thousands of requests, each as long as the context.",
    ),
    Default("--enable-hierarchical-cache", None, "HiCache is what this mode is for.", _NO_CACHE),
    Default(
        "--hicache-ratio",
        "2",
        "SGLang's own default, said here because its automatic sizing keeps 10 GiB of RAM free.",
        (*_NO_CACHE, "--hicache-size"),
    ),
    Default(
        "--hicache-mem-layout",
        "layer_first",
        "Host and device rows then have one shape, which copies fastest; page_first works too.",
        _NO_CACHE,
    ),
    Default(
        "--hicache-io-backend",
        "kernel",
        "The one whose calls the plugin replaces by torch copies.",
        _NO_CACHE,
    ),
    Default(
        "--hicache-storage-backend",
        "file",
        "An L3 that needs no service.",
        _NO_CACHE,
    ),
    Default(
        "--sleep-on-idle",
        None,
        "An idle scheduler otherwise keeps a core busy that the next request or read needs.",
    ),
)


def cpu_arguments(args: Sequence[str]) -> list[str]:
    """SGLang's arguments for a CPU run: the defaults that ``args`` leaves open, then ``args``.

    ``--flag value``, ``--flag=value`` and the keys of a ``--config`` file all count as given. The
    user's arguments come last, so that even an abbreviated flag wins over a default.
    """
    given = _given_flags(args)
    added: list[str] = []
    for default in DEFAULTS:
        if given.isdisjoint((default.flag, *default.yields_to)):
            added.append(default.flag)
            if default.value is not None:
                added.append(default.value)
    return [*added, *args]


def cpu_environment(environ: Mapping[str, str], args: Sequence[str] = ()) -> dict[str, str]:
    """The environment of a CPU server: ``environ`` and what it lacks. ``environ`` is not changed.

    ``args`` are the server's arguments as far as they are known: a model folder on this machine
    turns model-hub look-ups off, and several ranks get a share of the cores each.
    """
    result = dict(environ)
    result[ACTIVE_VARIABLE] = "1"
    result["PYTHONPATH"] = _path_with_stand_in(environ.get("PYTHONPATH", ""))
    # Selects SGLang's CPU platform; --device cpu alone leaves methods of it unimplemented.
    result.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # Otherwise the scheduler imports every model that SGLang has. Other architectures than this
    # package's still work: SGLang then loads the rest.
    result.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "toolgap.cpu.models")
    if allowed := environ.get("SGLANG_PLUGINS", ""):
        names = [name.strip() for name in allowed.split(",") if name.strip()]
        if PLUGIN_NAME not in names:
            result["SGLANG_PLUGINS"] = ",".join([*names, PLUGIN_NAME])
    model = _value(args, ("--model-path", "--model"))
    if model is not None and Path(model).is_dir():
        result.setdefault("HF_HUB_OFFLINE", "1")
    ranks = 1
    for names_of_size in (
        ("--tp-size", "--tensor-parallel-size", "--tp"),
        ("--pp-size", "--pipeline-parallel-size", "--pp"),
        ("--dp-size", "--data-parallel-size", "--dp"),
    ):
        text = _value(args, names_of_size) or "1"
        ranks *= int(text) if text.isdecimal() else 1
    if ranks > 1:
        # Stock binds one rank to each NUMA node and refuses more ranks than nodes.
        result.setdefault(
            "SGLANG_CPU_OMP_THREADS_BIND", thread_binding(ranks, sorted(os.sched_getaffinity(0)))
        )
    return result


def thread_binding(ranks: int, cores: Sequence[int]) -> str:
    """Cores of each rank in the form SGLang reads, such as ``0,1|2,3``; shared if they are few.

    ``ranks`` and the number of ``cores`` must be at least 1.
    """
    per_rank = max(len(cores) // ranks, 1)
    groups = ([cores[(rank * per_rank + i) % len(cores)] for i in range(per_rank)] for rank in range(ranks))
    return "|".join(",".join(map(str, group)) for group in groups)


def _path_with_stand_in(path: str) -> str:
    rest = [part for part in path.split(os.pathsep) if part and part != str(STAND_IN)]
    return os.pathsep.join([str(STAND_IN), *rest])


def _given_flags(args: Iterable[str]) -> set[str]:
    args = list(args)
    flags = {arg.partition("=")[0] for arg in args if arg.startswith("--")}
    config = _value(args, ("--config",))
    if config is not None and Path(config).is_file():
        # SGLang lets the command line win over the file, so a default must not get there first.
        text = Path(config).read_text(encoding="utf-8")
        flags |= {"--" + key.replace("_", "-") for key in re.findall(r"(?m)^([\w-]+)\s*:", text)}
    return flags


def _value(args: Sequence[str], names: Sequence[str]) -> str | None:
    """The last value given for a flag under any of its names."""
    value = None
    for index, arg in enumerate(args):
        name, equals, text = arg.partition("=")
        if name in names:
            if equals:
                value = text
            elif index + 1 < len(args):
                value = args[index + 1]
    return value
