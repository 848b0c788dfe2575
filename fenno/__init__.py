"""fenno makes an LLM server meet its latency target without changing the model."""

__version__ = "0.1.0"
