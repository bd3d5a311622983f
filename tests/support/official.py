"""OpenAI's own specification, cut to what is served here, with the errors that it forgets to mention."""

from typing import Any

MODEL = "specserve-embedded"
PATHS = {
    "/chat/completions": ("post",),
    "/completions": ("post",),
    "/models": ("get",),
    "/models/{model}": ("get",),
}
MAX_TOKENS = 8


def cut(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `spec` that is served: any 4xx is an ErrorResponse, and generation is short and of our model.

    Changes `spec` itself.
    """
    spec["paths"] = {path: {method: spec["paths"][path][method] for method in PATHS[path]} for path in PATHS}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
    for methods in spec["paths"].values():
        for operation in methods.values():
            operation.pop("x-oaiMeta", None)
            operation["responses"]["4XX"] = {"description": "An error", "content": error}
    completions = spec["paths"]["/completions"]["post"]["responses"]["200"]["content"]
    completions["text/event-stream"] = {"schema": {"type": "string"}}
    schemas = spec["components"]["schemas"]
    for fields in (schemas["CreateCompletionRequest"], schemas["CreateChatCompletionRequest"]["allOf"][1]):
        fields["properties"]["model"] = {"type": "string", "enum": [MODEL]}
        for limit in ("max_tokens", "max_completion_tokens"):
            fields["properties"][limit] = {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS}
        fields["properties"]["n"] = {"type": "integer", "minimum": 1, "maximum": 2}
    spec["paths"]["/models/{model}"]["get"]["parameters"][0]["schema"] = {"type": "string", "enum": [MODEL, "unknown"]}
    return spec
