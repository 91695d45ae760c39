import os

import pytest

# Before any library is imported: what they would ask of the network, or tell it.
os.environ.update(
    FASTMCP_CHECK_FOR_UPDATES="off",
    LANGSMITH_TRACING="false",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    LITELLM_TELEMETRY="False",
    OPENAI_AGENTS_DISABLE_TRACING="1",
)

from recorder import Recorder


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()
