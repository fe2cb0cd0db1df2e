"""The API against its own OpenAPI document: made-up requests, wrong and right, are answered as it says."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.serve.api.stage import ScriptEngine, serving

ROUTES = [
    "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter",
    "POST /v1/pin", "POST /v1/unpin", "GET /v1/models", "GET /v1/models/{model}", "GET /health", "GET /ready",
    "GET /metrics", "GET /version", "GET /status.json",
]  # fmt: skip
CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with serving(
        tmp_path_factory.mktemp("schema"), engine=ScriptEngine(reply=lambda _: "hi", step_s=0.0)
    ) as stage:
        yield stage


@pytest.fixture(scope="module")
def document(api):
    return schemathesis.openapi.from_url(api.url + "/openapi.json")


@pytest.mark.parametrize(
    ("route", "mode"),
    [
        *((route, GenerationMode.POSITIVE) for route in ROUTES),
        *((route, GenerationMode.NEGATIVE) for route in ROUTES if route.startswith("POST")),
    ],
)
def test_made_up_requests_are_answered_as_the_document_says(document, route, mode):
    method, path = route.split()
    operation = document[path][method]

    @settings(
        max_examples=8,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        if mode is GenerationMode.POSITIVE and path.endswith("completions"):
            case.body["model"] = "tiny"  # else all are 404
        case.call_and_validate(checks=CHECKS, timeout=60)

    check()


def test_the_document_describes_every_route_and_body(api):
    document = api.http().get("/openapi.json").json()
    listed = [
        f"{method.upper()} {path}" for path, operations in document["paths"].items() for method in operations
    ]
    assert sorted(listed) == sorted(ROUTES)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert ("requestBody" in operation) == (method == "post"), path
            assert operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].endswith(
                "/Error"
            )
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert chat["required"] == ["model", "messages"]


def test_a_document_of_a_server_with_keys_says_so(tmp_path):
    with serving(tmp_path, api_keys=("k",)) as stage:
        document = stage.http().get("/openapi.json").json()
        assert document["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
        assert "security" not in document["paths"]["/health"]["get"]
