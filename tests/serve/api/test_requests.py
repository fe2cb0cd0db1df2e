"""Requests that are wrong as HTTP, too large, too slow, or cut off: each gets its error, and the server goes on."""

import socket
import threading

import httpx
import openai
import orjson
import pytest

from tests.serve.api.stage import ScriptEngine, serving

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def is_openai_error(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def raw(stage, data: bytes, *, timeout_s: float = 10) -> bytes:
    """Everything the server says to these bytes until it closes."""
    with socket.create_connection(("127.0.0.1", stage.port), timeout=timeout_s) as connection:
        connection.sendall(data)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received


def chat_request(body: bytes) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def alive(stage) -> None:
    assert stage.http().post(CHAT, json=ASK).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/nothing", 404),
        ("GET", "/v1/chat/completions/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("OPTIONS", CHAT, 405),
        ("POST", "/metrics", 405),
        ("BREW", "/", 400),
    ],
)
def test_a_wrong_path_or_method_is_an_error_in_openais_form(stage, method, path, status):
    answer = stage.http().request(method, path)
    is_openai_error(answer, status)
    if status == 405:
        assert answer.headers["allow"]


def test_a_body_must_say_that_it_is_json(stage):
    """A browser sends text/plain to another site without asking that site first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = stage.http().post(
            "/v1/unload_lora_adapter", content=b'{"lora_name":"zen4-coder"}', headers={"content-type": kind}
        )
        assert is_openai_error(answer, 415)["code"] == "unsupported_media_type"
    assert "zen4-coder" in stage.catalogue.variants
    kind = {"content-type": "application/json; charset=utf-8"}
    assert stage.http().post(CHAT, content=orjson.dumps(ASK), headers=kind).status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xff", b'{"model": "\xed\xa0\x80"}', b"null", b"[]", b"\x00" * 100], ids=repr
)
def test_a_malformed_body_is_a_bad_request(stage, body):
    kind = {"content-type": "application/json"}
    for path in (CHAT, "/v1/completions", "/v1/load_lora_adapter", "/v1/pin"):
        is_openai_error(stage.http().post(path, content=body, headers=kind), 400)


def test_no_request_is_answered_with_422(stage):
    is_openai_error(stage.http().post(CHAT, json=ASK | {"temperature": "hot"}), 400)


def test_a_million_tokens_are_refused_and_cost_others_nothing(stage):
    answer = stage.http().post("/v1/completions", json={"model": "tiny", "prompt": [1] * 1_000_000})
    assert "200000 bytes" in is_openai_error(answer, 413)["message"]
    answer = stage.http().post("/v1/completions", json={"model": "tiny", "prompt": [1] * 60_000})
    assert is_openai_error(answer, 400)["code"] == "context_length_exceeded"
    answer = stage.http().post("/v1/completions", json={"model": "tiny", "prompt": "a" * 190_000})
    assert is_openai_error(answer, 400)["code"] == "context_length_exceeded"
    alive(stage)


def test_a_body_without_a_length_is_counted_too(stage):
    def endless():
        for _ in range(40):
            yield b"x" * 10_000

    kind = {"content-type": "application/json"}
    answer = stage.http().post(CHAT, content=endless(), headers=kind)
    is_openai_error(answer, 413)
    assert answer.headers["connection"] == "close"


def test_a_body_that_never_ends_is_cut_off(stage):
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", stage.port), timeout=10) as connection:
        connection.sendall(head.encode())
        piece = b"186A0\r\n" + b"x" * 100_000 + b"\r\n"
        with pytest.raises(OSError, match=r"reset|[Bb]roken"):
            connection.sendall(piece * 1000)
    alive(stage)


def test_a_declared_length_that_is_a_lie_ends_in_a_time_out(tmp_path):
    with serving(tmp_path, limits={"body_timeout_s": 0.2}) as stage:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
        answer = raw(stage, head.encode() + b"{")
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in answer
        alive(stage)


def test_a_client_that_sends_its_headers_too_slowly_is_cut_off(tmp_path):
    with serving(tmp_path, connection={"header_timeout_s": 0.2}) as stage:
        assert raw(stage, b"").startswith(b"HTTP/1.1 408")
        assert raw(stage, b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: ").startswith(b"HTTP/1.1 408")
        alive(stage)


def test_headers_without_end_are_cut_off(stage):
    head = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    assert raw(stage, head + b"x-long: " + b"a" * 20_000).startswith(b"HTTP/1.1 431")
    assert raw(stage, head + b"x: y\r\n" * 4_000).startswith(b"HTTP/1.1 431")
    alive(stage)


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n",
     b"GET / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
     b"GET / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n"],
    ids=["tls", "words", "version", "url", "length", "lengths"],
)  # fmt: skip
def test_bytes_that_are_no_request_get_a_bad_request(stage, data):
    answer = raw(stage, data)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"invalid_request_error"' in answer


def test_more_connections_than_allowed_are_turned_away_and_room_comes_back(tmp_path):
    with serving(tmp_path, connection={"max_connections": 3}) as stage:
        held = [socket.create_connection(("127.0.0.1", stage.port)) for _ in range(3)]
        stage.until(lambda: len(stage.server.server_state.connections) == 3, "three connections")
        answer = raw(stage, b"")
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after" in answer
        for connection in held:
            connection.close()
        stage.until(lambda: not stage.server.server_state.connections, "no connections")
        alive(stage)


def test_too_many_requests_at_once_get_503_while_health_is_answered(tmp_path):
    with serving(tmp_path, limits={"max_requests": 2}) as stage:
        stage.engine.go.clear()
        threads = [threading.Thread(target=lambda: stage.http().post(CHAT, json=ASK)) for _ in range(2)]
        for thread in threads:
            thread.start()
        stage.until(lambda: len(stage.engine.jobs) == 2, "two jobs")
        answer = stage.http().post(CHAT, json=ASK)
        assert is_openai_error(answer, 503)["code"] == "overloaded"
        assert int(answer.headers["retry-after"]) >= 1
        assert stage.http().get("/health").status_code == 200
        assert stage.http().get("/metrics").status_code == 200
        stage.engine.go.set()
        for thread in threads:
            thread.join()
        alive(stage)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_frees_the_engine(tmp_path, stream):
    engine = ScriptEngine(reply=lambda _: "x" * 400, step_s=0.005)
    with serving(tmp_path, engine=engine) as stage:
        body = orjson.dumps(ASK | {"stream": stream, "n": 3})
        request = chat_request(body)
        with socket.create_connection(("127.0.0.1", stage.port)) as connection:
            connection.sendall(request)
            stage.until(lambda: len(engine.jobs) == 3, "three jobs")
            if stream:
                assert connection.recv(100)
        stage.until(lambda: not engine.jobs, "no jobs")
        assert len(engine.cancelled) == 3
        stage.until(lambda: stage.services.router.snapshot().running == 0, "the router has none either")


def test_a_client_that_leaves_while_its_variant_loads_frees_its_place(tmp_path):
    with serving(tmp_path) as stage:
        stage.engine.may_load.clear()
        body = orjson.dumps(ASK | {"model": "zen4-coder"})
        request = chat_request(body)
        with socket.create_connection(("127.0.0.1", stage.port)) as connection:
            connection.sendall(request)
            stage.until(lambda: stage.services.router.snapshot().queued == 1, "one waits")
        stage.until(lambda: stage.services.router.snapshot().queued == 0, "none waits")
        stage.engine.may_load.set()


def test_a_client_that_takes_nothing_of_its_answer_is_dropped(tmp_path):
    engine = ScriptEngine(reply=lambda _: "x" * 400, step_s=0.0, context_tokens=200_000)
    with serving(tmp_path, engine=engine, connection={"write_timeout_s": 0.3}) as stage:
        many = {"max_tokens": 90_000, "n": 8, "logprobs": True, "top_logprobs": 3}
        ask = ASK | many | {"stream": True, "ignore_eos": True}
        body = orjson.dumps(ask)
        request = chat_request(body)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", stage.port))
        connection.sendall(request)
        stage.until(lambda: engine.jobs_seen, "the job began")
        stage.until(lambda: not engine.jobs and engine.cancelled, "the job was cancelled")
        connection.close()
        alive(stage)


def test_pipelined_requests_are_answered_in_order(stage):
    data = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = raw(stage, data)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.index(b'"status"') < answer.index(b'"version"')


def test_a_fault_of_the_server_is_500_without_details_and_it_goes_on(tmp_path, caplog):
    with serving(tmp_path) as stage:
        stage.services.texts.encode_chat = None  # type: ignore[method-assign]  # breaks every chat
        error = is_openai_error(stage.http().post(CHAT, json=ASK), 500)
        assert "NoneType" not in str(error)
        assert stage.http().post("/v1/completions", json={"model": "tiny", "prompt": "x"}).status_code == 200
    assert "a request failed" in caplog.text


def test_keys_are_asked_for_and_admin_keys_for_changes(tmp_path):
    with serving(tmp_path, api_keys=("user", "other"), admin_keys=("root",)) as stage:
        for key in ("", "wrong", "root\u00e9"):
            headers = {"authorization": f"Bearer {key}".encode()} if key else {}
            answer = stage.http().post(CHAT, json=ASK, headers=headers)
            assert is_openai_error(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            stage.client("wrong").models.list()
        for key in ("user", "other", "root"):
            assert stage.client(key).models.list().data
        pin = {"model": "zen4-coder"}
        user, root = {"authorization": "Bearer user"}, {"authorization": "bearer  root"}
        assert (
            is_openai_error(stage.http().post("/v1/pin", json=pin, headers=user), 403)["code"]
            == "admin_key_required"
        )
        assert stage.http().post("/v1/pin", json=pin, headers=root).status_code == 200
        is_openai_error(stage.http().post("/v1/pin", json=pin), 401)
        is_openai_error(stage.http().get("/status.json"), 401)
        for path in ("/health", "/ready", "/metrics", "/version", "/", "/page.js"):
            assert stage.http().get(path).status_code == 200


def test_without_an_admin_key_any_key_may_change_what_is_served(tmp_path):
    with serving(tmp_path, api_keys=("user",)) as stage:
        assert stage.http().post("/v1/pin", json={"model": "zen4-coder"}).status_code == 401
        headers = {"authorization": "Bearer user"}
        assert stage.http().post("/v1/pin", json={"model": "zen4-coder"}, headers=headers).status_code == 200


def test_with_admin_keys_alone_only_changes_need_one(tmp_path):
    with serving(tmp_path, admin_keys=("root",)) as stage:
        alive(stage)
        assert stage.http().post("/v1/pin", json={"model": "zen4-coder"}).status_code == 401


def test_a_stream_ends_with_an_error_event_when_it_is_cut_off(tmp_path):
    engine = ScriptEngine(reply=lambda _: "x" * 400, step_s=0.002)
    with serving(tmp_path, engine=engine) as stage:
        with stage.http().stream(
            "POST", CHAT, json=ASK | {"stream": True, "max_tokens": 400, "ignore_eos": True}
        ) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            next(lines)
            engine.die("it broke")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        error = orjson.loads(rest[-2].removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead"
