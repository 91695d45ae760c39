"""A server of two data-parallel replicas behind the gateway: each has a cache of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gateways import WORKER_ARGUMENTS, Agent, AnthropicAgent, Gateway, OpenAIAgent, gateway
from harness import PAGE, PATIENT, Server, until

from toolgap.protocol import OperationStatus

pytestmark = pytest.mark.engine

TEMPLATE = Path(__file__).parent.parent / "templates" / "qwen3.jinja"
REPLICAS = 2
FEW_TOKENS = 8
PATIENT_GATEWAY = ("--session-timeout-s", "60", "--restore-timeout-s", "120")
"""So that a busy machine sends no request elsewhere, and gives no restore up."""

Make = Callable[..., Agent]


@pytest.fixture(scope="module")
def replicated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = [*WORKER_ARGUMENTS, "--chat-template", str(TEMPLATE), "--dp-size", str(REPLICAS)]
    folder = tmp_path_factory.mktemp("dp")
    with Server(model, folder, arguments=arguments, environment=PATIENT, ranks=REPLICAS) as server:
        yield server


@pytest.fixture(scope="module")
def running(replicated: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with gateway(folder, [replicated.url], "--replicas", str(REPLICAS), *PATIENT_GATEWAY) as one:
        yield one


@pytest.mark.parametrize("make", [OpenAIAgent, AnthropicAgent])
def test_each_conversation_goes_on_at_the_replica_that_has_restored_it(
    replicated: Server, running: Gateway, make: Make
) -> None:
    """More conversations than replicas; with SGLang's own choice they would go round."""
    replicated.probe.reset()
    replicated.flush()
    before = {status.operation_id for status in replicated.toolgap.overview().recent}
    used_before = running.metric("used_tokens_total")
    names = [f"{make.__name__} {number}" for number in range(4)]
    agents = [make(running.url, name, streamed=name.endswith("1")) for name in names]
    calls: list[str] = []
    for agent in agents:
        agent.turn(calls.extend)
    replicated.flush()
    for call in calls:
        assert running.hint(tool_call_id=call, ended=True).status_code == 200

    def all_landed() -> list[OperationStatus]:
        recent = replicated.toolgap.overview().recent
        found = [one for one in recent if one.operation_id not in before and one.inserted_tokens]
        return found if len(found) == len(agents) else []

    outcomes = until("all are restored", all_landed)
    assert {outcome.dp_rank for outcome in outcomes} == set(range(REPLICAS)), "all went to one replica"
    reads = [replicated.probe.reads_of(replica) for replica in range(REPLICAS)]
    for agent in agents:
        agent.ask("auto", FEW_TOKENS)
    assert [replicated.probe.reads_of(replica) for replica in range(REPLICAS)] == reads
    assert not reads[0].keys() & reads[1].keys(), "a prefix was read by the replica that it is not for"
    # Of a prefix that messages name, only what the next request must begin with is known.
    least = sum((outcome.stable_tokens or 0) - PAGE for outcome in outcomes)
    assert least > 0
    running.until_metric("used_tokens_total", used_before + least)

    replicated.flush()
    for agent, name in zip(agents, names, strict=True):
        direct = make(replicated.url, name)
        direct.messages = agent.messages[:-1]
        direct.ask("auto", FEW_TOKENS)
        assert direct.text == agent.text
