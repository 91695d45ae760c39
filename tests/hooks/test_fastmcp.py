"""With FastMCP's own client and server, in one process."""

import asyncio
from itertools import pairwise

import pytest
from fastmcp import Client, Context, FastMCP
from fastmcp.exceptions import ToolError
from recorder import Recorder

from toolgap.hooks.fastmcp import ToolgapTools

server: FastMCP = FastMCP("test")


class Clock:
    """Goes on by a second at each look."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@server.tool
async def look(context: Context) -> str:
    """Look."""
    for done in range(1, 9):
        await context.report_progress(done, 8)
    return "seen"


@server.tool
async def fail() -> str:
    """Fail."""
    raise ToolError("the tool's own")


def test_a_call_submits_its_progress_tells_the_gap_and_its_end_refreshes(recorder: Recorder) -> None:
    seen: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append(progress)

    async def main() -> None:
        async with Client(server) as client:
            tools = ToolgapTools(client, recorder.client, clock=Clock(), strict=True)
            tools.answered("completion")
            result = await tools.call_tool("look", call_id="c", progress_handler=on_progress)
            assert result.data == "seen"
            assert await asyncio.to_thread(tools.restores.settle)
            tools.closed()
            tools.restores.close()

    asyncio.run(main())
    assert seen == [float(done) for done in range(1, 9)]
    assert {submit["request_id"] for submit in recorder.submits} == {"completion"}
    gaps = [submit.get("expected_gap_s") for submit in recorder.submits]
    told = [gap for gap in gaps[1:-1] if gap is not None]
    assert told
    assert all(later <= earlier / 2 for earlier, later in pairwise(told))


def test_a_tool_that_fails_raises_its_own_error(recorder: Recorder) -> None:
    async def main() -> None:
        async with Client(server) as client:
            tools = ToolgapTools(client, recorder.client, strict=True)
            tools.answered("completion")
            with pytest.raises(ToolError, match="the tool's own"):
                await tools.call_tool("fail")
            tools.restores.close()

    asyncio.run(main())
    assert recorder.submits[0]["request_id"] == "completion"
