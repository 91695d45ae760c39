"""SGLang's own Spark 2.5, which has sliding-window layers."""

from sglang.srt.models.spark2_5 import EntryClass as EntryClass
