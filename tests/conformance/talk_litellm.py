"""Run in the environment `clients`: LiteLLM against the service at argv[1]; prints what it got as JSON."""

import json
import sys

import litellm

ours = {"model": "openai/specserve-embedded", "api_base": f"{sys.argv[1]}/v1", "api_key": "x"}
asked = {"messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 12, "temperature": 0}
whole = litellm.completion(**ours, **asked)
chunks = list(litellm.completion(**ours, **asked, stream=True, stream_options={"include_usage": True}))
text = litellm.text_completion(
    model="text-completion-openai/specserve-embedded",
    api_base=ours["api_base"],
    api_key="x",
    prompt="def add(",
    max_tokens=8,
    temperature=0,
)
try:
    litellm.completion(**{**ours, "model": "openai/unknown"}, **asked)
except litellm.NotFoundError as error:
    refused = error.status_code
print(
    json.dumps(
        {
            "text": whole.choices[0].message.content,
            "usage": whole.usage.completion_tokens,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            "completed": text.choices[0].text,
            "refused": refused,
        }
    )
)
