"""Fine-tune many variants of one language model; store each as a one-bit delta."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout (and an editable install of one) kernels/ and conf/ lie beside this package, not in it; a wheel has them
# inside. They are zen_train.kernels and zen_train.conf in both. setuptools' editable finder cannot do it for a folder
# without __init__.py inside a regular package.
_checkout = Path(__file__).resolve().parents[1]
if (_checkout / "pyproject.toml").is_file() and (_checkout / "kernels").is_dir():
    __path__.append(str(_checkout))
