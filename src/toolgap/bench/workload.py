"""Sessions of an agent: how long its tool calls take and how its prompt grows, real or generated.

The only I/O is reading the trace in :func:`load`; :func:`generate` needs no file.
"""

import csv
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, islice
from operator import mul
from pathlib import Path
from statistics import NormalDist
from typing import Literal, NamedTuple

from toolgap.bench.spread import percentile

PERCENTS = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 99.99, 100)
"""Where the tables of a :class:`Fit` stand."""


class Turn(NamedTuple):
    """One tool call: the engine answers with it, the tool runs, and the continuation brings its result.

    The continuation's prompt is the previous one, ``output_tokens``, and ``append_tokens``.
    """

    gap_s: float
    append_tokens: int
    """What the continuation adds behind the answer: the tool's result and the like."""
    output_tokens: int
    """The answer that ends in the tool call, as far as the continuation's prompt keeps it."""


class Session(NamedTuple):
    """Requests of which each extends the one before."""

    first_prompt_tokens: int
    turns: tuple[Turn, ...]


def prompt_tokens(session: Session) -> list[int]:
    """The prompt of every request: the first, then the continuation of each turn."""
    growth = (turn.output_tokens + turn.append_tokens for turn in session.turns)
    return list(accumulate(growth, initial=session.first_prompt_tokens))


class _Row(NamedTuple):
    """What is used of a row of the trace; ``gap_s`` is None where the recorder could not tell."""

    trace: str
    gap_s: float | None
    turn: int
    previous_tokens: int
    output_tokens: int
    prompt_tokens: int
    extends: int

    def tool_turn(self) -> Turn | None:
        """None if the row cannot be one turn of a session."""
        growth_tokens = self.prompt_tokens - self.previous_tokens
        if self.extends != 1 or self.gap_s is None or growth_tokens < 2:
            return None
        # The trace's append_tok counts the previous answer too. Where the prompt grew by less than that
        # answer, the agent dropped part of it (presumably reasoning); the growth is what is exact, so it is kept.
        output_tokens = max(1, min(self.output_tokens, growth_tokens - 1))
        # A few streamed rows are negative: times were recorded in whole seconds.
        return Turn(max(self.gap_s, 0.0), growth_tokens - output_tokens, output_tokens)


def load(path: Path, gap: Literal["raw", "corrected"]) -> list[Session]:
    """Sessions of a recorded trace: the longest runs of turns of which each extends the one before.

    A request whose prompt does not extend the previous one (the agent compacted or edited its context) ends
    a session, and its own prompt starts the next: what was stored before is of no use to it, so it is no
    continuation. So does a request that is not in the file, since neither its gap nor its growth is known,
    and a row without the gap asked for. Prompts of the sessions are exactly those of the trace.

    Args:
        path: A CSV file with the columns of ``agent_tool_turns.csv``.
        gap: ``raw``, from the previous answer to the request, may hide one model call; ``corrected`` has the
            request's own model time taken off. The tool's time lies between the two.

    Raises:
        ValueError: the file is malformed; the text names file, line and column.
    """
    found: list[tuple[int, list[Turn]]] = []
    continuing: tuple[str, int, int] | None = None
    for row in sorted(_rows(path, f"gap_{gap}_s"), key=lambda row: (row.trace, row.turn)):
        turn = row.tool_turn()
        if turn is None:
            continue
        if (row.trace, row.turn, row.previous_tokens) != continuing:
            found.append((row.previous_tokens, []))
        found[-1][1].append(turn)
        continuing = (row.trace, row.turn + 1, row.prompt_tokens)
    return [Session(first_prompt_tokens, tuple(turns)) for first_prompt_tokens, turns in found]


def _rows(path: Path, gap_column: str) -> Iterator[_Row]:
    columns = ("trace", "turn", "prev_in", "prev_out", "in", "prev_is_block_prefix", gap_column)
    # Bytes that are no text are then reported as the number that they are not, with their place.
    with path.open(encoding="utf-8", errors="backslashreplace", newline="") as file:
        reader = csv.DictReader(file)
        try:
            names = reader.fieldnames or ()
            for column in columns:
                if column not in names:
                    raise ValueError(f"{path}, line 1: there is no column {column!r}")
            for cells in reader:
                where = f"{path}, line {reader.line_num}"
                for column in columns:
                    if cells[column] is None:
                        raise ValueError(f"{where}, column {column!r}: the row ends before it")
                if None in cells:
                    raise ValueError(f"{where}: there are cells after the last column, {names[-1]!r}")
                gap_s = _seconds(cells[gap_column], f"{where}, column {gap_column!r}")
                counts = (_count(cells[column], f"{where}, column {column!r}") for column in columns[1:-1])
                yield _Row(cells["trace"], gap_s, *counts)
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.reader.line_num}: {error}") from None


def _count(text: str, where: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = -1
    if count < 0:
        raise ValueError(f"{where}: {text!r} is not a whole number of 0 or more")
    return count


def _seconds(text: str, where: str) -> float | None:
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError(f"{where}: {text!r} is not a number of seconds")
    return seconds


class Fit(NamedTuple):
    """Distribution of sessions: values at :data:`PERCENTS`, and what is correlated.

    Values between two entries are interpolated linearly in log(1 + value), which also spans a gap of 0.
    Correlations are of normal scores: of the normal quantiles of the values' ranks.
    """

    gap_s: tuple[float, ...]
    append_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    first_prompt_tokens: tuple[int, ...]
    """Of the session that a turn belongs to: a session counts once for each of its turns."""
    gap_likeness: float
    """Correlation of the gaps of two turns of one session, however far apart."""
    append_likeness: float
    output_likeness: float
    gap_append_correlation: float
    """Of the gap and the appended tokens of one turn."""


def fit(sessions: Sequence[Session]) -> Fit:
    """The distribution that sessions come from; correlations are rounded to three decimals.

    Raises:
        ValueError: the sessions have no turns.
    """
    turns = [turn for session in sessions for turn in session.turns]
    if not turns:
        raise ValueError("the sessions have no turns")
    gaps_s = [turn.gap_s for turn in turns]
    appends = [turn.append_tokens for turn in turns]
    outputs = [turn.output_tokens for turn in turns]
    counts = [len(session.turns) for session in sessions]
    gap_scores, append_scores = _normal_scores(gaps_s), _normal_scores(appends)
    return Fit(
        gap_s=_table(gaps_s),
        append_tokens=_whole_table(appends),
        output_tokens=_whole_table(outputs),
        first_prompt_tokens=_whole_table(
            [session.first_prompt_tokens for session in sessions for _ in session.turns]
        ),
        gap_likeness=_likeness(gap_scores, counts),
        append_likeness=_likeness(append_scores, counts),
        output_likeness=_likeness(_normal_scores(outputs), counts),
        gap_append_correlation=_correlation(gap_scores, append_scores),
    )


def _table(values: Sequence[float]) -> tuple[float, ...]:
    ordered = sorted(values)
    return tuple(percentile(ordered, percent) for percent in PERCENTS)


def _whole_table(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in _table(values))


def _normal_scores(values: Sequence[float]) -> list[float]:
    """Of mean 0. Equal values share the score of their middle rank."""
    ordered = sorted(range(len(values)), key=values.__getitem__)
    scores = [0.0] * len(values)
    for _, ties in groupby(enumerate(ordered), key=lambda ranked: values[ranked[1]]):
        tied = list(ties)
        score = NormalDist().inv_cdf((tied[0][0] + tied[-1][0] + 1) / 2 / len(values))
        for _, index in tied:
            scores[index] = score
    mean = math.fsum(scores) / len(scores)
    return [score - mean for score in scores]


def _correlation(left: Sequence[float], right: Sequence[float]) -> float:
    covariance = math.fsum(map(mul, left, right))
    spread = math.sqrt(math.fsum(map(mul, left, left)) * math.fsum(map(mul, right, right)))
    return round(covariance / spread, 3) if spread else 0.0


def _likeness(scores: Sequence[float], counts: Sequence[int]) -> float:
    """Mean product of the scores of two turns of one session, over all such pairs, by their variance."""
    variance = math.fsum(map(mul, scores, scores)) / len(scores)
    remaining = iter(scores)
    products, pairs = [], 0
    for count in counts:
        own = list(islice(remaining, count))
        products.append(math.fsum(own) ** 2 - math.fsum(map(mul, own, own)))
        pairs += count * (count - 1)
    if not pairs or not variance:
        return 0.0
    # A few turns can come out as less alike than chance; generating needs a share of the variance.
    return round(min(max(math.fsum(products) / pairs / variance, 0.0), 1.0), 3)


FITTED_RAW = Fit(
    gap_s=(0.0, 2.38, 3.39, 3.96, 5.33, 8.56, 18.71, 66.59, 135.53, 606.01, 2876.98, 8131.94, 27009.88),
    append_tokens=(1, 1, 1, 1, 46, 292, 986, 2884, 5479, 15306, 59717, 146409, 234962),
    output_tokens=(18, 70, 92, 108, 138, 211, 408, 869, 1460, 3370, 6702, 12247, 15611),
    first_prompt_tokens=(
        *(9393, 11824, 17888, 19009, 23395, 68322, 119785),
        *(208899, 273107, 473012, 748955, 853075, 881817),
    ),
    gap_likeness=0.17,
    append_likeness=0.138,
    output_likeness=0.171,
    gap_append_correlation=0.221,
)
"""Turns of coding agents, with gaps as recorded: they may hide one model call.

Made by ``fit(load(path, "raw"))`` from agent_tool_turns.csv (704 traces; 40,515 usable turns in 3,954
sessions), which is derived from the public traces of https://github.com/callanjfox/kv-cache-tester,
Apache-2.0. Only these numbers are in this repository.

What was found, as rank correlations: gap and append of a turn 0.22 (corrected 0.08); neighbouring turns'
gaps 0.24 (0.15), appends 0.27, answers 0.26, which falls to 0.16 (0.07), 0.11 and 0.11 at 20 turns apart.
Modelled are the first, and a likeness of all turns of a session that does not fade with distance.

Not modelled: that fading; gap and answer 0.15 (0.01); append and answer -0.10; gap and prompt so far 0.19
(0.06), for the most part the hidden model call; how long sessions are, and that long ones begin with shorter
prompts. Distribution functions generated from it differ from the trace's by up to 0.05, most where appends
are below 46 tokens; medians agree within a few percent. Means come out higher, since tails between entries
are thinner than interpolated: of gaps by a fifth to a quarter, appends by a seventh, answers by a twentieth.
"""

FITTED_CORRECTED = Fit(
    gap_s=(0.0, 0.0, 0.0, 0.0, 0.0, 1.17, 6.5, 57.09, 125.09, 600.53, 2738.41, 10411.7, 26994.04),
    append_tokens=(1, 1, 1, 1, 47, 295, 1001, 2943, 5557, 15317, 55394, 222529, 234962),
    output_tokens=(18, 70, 92, 107, 137, 209, 405, 867, 1460, 3362, 6806, 13442, 15611),
    first_prompt_tokens=(
        *(9393, 11821, 17854, 18979, 22968, 66987, 118987),
        *(208899, 266548, 465364, 748955, 858494, 881817),
    ),
    gap_likeness=0.087,
    append_likeness=0.14,
    output_likeness=0.169,
    gap_append_correlation=0.102,
)
"""As :data:`FITTED_RAW`, with each request's own model time taken off its gap, by ``load(path, "corrected")``:
39,087 turns in 3,160 sessions, 27 % of them without any gap left. Turns without a known model time, all
streamed, are left out."""


def generate(fit: Fit, *, sessions: int, turns: int, seed: int) -> list[Session]:
    """Sessions of the same distribution, each with ``turns`` turns; the same for the same arguments.

    More sessions or turns add to those of fewer with the same seed, and change none of them.
    """
    # Seeded to be repeatable, and for each session, so that its turns are its own.
    return [
        _generated(fit, turns, random.Random(f"workload/{seed}/{number}"))  # noqa: S311
        for number in range(sessions)
    ]


def _generated(fit: Fit, turns: int, rng: random.Random) -> Session:
    first_prompt_tokens = _whole_value(fit.first_prompt_tokens, rng.random())
    session_scores = _drawn_scores(fit, rng)
    return Session(
        first_prompt_tokens, tuple(_generated_turn(fit, session_scores, rng) for _ in range(turns))
    )


def _generated_turn(fit: Fit, session_scores: tuple[float, ...], rng: random.Random) -> Turn:
    likeness = (fit.gap_likeness, fit.append_likeness, fit.output_likeness)
    gap, append, output = (
        NormalDist().cdf(math.sqrt(share) * common + math.sqrt(1 - share) * own)
        for share, common, own in zip(likeness, session_scores, _drawn_scores(fit, rng), strict=True)
    )
    return Turn(
        round(_value(fit.gap_s, gap), 2),
        _whole_value(fit.append_tokens, append),
        _whole_value(fit.output_tokens, output),
    )


def _drawn_scores(fit: Fit, rng: random.Random) -> tuple[float, float, float]:
    """Normal scores of a gap, of appended tokens and of an answer."""
    gap, other, output = rng.gauss(), rng.gauss(), rng.gauss()
    correlation = fit.gap_append_correlation
    return gap, correlation * gap + math.sqrt(1 - correlation**2) * other, output


def _value(table: Sequence[float], share: float) -> float:
    """The value that this share of all values does not exceed, by inverse transform."""
    percent = 100 * share
    upper = min(max(bisect_right(PERCENTS, percent), 1), len(PERCENTS) - 1)
    below, above = PERCENTS[upper - 1], PERCENTS[upper]
    low, high = math.log1p(table[upper - 1]), math.log1p(table[upper])
    return math.expm1(low + (high - low) * (percent - below) / (above - below))


def _whole_value(table: Sequence[int], share: float) -> int:
    return round(_value(table, share))


def scale(
    sessions: Sequence[Session],
    *,
    tokens: float,
    time: float,
    most_prompt_tokens: int,
    least_gap_s: float = 0.0,
) -> list[Session]:
    """Sessions for a smaller model and machine.

    A session ends before the first prompt that would be too long; one without a turn left is dropped, so
    fewer may come back, and those with a long first prompt are missing first.

    Args:
        sessions: What is scaled.
        tokens: Factor of all token counts, each of which stays at least 1.
        time: Factor of the gaps.
        most_prompt_tokens: Of any request. The answer to a session's last continuation is not counted.
        least_gap_s: Shorter gaps, once scaled, become this long.
    """

    def scaled_tokens(count: int) -> int:
        return max(1, round(count * tokens))

    kept = []
    for session in sessions:
        scaled = Session(
            scaled_tokens(session.first_prompt_tokens),
            tuple(
                Turn(
                    max(turn.gap_s * time, least_gap_s),
                    scaled_tokens(turn.append_tokens),
                    scaled_tokens(turn.output_tokens),
                )
                for turn in session.turns
            ),
        )
        fitting = bisect_right(prompt_tokens(scaled), most_prompt_tokens)
        if fitting > 1:
            kept.append(scaled._replace(turns=scaled.turns[: fitting - 1]))
    return kept
