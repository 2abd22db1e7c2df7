"""GPT-2, its training with probes and captures, and campaigns of such runs."""
