"""The OpenAI-shaped HTTP API, its metrics and the status page. Nothing outside this package knows HTTP."""
