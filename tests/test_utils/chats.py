"""Chat templates in four published formats, small tokenizers with their tokens, and files of conversations.

The templates mark answers with ``{% generation %}``: ``transformers`` derives its mask from it, this library does not.
"""

import json
import random

from tests.test_utils.tiny_tokenizers import byte_level_bpe

CHATML = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{- m.content | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}{{- m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content + '\\n\\n' %}{%- set messages = messages[1:] %}
{%- else %}{%- set first = '' %}
{%- endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {%- if m.role == 'assistant' %}
        {{- '<start_of_turn>model\\n' }}
        {%- generation %}{{- m.content | trim + '<end_of_turn>' }}{%- endgeneration %}{{- '\\n' }}
    {%- else %}{{- '<start_of_turn>user\\n' + (first if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{%- generation %}{{- ' ' + m.content + eos_token }}{%- endgeneration %}
    {%- else %}{{- '[INST] ' + m.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}"""
THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- if ns.last < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + (m.reasoning_content or '').strip() + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}
    {%- else %}{{- m.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL}
SPECIAL = (
    "<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<think>", "</think>",
    "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>",
)  # fmt: skip


def tokenizer_folder(folder, template=CHATML, special=SPECIAL):
    """Write a byte-level tokenizer with special tokens and a chat template; return the path of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level_bpe(folder / "tokenizer.json", special=special)
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    if template is None:
        del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **keys):
    return {"role": "assistant", "content": text, **keys}


def sums(count, seed=0, turns=3):
    """Return lines of conversations about sums, of one to ``turns`` questions."""
    draw, lines = random.Random(seed), []
    for _ in range(count):
        messages = []
        for _ in range(draw.randint(1, turns)):
            a, b = draw.randint(0, 20), draw.randint(0, 20)
            messages += [user(f"What is {a} plus {b}?"), assistant(f"{a} plus {b} is {a + b}.")]
        lines.append({"messages": messages})
    return lines


def write_lines(path, lines):
    """Write JSON lines; return the path as text."""
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def preferences(count, seed=0):
    """Return lines of preference pairs: the right sum, and a wrong answer."""
    draw, lines = random.Random(seed), []
    for _ in range(count):
        a, b = draw.randint(0, 20), draw.randint(0, 20)
        wrong = draw.choice(["I do not know.", f"{a + b + 1}", f"It is {a} and {b}, so it is {a * b + 1}."])
        prompt = [user(f"What is {a} plus {b}?")]
        lines.append({
            "prompt": prompt, "chosen": [assistant(f"{a} plus {b} is {a + b}.")], "rejected": [assistant(wrong)]
        })  # fmt: skip
    return lines
