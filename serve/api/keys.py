"""API keys: who may ask, and who may load, unload and pin.

Without keys everybody may; the server then listens on the loopback address unless told otherwise.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from zen_train.serve.api.http_errors import ForbiddenError
from zen_train.serve.errors import AuthenticationError

ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/pin", "/v1/unpin"})
_GUARDED = ("/v1/", "/status.json")


class Keys:
    """Keys are kept as digests and compared in constant time, each one of them every time."""

    def __init__(self, api_keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self._api = [_digest(key) for key in api_keys]
        self._admin = [_digest(key) for key in admin_keys]

    @property
    def required(self) -> bool:
        """Whether any key is asked for."""
        return bool(self._api or self._admin)

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Let a request pass, or not.

        Raises:
            AuthenticationError: no key, or one that is not known.
            ForbiddenError: a key that may not change what is served.
        """
        admin = path in ADMIN_PATHS and bool(self._admin)
        if not path.startswith(_GUARDED) or not (admin or self._api):
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        found = hashlib.sha256(key.strip()).digest()
        if scheme.lower() != b"bearer" or not key.strip():
            raise AuthenticationError("an API key is required: send Authorization: Bearer KEY")
        is_admin, is_known = _any(found, self._admin), _any(found, self._api)
        if not (is_admin or is_known):
            raise AuthenticationError("this API key is not known")
        if admin and not is_admin:
            raise ForbiddenError("this API key may not load, unload or pin variants; use an admin key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _any(found: bytes, known: Sequence[bytes]) -> bool:
    matches = [hmac.compare_digest(found, digest) for digest in known]
    return any(matches)
