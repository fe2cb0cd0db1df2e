"""Fine-tune many variants of one language model; store each as a one-bit delta."""

__version__ = "0.1.0"
