"""Plays the agent's turn: the tool runs, and its continuation is served one of the three ways."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolgap.client import Toolgap
from toolgap.demo.errors import DemoError
from toolgap.demo.scenario import Conversation, common_prefix_tokens
from toolgap.demo.tiers import Tiers, fresh_salt
from toolgap.demo.tool import TEST_MODULE, Repository
from toolgap.demo.trials import Arm, Trial
from toolgap.engineclient import Engine
from toolgap.protocol import OperationStatus

GAP_S = 1.0
"""A tool that is faster is padded to this, so that the gap is the same in every arm."""

RESTORE_DEADLINE_S = 60.0
ANSWER_TOKENS = 16
"""Generated whether or not the model ends its answer before, so that there is something to compare."""


@dataclass(frozen=True)
class Agent:
    """An agent at its tool call: all that a trial needs."""

    engine: Engine
    toolgap: Toolgap
    tiers: Tiers
    repository: Repository
    conversation: Conversation
    prefix_ids: Sequence[int]
    """The conversation's tokens, up to the call of the tool."""
    page_tokens: int

    def trial(self, number: int, arm: Arm, progress: Callable[[str], None]) -> Trial:
        """Play one continuation; `progress` is told what happens now."""
        progress("other traffic pushes the prefix out")
        salt = fresh_salt() if arm is Arm.RECOMPUTE else self.tiers.evicted(self.prefix_ids)
        progress("the tool runs")
        called_s = time.perf_counter()
        operation: OperationStatus | None = None
        if arm is Arm.AHEAD:
            operation = self.toolgap.submit(input_ids=self.prefix_ids, cache_salt=salt)
        started_s = time.perf_counter()
        tool_output = self.repository.run_tests(TEST_MODULE)
        tool_s = time.perf_counter() - started_s
        continuation_ids = self.engine.tokenize_chat(
            self.conversation.continued(tool_output), self.conversation.tools, answer=True
        )
        shared_tokens = common_prefix_tokens(self.prefix_ids, continuation_ids)
        aligned_tokens = shared_tokens // self.page_tokens * self.page_tokens
        if len(self.prefix_ids) - shared_tokens >= self.page_tokens:
            raise DemoError(
                "this model's chat template changes earlier messages when a tool's result follows, from token "
                f"{shared_tokens:,} on: no cache can serve its continuation, so choose another --model"
            )
        time.sleep(max(0.0, called_s + GAP_S - time.perf_counter()))
        if operation is not None:
            # A slow disk lengthens the gap instead of spoiling the trial; the gap is reported.
            operation = self.toolgap.status(operation.operation_id, wait_s=RESTORE_DEADLINE_S)
        gap_s = time.perf_counter() - called_s
        progress("the continuation is served")
        generation = self.engine.generate(continuation_ids, max_new_tokens=ANSWER_TOKENS, cache_salt=salt)
        progress("SGLang backs up")
        self.tiers.settle(generation)
        return Trial(
            number=number,
            arm=arm,
            aligned_tokens=aligned_tokens,
            tool_s=tool_s,
            gap_s=gap_s,
            generation=generation,
            restore=operation,
        )
