"""A small streaming client for the serving benchmarks: one connection a request, one time stamp a chunk.

It speaks just enough HTTP/1.1 and SSE for `/v1/completions` of any OpenAI-compatible server, so that the client costs
the two cores next to nothing and costs every server the same.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Answer:
    """One streamed answer. Times are seconds of `time.perf_counter`."""

    model: str
    started: float
    status: int = 0
    chunks: list[float] = field(default_factory=list)
    """When each chunk with text arrived."""
    tokens: int = 0
    """Completion tokens as the server counts them."""
    error: str = ""
    ended: float = 0.0

    @property
    def first_s(self) -> float:
        """Time to the first chunk with text."""
        return self.chunks[0] - self.started

    @property
    def gaps_s(self) -> list[float]:
        """Times between chunks."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first one."""
        return (self.tokens - 1) / (self.chunks[-1] - self.chunks[0])


async def complete(
    url: str, model: str, prompt: list[int], *, max_tokens: int, extra: dict | None = None
) -> Answer:
    """Stream one greedy completion of exactly `max_tokens` tokens."""
    parts = urlsplit(url)
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **(extra or {}),
    }
    payload = json.dumps(body).encode()
    head = (
        f"POST {parts.path}/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    answer = Answer(model=model, started=time.perf_counter())
    writer = None
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**20)
        writer.write(head.encode() + payload)
        await writer.drain()
        answer.status = int((await reader.readline()).split()[1])
        async for line in reader:
            _take(line.strip(), answer)
    except (OSError, IndexError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()
        answer.ended = time.perf_counter()
    return answer


def _take(line: bytes, answer: Answer) -> None:
    if line.startswith(b"{"):
        answer.error = line.decode(errors="replace")[:500]
    if not line.startswith(b"data: {"):
        return
    event = json.loads(line[6:])
    if event.get("error"):
        answer.error = str(event["error"])[:500]
    if event.get("usage"):
        answer.tokens = event["usage"]["completion_tokens"]
    if event.get("choices"):
        answer.chunks.append(time.perf_counter())
