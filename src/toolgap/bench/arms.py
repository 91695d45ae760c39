"""The arms: ways of serving the continuation."""

from enum import StrEnum


class Arm(StrEnum):
    """One way of serving the continuation."""

    RECOMPUTE = "A"
    ON_REQUEST = "B"
    ON_REQUEST_WAIT = "B-wait"
    AHEAD = "C"
    AHEAD_DEVICE = "D"
    HOST = "L2"
    DEVICE = "L1"
    WARM_UP = "W"

    @property
    def policy(self) -> str:
        """SGLang's ``--hicache-storage-prefetch-policy`` for this arm; its default is ``timeout``."""
        return "wait_complete" if self is Arm.ON_REQUEST_WAIT else "timeout"


ARMS: dict[Arm, str] = {
    Arm.RECOMPUTE: "recompute: no tier holds the prefix",
    Arm.ON_REQUEST: "restore on request: only L3 holds it; SGLang's default policy, `timeout`",
    Arm.ON_REQUEST_WAIT: "restore on request, policy `wait_complete`",
    Arm.AHEAD: "restore ahead: submitted to Toolgap when the tool call leaves",
    Arm.AHEAD_DEVICE: "restore ahead, promoted to the device (`target: device`)",
    Arm.HOST: "bound: resident in L2, by ordinary traffic",
    Arm.DEVICE: "bound: resident in L1, by ordinary traffic",
    Arm.WARM_UP: "warm-up: a `max_tokens=1` request for the prefix when the tool call leaves",
}
