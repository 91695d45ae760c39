"""SGLang's own Llama."""

from sglang.srt.models.llama import EntryClass as EntryClass
