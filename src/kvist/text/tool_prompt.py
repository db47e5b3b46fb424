"""Tools and calls for chat templates that know none of them, written out in the Hermes form, which needs no special tokens.

Pure functions over messages. What they write is what `tool_formats.HERMES` reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_HEAD = """# Tools

You may call one or more functions to help with the user's request. The functions, as JSON, are between <tools> and </tools>:
<tools>
"""
_FOOT = """
</tools>

To call a function, answer with its name and arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{"name": "function name", "arguments": {"argument": "value"}}
</tool_call>"""


def describe_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with the tools told in a system message, behind what it already says."""
    text = _HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _FOOT
    if messages and messages[0].get("role") in ("system", "developer") and isinstance(messages[0].get("content"), str):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def spell_out_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with calls as text of the assistant, and what tools said as text of the user; one message for each run of it."""
    spelled: list[Message] = []
    answering = False
    for message in messages:
        if message.get("role") in ("tool", "function"):
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if answering:
                spelled[-1]["content"] += f"\n{text}"
            else:
                spelled.append({"role": "user", "content": text})
            answering = True
            continue
        answering = False
        if calls := message.get("tool_calls"):
            written = [f"<tool_call>\n{_call(call['function'])}\n</tool_call>" for call in calls]
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**plain, "content": "\n".join([*([message["content"]] if message["content"] else []), *written])}
        spelled.append(message)
    return spelled


def _call(function: Mapping[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
