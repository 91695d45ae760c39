"""The commands ``toolgap bench ...``: they read options, and know no more than the modules they call."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.console import Console

from toolgap.bench.arms import ARMS, Arm
from toolgap.bench.errors import BenchError
from toolgap.bench.plan import Plan
from toolgap.terminal import API_KEY_VARIABLE, Exit, Json, fail, guarded, print_json, say

app = typer.Typer(
    name="bench",
    help="Measure restores on a real engine, and verify what was measured.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

GAPS_MS = (0.0, 100.0, 500.0, 1000.0, 3000.0)
PAGE_TOKENS = 16

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A run's folder, such as evidence/RUN.", show_default=False)
]


Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="The run's folder; a run that was stopped goes on.",
        show_default="evidence/RECIPE",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Path or hub name; on a CPU a small one is there.", show_default=False),
]
ModelName = Annotated[str | None, typer.Option(help="The model's name in the report.", show_default=False)]
Cpu = Annotated[
    bool | None,
    typer.Option("--cpu/--gpu", help="Where to run; a GPU is taken if there is one.", show_default=False),
]
Url = Annotated[
    str | None,
    typer.Option(
        help="A running server with Toolgap and --enable-metrics, whose caches are flushed.",
        show_default=False,
    ),
]
ApiKey = Annotated[
    str | None, typer.Option(envvar=API_KEY_VARIABLE, help="Its admin API key.", show_default=False)
]
StorageDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Its file backend's folder, if it is on this machine.", show_default=False
    ),
]
PageTokens = Annotated[int, typer.Option(min=1, help="SGLang's --page-size.")]
Deadline = Annotated[
    float | None,
    typer.Option("--deadline", metavar="SECONDS", help="Begin no trial after this.", show_default=False),
]
Options = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="An option of the recipe.", show_default=False),
]
Difference = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="What differs from a stock installation.", show_default=False),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- SGLANG-ARGUMENTS", help="For the server that is started.", show_default=False),
]


class PageCacheState(StrEnum):
    """What the operating system's page cache holds of L3 when a trial begins."""

    WARM = "warm"
    COLD = "cold"
    UNKNOWN = "unknown"


@contextmanager
def _sentences(stopped: str = "the same command goes on") -> Iterator[None]:
    """Turn what a run cannot go on from into a sentence and an exit status.

    Args:
        stopped: What to do after a signal stopped it.
    """
    import httpx

    from toolgap.bench.pagecache import PageCacheError
    from toolgap.childserver import ServerError
    from toolgap.engineclient import EngineError
    from toolgap.signals import Stopped

    try:
        yield
    except Stopped as stop:
        with suppress(typer.Exit):
            fail(Exit.INTERRUPTED, f"stopped by {stop}: what was measured is kept, and {stopped}")
        raise typer.Exit(128 + stop.number) from None
    except (BenchError, ServerError, EngineError, PageCacheError) as error:
        fail(Exit.FAILED, str(error))
    except httpx.HTTPError as error:
        fail(Exit.UNREACHABLE, f"the server does not answer any more: {error or type(error).__name__}")


@app.command()
@guarded
def run(
    recipe: Annotated[
        str, typer.Option(help="What to find out; `toolgap bench recipes` lists them.")
    ] = "matrix",
    output: Output = None,
    model: Model = None,
    model_name: ModelName = None,
    cpu: Cpu = None,
    url: Url = None,
    api_key: ApiKey = None,
    storage_dir: StorageDir = None,
    prompt_tokens: Annotated[
        list[int] | None, typer.Option(min=512, help="Prompt sizes.", show_default="4096")
    ] = None,
    gap_ms: Annotated[
        list[float] | None, typer.Option(min=0, help="Gaps.", show_default="0 100 500 1000 3000")
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help=f"Arms: {', '.join(ARMS)}.", show_default="all")
    ] = None,
    only_gap_ms: Annotated[
        list[str] | None,
        typer.Option(metavar="ARM=MS", help="Measure this arm at these gaps only.", show_default=False),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Trials of each cell.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the prompts and the order of the trials.")] = 1,
    page_tokens: PageTokens = PAGE_TOKENS,
    page_cache: Annotated[
        PageCacheState, typer.Option(help="The operating system's page cache of L3 when a trial begins.")
    ] = PageCacheState.WARM,
    deadline_s: Deadline = None,
    option: Options = None,
    difference: Difference = None,
    arguments: Arguments = None,
    as_json: Json = False,
) -> None:
    """Play a recipe's trials in a seeded random order, and write evidence."""
    from toolgap.bench.recipes import RECIPES

    chosen = RECIPES.get(recipe)
    if chosen is None:
        raise typer.BadParameter(f"{recipe!r} is no recipe: {', '.join(RECIPES)}")
    values: dict[str, Any] = {
        "gaps_ms": GAPS_MS,
        "arms": tuple(Arm),
        "prompt_tokens": (4096,),
    } | chosen.defaults
    if prompt_tokens:
        values["prompt_tokens"] = tuple(prompt_tokens)
    if gap_ms:
        values["gaps_ms"] = tuple(gap_ms)
    if arm:
        values["arms"] = tuple(_arm(name) for name in arm)
    options = dict(values.pop("options", {}))
    options |= {name: _value(text) for name, text in map(_pair, option or [])}
    if only_gap_ms:
        options["only_gaps_ms"] = _only_gaps(only_gap_ms)
    plan = Plan(
        recipe=recipe,
        seed=seed,
        rounds=trials,
        page_tokens=page_tokens,
        page_cache=page_cache.value,
        options=options,
        prompt_tokens=values["prompt_tokens"],
        gaps_ms=values["gaps_ms"],
        arms=tuple(map(str, values["arms"])),
    )
    needed = chosen.server_arguments if url is None else ()
    server = _Server(model, model_name, cpu, url, api_key, storage_dir, (*needed, *(arguments or ())))
    _measure(plan, server, output, difference or [], deadline_s, as_json=as_json)


class _Server(NamedTuple):
    """Where to measure, from the options of a command."""

    model: str | None
    model_name: str | None
    cpu: bool | None
    url: str | None
    api_key: str | None
    storage_dir: Path | None
    arguments: tuple[str, ...]


def _measure(
    plan: Plan,
    server: _Server,
    output: Path | None,
    differences: list[str],
    deadline_s: float | None,
    *,
    as_json: bool,
) -> None:
    """Play a plan, and print its report or the names of what was written."""
    from toolgap.bench import main
    from toolgap.bench.recipes import RECIPES
    from toolgap.bench.server import Setup

    output = output or Path("evidence") / plan.recipe
    with _sentences():
        target: main.Target
        if server.url is not None:
            if server.model is not None or server.cpu is not None or server.arguments:
                raise typer.BadParameter(
                    "a running server has its model, device and arguments: leave those out"
                )
            if server.storage_dir is None:
                plan = msgspec.structs.replace(plan, page_cache=PageCacheState.UNKNOWN.value)
            target = main.Target(None, server.url, server.api_key, server.storage_dir)
            label = server.model_name or "the server's model"
        else:
            on_cpu, path = _where(server.model, cpu=server.cpu)
            label = server.model_name or _label(path)
            output.parent.mkdir(parents=True, exist_ok=True)
            log = output.parent / f".{output.name}.server.log"
            target = main.Target(Setup(path, on_cpu, plan, server.arguments, log=log))
        # With --json stdout is for the written files' names, and progress is told on stderr.
        console = Console(file=sys.stderr if as_json else None, highlight=False, soft_wrap=True)
        written = main.run(
            RECIPES[plan.recipe], plan, target, output, label, differences, deadline_s, console
        )
    from toolgap.bench import charts
    from toolgap.bench.evidence import REPORT

    if as_json:
        print_json([str(file) for file in written])
        return
    say((output / REPORT).read_text(encoding="utf-8"))
    say(f"written: {', '.join(str(file) for file in written)}")
    if not charts.available():
        say("no charts: they need matplotlib (pip install 'toolgap[bench]', then toolgap bench report)")


@app.command()
@guarded
def replay(
    recording: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Written by `toolgap gateway --record`.", show_default=False),
    ],
    output: Output = None,
    speed: Annotated[float, typer.Option(help="Divides gaps and the time between sessions.")] = 1.0,
    lead_s: Annotated[
        float | None,
        typer.Option(
            "--lead",
            metavar="SECONDS",
            help="Submit so long before the tool returns, not when the tool call leaves.",
            show_default=False,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=512, help="A session ends before a longer prompt.")
    ] = 8192,
    output_tokens: Annotated[int, typer.Option(min=1, help="Longer answers are cut.")] = 32,
    tokens_scale: Annotated[
        float, typer.Option(help="Multiplies the sizes of what was recorded without content.")
    ] = 1.0,
    sessions: Annotated[int, typer.Option(min=1, help="Of a recording with more the first are played.")] = 64,
    trials: Annotated[int, typer.Option(min=1, help="Of each arm.")] = 3,
    seed: Annotated[int, typer.Option(help="Of made-up prompts and the order of the arms.")] = 1,
    model: Model = None,
    model_name: ModelName = None,
    cpu: Cpu = None,
    url: Url = None,
    api_key: ApiKey = None,
    storage_dir: StorageDir = None,
    page_tokens: PageTokens = PAGE_TOKENS,
    deadline_s: Deadline = None,
    option: Options = None,
    difference: Difference = None,
    arguments: Arguments = None,
    as_json: Json = False,
) -> None:
    """Play what a gateway has recorded, with restores ahead and without, and write evidence."""
    from toolgap.bench.recipes.replay import Replay

    options: dict[str, Any] = {name: _value(text) for name, text in map(_pair, option or [])}
    options |= {
        "recording": str(recording),
        "speed": speed,
        "tokens_scale": tokens_scale,
        "most_output_tokens": output_tokens,
        "most_sessions": sessions,
    }
    if lead_s is not None:
        options["lead_s"] = lead_s
    plan = Plan(
        recipe=Replay.name,
        seed=seed,
        rounds=trials,
        page_tokens=page_tokens,
        page_cache=PageCacheState.WARM.value,
        options=options,
        prompt_tokens=(prompt_tokens,),
        gaps_ms=Replay.defaults["gaps_ms"],
        arms=Replay.defaults["arms"],
    )
    server = _Server(model, model_name, cpu, url, api_key, storage_dir, tuple(arguments or ()))
    _measure(plan, server, output, difference or [], deadline_s, as_json=as_json)


def _arm(name: str) -> str:
    if name not in ARMS:
        raise typer.BadParameter(f"{name!r} is no arm: {', '.join(ARMS)}")
    return name


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _only_gaps(pairs: list[str]) -> dict[str, list[float]]:
    only: dict[str, list[float]] = {}
    for name, text in map(_pair, pairs):
        value = _value(text)
        if not isinstance(value, float):
            raise typer.BadParameter(f"{text!r} is no gap in milliseconds")
        only.setdefault(_arm(name), []).append(value)
    return only


def _where(model: str | None, *, cpu: bool | None) -> tuple[bool, str]:
    """Whether to run on the CPU, and with which model."""
    from toolgap.cpu.model import ModelSetupError, ensure_smollm2
    from toolgap.hardware import find_gpu

    gpu = None if cpu else find_gpu()
    if cpu is False and gpu is None:
        raise BenchError("a GPU is asked for, and SGLang can use none here")
    if model is None and gpu is not None:
        raise BenchError("on a GPU, say which model: --model PATH")
    if model is None:
        try:
            model = str(ensure_smollm2(report=say))
        except ModelSetupError as error:
            raise BenchError(str(error)) from error
    return gpu is None, model


def _label(model: str) -> str:
    return Path(model).name.removesuffix("-f32-1")


@app.command()
@guarded
def recipes(as_json: Json = False) -> None:
    """List the recipes."""
    from toolgap.bench.recipes import RECIPES

    if as_json:
        print_json({name: recipe.says for name, recipe in RECIPES.items()})
        return
    for name, recipe in RECIPES.items():
        say(f"{name:16} {recipe.says}")


@app.command()
@guarded
def report(folder: Folder, as_json: Json = False) -> None:
    """Write a run's report and charts again, from its manifest and trials."""
    from toolgap.bench import gateway_evidence
    from toolgap.bench import report as reports

    with _sentences():
        if gateway_evidence.is_one(folder):
            written = [str(gateway_evidence.make(folder))]
        else:
            written = [str(path) for path in reports.make(folder)]
    if as_json:
        print_json(written)
        return
    for name in written:
        say(name)


@app.command()
@guarded
def verify(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", show_default=False)],
    as_json: Json = False,
) -> None:
    """Recompute every figure and validity rule of runs from their trials; fails on any difference."""
    from toolgap.bench.verify import problems

    found = {str(folder): list(problems(folder)) for folder in folders}
    if as_json:
        print_json(found)
    else:
        for name, differences in found.items():
            say(f"{name}: {'NOT verified' if differences else 'verified'}")
            for problem in differences:
                say(f"  {problem}")
    failed = sum(map(bool, found.values()))
    if failed:
        fail(Exit.FAILED, f"{failed} of {len(folders)} runs do not agree with their trials")


@app.command()
@guarded
def figures(folder: Folder, as_json: Json = True) -> None:
    """Print the medians of a run, which are always JSON, one object a cell."""
    from toolgap.bench import report as reports

    with _sentences():
        found = reports.figures(folder)
    print_json(found)


@app.command()
@guarded
def gateway(
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A server that runs already, without /v1, in place of the bench's own, which is no engine.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=API_KEY_VARIABLE, help="Its API key.", show_default=False)
    ] = None,
    model: Annotated[str, typer.Option(help="Its model's name.")] = "default",
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 200,
    requests: Annotated[int, typer.Option(min=1, help="Answers that each stream asks for.")] = 2,
    events: Annotated[int, typer.Option(min=4, help="Events of each answer.")] = 200,
    events_per_s: Annotated[float, typer.Option(min=0.1, help="Of each stream, in the mean.")] = 25.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often every arm is measured.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the streams and the order of the arms.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Keep the trials there.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure what a gateway adds to the time of streams, and count those that are equal to the direct ones.

    Every round plays the same streams directly, through a gateway that restores nothing, and through one as it is by
    default, which reads every answer. Fails if an answer is not whole, or not equal.
    """
    from contextlib import closing
    from tempfile import TemporaryDirectory

    from toolgap.bench import gateway as bench
    from toolgap.bench import gateway_evidence, gateway_figures
    from toolgap.signals import StopSignals

    if upstream is not None and not upstream.startswith("http://"):
        raise typer.BadParameter(f"{upstream!r} is no URL like http://127.0.0.1:30000; https is not measured")
    plan = bench.Plan(
        streams=streams,
        requests=requests,
        events=events,
        events_per_s=events_per_s,
        rounds=rounds,
        seed=seed,
        upstream="bench" if upstream is None else "real",
    )
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    trials: list[bench.Trial] = []
    with (
        _sentences("nothing goes on from it"),
        StopSignals(),
        TemporaryDirectory(prefix="toolgap-bench-") as logs,
    ):
        recording = None if output is None else gateway_evidence.Recording(output, plan)
        with closing(
            bench.run(plan, logs=Path(logs), url=upstream, key=api_key, model=model, say=console.print)
        ) as played:
            for round_trials in played:
                trials += round_trials
                if recording is not None:
                    recording.append(round_trials)
    found = gateway_figures.figures(plan, trials)
    if as_json:
        print_json(found)
    else:
        say(gateway_figures.text(found))
    asked = sum(trial.asked for trial in trials)
    equal = sum(trial.equal for trial in trials)
    if equal < asked:
        fail(Exit.FAILED, f"{asked - equal} of {asked} streams broke or differ from the direct ones")
