"""The embedded family's special tokens and chat format, as text and as the template shipped with the tokenizer."""

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, *(f"<|{role}|>" for role in ROLES))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set role = 'system' if message['role'] == 'developer' else message['role'] %}"
    "{% if role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('this model has no role named ' + message['role']) }}{% endif %}"
    "{{ '<|' + role + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def chat_text(user: str, assistant: str) -> str:
    """Return one exchange as the template writes it, closed by the end-of-turn token."""
    return f"<|user|>\n{user}{END_OF_TURN}\n<|assistant|>\n{assistant}{END_OF_TURN}\n"
