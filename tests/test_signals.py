import os
import signal

import pytest

from toolgap.signals import Stopped, StopSignals


@pytest.mark.parametrize("number", StopSignals.NUMBERS)
def test_a_signal_unwinds_what_runs(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    def play() -> None:
        with StopSignals():
            os.kill(os.getpid(), number)
            signal.pause()

    with pytest.raises(Stopped, match=number.name) as stopped:
        play()
    assert stopped.value.number == number
    assert signal.getsignal(number) is before


def test_a_signal_that_is_held_back_comes_at_the_end() -> None:
    steps = []

    def play() -> None:
        with StopSignals() as signals:
            with signals.hold():
                signal.raise_signal(signal.SIGTERM)
                with signals.hold():
                    steps.append("inner")
                steps.append("outer")
            steps.append("never")

    with pytest.raises(Stopped, match="SIGTERM"):
        play()
    assert steps == ["inner", "outer"]


def test_an_exception_on_its_way_is_not_replaced() -> None:
    def play() -> None:
        with StopSignals() as signals, signals.hold():
            signal.raise_signal(signal.SIGINT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        play()


def test_nothing_happens_without_a_signal() -> None:
    with StopSignals() as signals, signals.hold():
        pass
