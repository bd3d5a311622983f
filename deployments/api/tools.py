"""Tools in the form that Hermes and Qwen templates use: `<tool_call>`, a JSON object of name and arguments,
`</tool_call>`, in the model's text."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specserve.service.errors import BadRequestError
from specserve.service.json_schema import grammar_text, json_rule

BEGIN, END = "<tool_call>", "</tool_call>"
TAIL = "}\n" + END
MAX_TOOLS = 128
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(BaseModel):
    """A function that the model may call; its arguments follow `parameters`, `strict` or not."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """One entry of `tools`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    """The function of a named choice."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: Name


class NamedChoice(BaseModel):
    """`tool_choice` that names the tool to call."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(BaseModel):
    """What an earlier turn called; `arguments` is JSON, as it was answered."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One call of an earlier assistant turn."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: str
    type: Literal["function"]
    function: CalledFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools one request offers. `demanded` are those of which one must be called; empty when none must."""

    tools: tuple[Tool, ...]
    demanded: tuple[Tool, ...]
    parallel: bool

    def grammar(self) -> str:
        """Return the grammar of an answer that is nothing but calls. Raises: BadRequestError naming `tools`."""
        rules = [f"start: call{'' if not self.parallel else ' (BREAK call)*'}", 'BREAK: "\\n"']
        names = [f"call_{place}" for place in range(len(self.demanded))]
        rules.append(f"call: {' | '.join(names)}")
        for name, tool in zip(names, self.demanded, strict=True):
            head = f'{BEGIN}\n{{"name": {json.dumps(tool.function.name)}, "arguments": '
            schema = {"type": "object", **(tool.function.parameters or {})}
            rules.append(f"{name}: {json.dumps(head)} {json_rule(schema, 'tools')} {json.dumps(TAIL)}")
        return grammar_text("\n".join(rules))


def toolbox(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None, template: str | None
) -> Toolbox | None:
    """Return the tools that the model is to be shown; None when there are none, or none may be called.

    Raises: BadRequestError naming the field, also when the chat template cannot show tools in our form.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequestError("tool_choice needs tools", "tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise BadRequestError(f"at most {MAX_TOOLS} tools a request", "tools")
    if not renders_tools(template):
        raise BadRequestError(f"this model's chat template does not render tools as {BEGIN}", "tools")
    if choice == "none":
        return None
    demanded: tuple[Tool, ...] = tuple(tools) if choice == "required" else ()
    if isinstance(choice, NamedChoice):
        demanded = tuple(tool for tool in tools if tool.function.name == choice.function.name)[:1]
        if not demanded:
            raise BadRequestError(f"there is no tool named {choice.function.name!r}", "tool_choice")
    return Toolbox(tuple(tools), demanded, parallel is not False and choice == "required")


def renders_tools(template: str | None) -> bool:
    """Return whether a chat template shows tools, and asks for calls in our form."""
    return template is not None and "tools" in template and BEGIN in template


def shown_calls(calls: Sequence[ToolCall], param: str) -> list[dict[str, Any]]:
    """Return earlier calls as templates want them, arguments as objects. Raises: BadRequestError naming `param`."""
    shown = []
    for call in calls:
        try:
            arguments = json.loads(call.function.arguments)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise BadRequestError("the arguments of a call must be a JSON object", param)
        shown.append({"type": "function", "function": {"name": call.function.name, "arguments": arguments}})
    return shown


@dataclass(slots=True)
class CallReader:
    """Takes an answer's text as it comes and tells content from calls. What is no proper call stays content."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    content: str = ""
    _held: str = ""

    def read(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return the content that may go out now and the calls completed; `last` says that no text follows."""
        self._held += text
        shown = ""
        found: list[dict[str, Any]] = []
        while (start := self._held.find(BEGIN)) >= 0 and (end := self._held.find(END, start)) >= 0:
            before, body = self._held[:start], self._held[start + len(BEGIN) : end]
            call = _call(body)
            if call is None:
                shown += self._held[: end + len(END)]
            else:
                shown += "" if self.calls or found else before.rstrip()
                found.append({"index": len(self.calls) + len(found), **call})
            self._held = self._held[end + len(END) :]
        free = len(self._held) if last else self._free()
        rest, self._held = self._held[:free], self._held[free:]
        shown += "" if (self.calls or found) and not rest.strip() else rest
        self.calls += found
        self.content += shown
        return shown, found

    def _free(self) -> int:
        """Return how much of the held text cannot belong to a call that is still to come."""
        start = self._held.find(BEGIN)
        if start < 0:
            start = len(self._held)
            for length in range(min(len(BEGIN) - 1, len(self._held)), 0, -1):
                if self._held.endswith(BEGIN[:length]):
                    start -= length
                    break
        return len(self._held[:start].rstrip())


def _call(body: str) -> dict[str, Any] | None:
    """Return OpenAI's object for one call; None when `body` is not a name with arguments."""
    try:
        said = json.loads(body)
    except ValueError:
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    arguments = said.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    function = {"name": said["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
