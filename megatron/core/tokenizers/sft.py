"""Chat templates that flags choose: --chat-template, and the prompt formats of Megatron-LM's SFTTokenizer."""

from __future__ import annotations

from megatron.core.config.errors import UserError
from megatron.core.safe_files import MAX_TEXT_BYTES, read_text
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.chat import ChatTemplates

_HEADERS = """\
{%- macro head(name) -%}{{ '<SPECIAL_1' ~ ('0>System' if name == 'system' else '1>' ~ name) ~ '\\n' }}{%- endmacro -%}
"""
PROMPT_FORMATS = {
    "identity": "{%- for message in messages %}{{- message['content'] }}{%- endfor %}",
    "nemotron-h-aligned": _HEADERS
    + """\
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{{- head('system') }}
    {%- elif message['role'] == 'user' %}{{- head('User') }}
    {%- endif %}
    {%- if message['role'] in ('system', 'user', 'assistant') %}{{- message['content'].strip() + '\\n' }}{%- endif %}
    {%- if message['role'] == 'user' %}{{- head('Assistant') }}{%- endif %}
{%- endfor %}""",
    "nemotron-nano-v2": _HEADERS
    + """\
{%- for message in messages %}
    {%- set text = message['content'] %}
    {%- if message['role'] in ('system', 'user') %}
        {{- head('system' if message['role'] == 'system' else 'User') }}
        {{- text.replace('/think', '').replace('/no_think', '').strip() + '\\n' }}
    {%- elif message['role'] == 'tool' %}{{- head('User') + '<TOOL_RESPONSE>[' + text + ']</TOOL_RESPONSE>\\n' }}
    {%- else %}{{- head('Assistant') + text.strip() + '\\n<SPECIAL_12>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- head('Assistant') }}{%- endif %}""",
}
"""Name -> chat template; ``default`` is the tokenizer's own. The texts are Megatron-LM's."""


def use_template(tokenizer: Tokenizer, template: str) -> None:
    """Make ``template`` the only chat template of ``tokenizer``."""
    special = {} if tokenizer.chat is None else dict(tokenizer.chat.special_tokens)
    tokenizer.chat = ChatTemplates({"default": template}, special)


def read_template(path: str) -> str:
    """Return the chat template in the file ``path`` of --chat-template. Raises UserError if it cannot be read."""
    try:
        return read_text(path, MAX_TEXT_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--chat-template {path}: cannot be read ({reason}); give a Jinja file") from None
