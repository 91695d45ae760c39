"""SGLang's own MiniCPM 3, which has multi-head latent attention."""

from sglang.srt.models.minicpm3 import EntryClass as EntryClass
