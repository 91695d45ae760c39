"""Stock SGLang with HiCache on a machine without a GPU."""
