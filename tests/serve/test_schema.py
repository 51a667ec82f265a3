"""Requests that are made from the OpenAPI schema, valid and invalid ones, cause no internal error."""

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from serving import MODEL, chat_session, running

TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def shortened(case):
    """A request that is for the served model, as most would otherwise end there, and whose answer is short."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL
        for name in TOKENS:
            if isinstance(case.body.get(name), int) and case.body[name] > 20:
                case.body[name] = 20
        case.body.setdefault("max_tokens" if "input" not in case.body else "max_output_tokens", 20)
    return case


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["positive", "negative"])
def test_no_request_causes_an_internal_error(tmp_path, kind):
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi import checks

    chosen = [
        schemathesis.checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    operations = set()
    with running(chat_session(tmp_path), tmp_path / "data", {"max_body": 20_000, "timeout": 20}) as served:
        schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        for result in schema.get_all_operations():
            operation = result.ok()
            mode = GenerationMode.POSITIVE if kind == "positive" else GenerationMode.NEGATIVE

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            def check(case):
                shortened(case).call_and_validate(checks=chosen, timeout=60)

            with suppress(Unsatisfiable):  # requests that have nothing to be wrong
                check()
                operations.add((operation.method, operation.path))
        assert len(operations) >= (17 if kind == "positive" else 10)
