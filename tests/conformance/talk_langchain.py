"""Run in the environment `clients`: LangChain against the service at argv[1]; prints what it got as JSON."""

import json
import sys

from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    model="specserve-embedded",
    base_url=f"{sys.argv[1]}/v1",
    api_key="x",
    temperature=0,
    max_completion_tokens=12,
    service_tier="priority",
)
whole = model.invoke("Say hello")
chunks = list(model.stream("Say hello", stream_usage=True))
print(
    json.dumps(
        {
            "text": whole.content,
            "usage": whole.usage_metadata,
            "tier": whole.response_metadata.get("service_tier"),
            "streamed": "".join(chunk.content for chunk in chunks),
            "streamed_usage": next((chunk.usage_metadata for chunk in chunks if chunk.usage_metadata), None),
        }
    )
)
