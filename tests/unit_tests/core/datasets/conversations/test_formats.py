"""Formats of conversations: equal content gives equal messages; bad lines give one message with file and line."""

import json
import multiprocessing
import time
from pathlib import Path

import pytest

from megatron.core.config.errors import UserError
from megatron.core.datasets.conversations.formats import Conversation, Text, check_conversation, recognize
from megatron.core.datasets.conversations.prepare import MAX_LINE_BYTES, Report, prepared, read_lines
from megatron.core.tokenizers.huggingface import build_huggingface
from tests.test_utils.chats import THINKING, assistant, sums, tokenizer_folder, user, write_lines

SYSTEM = {"role": "system", "content": "Be brief."}
MESSAGES = [SYSTEM, user("a\nb"), assistant("c")]
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def read(line):
    return list(recognize(line).read(line))


@pytest.mark.parametrize(
    "line",
    [
        {"messages": MESSAGES},
        {"conversations": [{"from": "human", "value": "a\nb"}, {"from": "gpt", "value": "c"}], "system": "Be brief."},
        {"conversations": MESSAGES},
        {"instruction": "a", "input": "b", "output": "c", "system": "Be brief."},
    ],
)
def test_chat_formats_give_the_same_messages(line):
    (chat,) = read(line)
    assert list(chat.messages) == MESSAGES and chat.first_answer == 0


def test_history_comes_first():
    (chat,) = read({"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]]})
    assert list(chat.messages) == [user("a"), assistant("b"), user("c"), assistant("d")]


def test_prompt_and_completion_and_text():
    assert read({"prompt": "a", "completion": "b"}) == [Text("b", "a")]
    assert read({"text": "a"}) == [Text("a")]
    (chat,) = read({"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d")]})
    assert chat == Conversation([user("a"), assistant("b"), user("c"), assistant("d")], None, 3)


def test_system_message_starts_a_further_conversation():
    """Megatron-LM's files have several conversations in a line."""
    first, second = read({"messages": [*MESSAGES, *MESSAGES]})
    assert list(first.messages) == list(second.messages) == MESSAGES


def test_arguments_and_tools_may_be_json_text():
    (chat,) = read({"messages": [user("a"), assistant(None, tool_calls=[CALL])], "tools": json.dumps([TOOL])})
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1} and chat.tools == [TOOL]
    value = '{"name": "add", "arguments": {"a": 1}}'
    turns = [{"from": "human", "value": "a"}, {"from": "function_call", "value": value}]
    (chat,) = read({"conversations": turns, "tools": [TOOL]})
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


GOOD = {"messages": MESSAGES}
BAD = {
    "unknown keys": (
        {"question": "a", "answer": "b"},
        "has no known keys .it has answer, question.; a line has one of",
    ),
    "mixed keys": ({**GOOD, "text": "a"}, "has the keys of several formats, messages and plain text"),
    "preferences": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "is a preference pair"),
    "mixed formats": ({"text": "a"}, "has the format plain text, line 1 has messages"),
    "no JSON": ("{'messages': []}\n", "is no JSON: "),
    "no object": ("[1]\n", "is no JSON object but a list"),
    "not UTF-8": ("\udcff\n", "is no JSON: "),
    "a tool call without tools": ({"messages": [user("a"), assistant("", tool_calls=[CALL])]}, "has no tools; add"),
    "no user": ({"messages": [SYSTEM, assistant("b")]}, "an assistant message without a user message before it"),
    "assistant twice": ({"messages": [user("a"), assistant("b"), assistant("c")]}, "roles out of order: assistant"),
    "tool after user": (
        {"messages": [user("a"), {"role": "tool", "content": "b"}]},
        "roles out of order: tool follows",
    ),
    "late developer": ({"messages": [user("a"), {"role": "developer", "content": "b"}]}, "must be the first message"),
    "a role": ({"messages": [{"role": "bot", "content": "a"}]}, "role is 'bot'; it must be one of system"),
    "a source": ({"conversations": [{"from": "alien", "value": "a"}]}, "from is 'alien'; it must be one of"),
    "no content": ({"messages": [{"role": "user", "contents": "a"}]}, r"messages\[0\]: has no content"),
    "a number": ({"messages": [user(1)]}, "content must be a text or a list of parts"),
    "a weight": ({"messages": [user("a"), assistant("b", weight=2)]}, "weight is 2; it must be 0 or 1"),
    "arguments": (
        {"messages": [user("a"), assistant("", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])]},
        "arguments of a tool call is no JSON",
    ),
    "text and messages": ({"prompt": "a", "completion": [assistant("b")]}, "must be two texts or two lists"),
    "a list": ({"messages": "a"}, "messages: must be a list of messages"),
    "a pair": ({"instruction": "a", "output": "b", "history": [["a"]]}, "history: must be a list of pairs"),
    "tools": ({**GOOD, "tools": "["}, "tools: is no JSON"),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_huggingface(tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("name", BAD)
def test_bad_line_is_named(tmp_path, tokenizer, name):
    line, message = BAD[name]
    text = line if isinstance(line, str) else json.dumps(line) + "\n"
    path = tmp_path / "chats.jsonl"
    path.write_bytes((json.dumps(GOOD) + "\n\n" + text).encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=f"^{path}, line 3: .*{message}"):
        prepared(str(path), tokenizer, None)


def test_template_without_a_user_turn_is_named(tmp_path):
    tokenizer = build_huggingface(tokenizer_folder(tmp_path / "tokenizer", THINKING.replace("'user'", "'human'")))
    path = write_lines(tmp_path / "chats.jsonl", [GOOD])
    with pytest.raises(UserError, match="line 1: .*rejects the messages: No user query found in messages"):
        prepared(path, tokenizer, None)


def test_tokenizer_without_template_is_named(tmp_path):
    tokenizer = build_huggingface(tokenizer_folder(tmp_path / "tokenizer", None))
    with pytest.raises(UserError, match="line 1: .*has no chat template; .*--chat-template"):
        prepared(write_lines(tmp_path / "chats.jsonl", [GOOD]), tokenizer, None)


def test_line_of_10_megabytes_is_named(tmp_path, tokenizer):
    path = write_lines(tmp_path / "chats.jsonl", [GOOD, {"text": "a" * 10_000_000}])
    with pytest.raises(UserError, match=f"line 2: is longer than {MAX_LINE_BYTES >> 20} MiB"):
        list(read_lines(path))


def test_missing_file_is_named(tmp_path, tokenizer):
    with pytest.raises(UserError, match="nothing.jsonl: cannot be read"):
        prepared(str(tmp_path / "nothing.jsonl"), tokenizer, None)


def test_everything_left_out_is_counted(tmp_path):
    tokenizer = build_huggingface(tokenizer_folder(tmp_path / "tokenizer", THINKING))
    lines = [GOOD, "\n", {"messages": []}, {"messages": [user("a")]}, {**GOOD, "id": 7},
             {"messages": [user("a"), assistant("b"), user("c"), assistant("d", weight=0)], "id": 8},
             {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]},
             {"messages": [user("a"), assistant("b", weight=0)]}]  # fmt: skip
    arrays, report, _ = prepared(write_lines(tmp_path / "chats.jsonl", lines), tokenizer, None)
    assert arrays["lines"].tolist() == [1, 5, 6, 7, 7]
    assert report.lines == 8 and report.conversations == 7
    assert report.counts == {"blank": 2, "without_answer": 2, "key id": 2, "rendered_separately": 1}
    assert report.first == {"blank": 2, "without_answer": 4, "key id": 5, "rendered_separately": 7}
    text = "\n".join(report.text())
    assert "2 conversations without an answer to train on, left out (first: line 4)" in text
    assert "2 lines with the key id, which is not read (first: line 5)" in text


def test_reports_of_later_lines_keep_the_first_line():
    first, later = Report(), Report()
    for report, lines in ((first, (2, 5)), (later, (300, 301))):
        for line in lines:
            report.count("blank", line)
    later.count("changed", 302)
    first.formats, later.formats = {"messages": 1}, {"messages": 257}
    first.add(later)
    assert first.counts == {"blank": 4, "changed": 1} and first.first == {"blank": 2, "changed": 302}
    assert first.formats == {"messages": 1}


def test_an_answer_may_have_several_tool_calls():
    tools = [{"role": "tool", "content": result} for result in "12"]
    check_conversation(Conversation([user("a"), assistant("", tool_calls=[CALL] * 2), *tools, assistant("b")], [TOOL]))


def test_texts_and_answers_without_a_label_are_counted(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = build_huggingface(tokenizer_folder(tmp_path / "tokenizer", template))
    end = tokenizer.detokenize([tokenizer.eod])
    lines = [{"text": end}, {"text": f"a{end}"}, {"text": end}]
    arrays, report, _ = prepared(write_lines(tmp_path / "texts.jsonl", lines), tokenizer, None)
    assert arrays["lines"].tolist() == [2] and report.counts == {"blank": 2} and report.first == {"blank": 1}
    chats = [{"messages": [user(""), assistant(end)]}, {"messages": [user("a"), assistant("b")]}]
    arrays, report, _ = prepared(write_lines(tmp_path / "chats.jsonl", chats), tokenizer, None)
    assert arrays["lines"].tolist() == [2] and report.counts == {"without_answer": 1}


def test_message_that_a_template_drops_is_counted(tmp_path):
    template = (
        "{%- for m in messages if m.role != 'system' %}{{- '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    tokenizer = build_huggingface(tokenizer_folder(tmp_path / "tokenizer", template))
    _, report, _ = prepared(write_lines(tmp_path / "chats.jsonl", [GOOD]), tokenizer, None)
    assert report.counts == {"changed": 1}


def test_processes_give_the_same_arrays(tmp_path, tokenizer, monkeypatch):
    path = write_lines(tmp_path / "chats.jsonl", sums(700))
    one, *_ = prepared(path, tokenizer, str(tmp_path / "one"))
    monkeypatch.setattr("megatron.core.datasets.conversations.prepare.PARALLEL_BYTES", 1)
    several, *_ = prepared(path, tokenizer, str(tmp_path / "several"))
    assert all((one[name] == several[name]).all() for name in ("tokens", "lengths", "lines"))


def test_stored_arrays_are_used_until_file_tokenizer_or_template_change(tmp_path, tokenizer, monkeypatch):
    path = write_lines(tmp_path / "chats.jsonl", sums(3))
    keys = {prepared(path, tokenizer, None)[2]}
    with monkeypatch.context() as patch:
        patch.setattr("megatron.core.datasets.conversations.prepare.tokenize_lines", None)
        keys.add(prepared(path, tokenizer, None)[2])
    assert len(keys) == 1
    keys.add(prepared(path, build_huggingface(tokenizer_folder(tmp_path / "other", THINKING)), None)[2])
    write_lines(tmp_path / "chats.jsonl", sums(4))
    keys.add(prepared(path, tokenizer, None)[2])
    assert len(keys) == 3


def children(pid):
    """Running child processes of a process."""
    try:
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(child) for child in pids if is_running(int(child))]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_killed_preparation_leaves_no_process_and_can_be_repeated(tmp_path, tokenizer, monkeypatch):
    path = write_lines(tmp_path / "chats.jsonl", sums(20_000))
    monkeypatch.setattr("megatron.core.datasets.conversations.prepare.PARALLEL_BYTES", 1)
    process = multiprocessing.get_context("fork").Process(target=prepared, args=(path, tokenizer, None))
    process.start()
    while not (workers := children(process.pid)) and process.is_alive():
        time.sleep(0.02)
    assert workers, "finished before it could be killed"
    process.kill()
    process.join()
    deadline = time.monotonic() + 20
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
    assert not list((tmp_path / "chats.jsonl.cache").glob("*description*"))
    write_lines(tmp_path / "chats.jsonl", sums(5))
    assert len(prepared(path, tokenizer, None)[0]["lines"]) == 5
