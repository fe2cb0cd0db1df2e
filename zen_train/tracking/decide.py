"""Decide how Weights & Biases runs, before the model loads: online, offline or disabled.

Contract: `resolve_wandb` never prompts, never raises and returns within the connection timeout. It reads the
environment and `.netrc` for the presence of a key, and tries one TCP connection. It sends nothing and
does not check that the key is right: a server that refuses it later turns the run offline as well.
Imports neither Lightning nor wandb.
"""

import importlib.util
import netrc
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # typeshed has it on some platforms

from zen_train.tracking.config import WandbConfig, WandbMode

DEFAULT_SERVER = "https://api.wandb.ai"

_MODES: dict[str, Literal["auto", "online", "offline", "disabled"]] = {
    "online": "online",
    "run": "online",
    "shared": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
"""Values of WANDB_MODE that wandb knows, and what each means here."""


@dataclass(frozen=True, kw_only=True)
class WandbDecision:
    """What W&B does in this run, why, and what the user can do about it."""

    mode: Literal["online", "offline", "disabled"]
    reason: str
    hint: str | None = None

    def line(self) -> str:
        """One line for the terminal."""
        return f"W&B {self.mode}: {self.reason}" + (f"; {self.hint}" if self.hint else "")


def resolve_wandb(
    config: WandbConfig,
    *,
    env: Mapping[str, str] = os.environ,
    run_folder: str | Path = "RUN_FOLDER",
) -> WandbDecision:
    """The mode of this run. `auto` follows WANDB_MODE, else online when there is a key, else offline.

    A mode given by name wins over WANDB_MODE. Online without a key, or with a server that accepts no
    connection within `config.connect_timeout_s`, becomes offline. `run_folder` only words the hint.
    """
    wanted, reason = _wanted(config.mode, env)
    sync_hint = f"upload later with: wandb sync {Path(run_folder) / 'wandb' / 'offline-run-*'}"
    if wanted == "disabled":
        return WandbDecision(mode="disabled", reason=reason)
    if importlib.util.find_spec("wandb") is None:
        return WandbDecision(mode="disabled", reason="wandb is not installed", hint="pip install wandb")
    if wanted == "offline":
        return WandbDecision(mode="offline", reason=reason, hint=sync_hint)
    server = _server(env)
    key_source = _key_source(server, env)
    if key_source is None:
        reason = f"{reason}, but there is no API key" if wanted == "online" else "no API key"
        return WandbDecision(
            mode="offline", reason=reason, hint=f"{sync_hint} (set WANDB_API_KEY or run `wandb login` once)"
        )
    problem = _unreachable(server, env, timeout_s=config.connect_timeout_s)
    if problem is not None:
        return WandbDecision(mode="offline", reason=f"{server} cannot be reached ({problem})", hint=sync_hint)
    return WandbDecision(mode="online", reason=f"key from {key_source}" if wanted == "auto" else reason)


def _wanted(mode: WandbMode, env: Mapping[str, str]) -> tuple[WandbMode, str]:
    """What is asked for before keys and servers are looked at, and by whom."""
    if mode != "auto":
        return mode, f"logger.wandb.mode={mode}"
    if env.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes"):
        return "disabled", "WANDB_DISABLED is set"
    asked = env.get("WANDB_MODE", "").strip().lower()
    if not asked:
        return "auto", ""
    if asked not in _MODES:
        return "offline", f"WANDB_MODE={asked!r} is not one of online, offline, disabled"
    return _MODES[asked], f"WANDB_MODE={asked}"


def _server(env: Mapping[str, str]) -> str:
    return env.get("WANDB_BASE_URL", "").rstrip("/") or DEFAULT_SERVER


def _key_source(server: str, env: Mapping[str, str]) -> str | None:
    """Where a key for the server is found; None when there is none. The key itself is not kept."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if env.get(name):
            return name
    home = Path(env.get("HOME") or Path.home())
    candidates = [Path(env["NETRC"])] if env.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for path in candidates:
        try:
            found = netrc.netrc(str(path)).authenticators(urlsplit(server).netloc)
        except (OSError, netrc.NetrcParseError):
            continue  # a missing or broken netrc holds no key that wandb could use either
        if found and found[2]:
            return str(path)
    return None


def _unreachable(server: str, env: Mapping[str, str], *, timeout_s: float) -> str | None:
    """Why no TCP connection to the server, or to the proxy before it, opens in time; None when one does."""
    target = urlsplit(server)
    proxies = {
        scheme: value
        for scheme in ("http", "https")
        if (value := env.get(f"{scheme}_proxy") or env.get(f"{scheme.upper()}_PROXY"))
    }
    no_proxy = {"no": env.get("no_proxy") or env.get("NO_PROXY") or ""}
    if target.scheme in proxies and not proxy_bypass_environment(target.netloc, no_proxy):
        proxy = proxies[target.scheme]
        target = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    try:
        host, port = target.hostname, target.port or (80 if target.scheme == "http" else 443)
    except ValueError as error:
        return str(error)
    if host is None:
        return f"{server!r} names no host"
    outcome: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
            outcome.append(None)
        except OSError as error:
            outcome.append(error.strerror or str(error))

    # In a thread because resolving a name has no timeout of its own.
    prober = threading.Thread(target=connect, daemon=True)
    prober.start()
    prober.join(timeout_s)
    return outcome[0] if outcome else f"no answer in {timeout_s:g} s"
