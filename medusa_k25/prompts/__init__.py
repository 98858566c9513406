"""Prompts from wherever they are: the questions beside this file, a .jsonl or .parquet file, or a `datasets` name.

questions.jsonl holds 502 questions on 26 topics. crossed.json has subjects and questions for 31 more topics; every
question is asked about every subject of its topic.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

PACKAGE, STUDY = "package", "study"
KINDS = {  # of shipped topics; all others are "other"
    "code": {
        *("algorithms", "functions-in-python", "git-commands", "javascript-web", "python-basics", "python-snippets"),
        *("regex", "shell-commands", "sql", "web-development"),
    },
    "maths": {
        *("algebra", "arithmetic", "fractions", "geometry", "interest-and-percentages", "linear-equations"),
        *("number-theory", "statistics", "word-problems"),
    },
}
OTHER_KIND = "other"
MESSAGE_KEYS = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for its next answer: the last message is the user's or a tool's result."""

    id: str
    group: str | None
    messages: list[dict[str, Any]]
    label: str | None = None  # the user's own, such as the kind of traffic
    tools: list[dict[str, Any]] | None = None  # that the answer may call


def kind_of(topic: str | None) -> str:
    """What a topic's answers are: code, maths or other text."""
    return next((kind for kind, topics in KINDS.items() if topic in topics), OTHER_KIND)


def load_prompts(source: str, download: bool = False) -> list[Prompt]:
    """The prompts of `source`: "package" (the 502 shipped ones), "study" (3,194: these and the crossed ones), a .jsonl
    or .parquet file, or a `datasets` name.

    A row is {"prompt": text} or {"messages": [...]}, with an optional "id" (default: a hash of the messages), "topic"
    or "group", "label" and "tools". Messages after the last one of the user or of a tool are left out: the target
    answers itself.
    A `datasets` name takes its train split, from the local datasets cache unless `download` allows the network.

    Raises ValueError for a broken row (with file and line), for duplicate ids and when there is no row at all.
    """
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    for place, row in _rows(source, download):
        prompt = _prompt(row, place)
        if prompt.id in places:
            raise ValueError(
                f"{place}: id {prompt.id!r} was already used at {places[prompt.id]}; ids must be unique "
                "(rows without an id take a hash of their messages, so the same row twice is a duplicate, too)"
            )
        places[prompt.id] = place
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{source} holds no prompts; expected a row for each")
    return prompts


def _rows(source: str, download: bool) -> Iterator[tuple[str, Any]]:
    """(where it stands, row) for every row."""
    if source in (PACKAGE, STUDY):
        folder = resources.files("medusa_k25") / "prompts"
        with resources.as_file(folder / "questions.jsonl") as path:
            yield from json_lines(path)
        if source == STUDY:
            yield from _crossed(json.loads((folder / "crossed.json").read_text()))
    elif source.endswith(".jsonl"):
        yield from json_lines(_existing(source))
    elif source.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(_existing(source))
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{source} is not a Parquet file ({error})") from error
        for number, row in enumerate(table.to_pylist(), start=1):
            yield f"{source}, row {number}", row
    else:
        for number, row in enumerate(_hub_dataset(source, download), start=1):
            yield f"{source}, row {number}", row


def _crossed(topics: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[tuple[str, Any]]:
    """Every question of a topic about every subject of it, in the order of the file."""
    for topic, parts in topics.items():
        for i, subject in enumerate(parts["subjects"]):
            for j, question in enumerate(parts["questions"]):
                name = f"{topic}-{i:02}-{j:02}"
                yield f"prompt {name}", {"id": name, "topic": topic, "prompt": question.format(subject)}


def _existing(source: str) -> Path:
    path = Path(source).expanduser()
    if not path.is_file():
        raise ValueError(f"no prompts at {path.absolute()}: expected a file")
    return path


def json_lines(path: Path, torn_end: bool = False) -> Iterator[tuple[str, Any]]:
    """(place, value) for every line; with `torn_end`, a last line without its newline is not there yet."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            if line.strip() and not (torn_end and not line.endswith(b"\n")):
                try:
                    yield place, json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{place} is not valid JSON ({error}); repair or delete this line") from error


def _hub_dataset(name: str, download: bool) -> Iterable[Any]:
    import datasets

    offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline or not download  # the environment variable is only read at import
    try:
        return datasets.load_dataset(name, split="train")
    except Exception as error:  # from six libraries; what matters is the same for all of them
        fix = "check the name and the network"
        if not download:
            fix = f"fetch it once, with python -c \"import datasets; datasets.load_dataset('{name}')\""
        raise ValueError(
            f"prompts {name!r}: neither 'package', 'study', a .jsonl or .parquet file, nor a dataset that could be "
            f"loaded ({type(error).__name__}: {error}); {fix}"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def _prompt(row: Any, place: str) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f"{place}: expected an object, got {type(row).__name__}")
    messages = row.get("messages")
    if messages is None:
        messages = [{"role": "user", "content": row.get("prompt")}]
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise ValueError(
            f'{place}: expected "prompt" as text or "messages" as a list of {{"role": text, "content": text}}, '
            f"got the keys {sorted(row)}"
        )
    turns = [index for index, message in enumerate(messages) if message["role"] in ("user", "tool")]
    if not turns:
        raise ValueError(f'{place}: none of the {len(messages)} messages has the role "user"')
    messages = [
        {key: message[key] for key in MESSAGE_KEYS if message.get(key) is not None}
        for message in messages[: turns[-1] + 1]
    ]
    tools = row.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f'{place}: expected "tools" as a list of objects, got {type(tools).__name__}')
    group = row.get("topic") if row.get("topic") is not None else row.get("group")
    name, label = row.get("id"), row.get("label")
    if name is None:
        name = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]
    return Prompt(
        id=str(name),
        group=None if group is None else str(group),
        messages=messages,
        label=None if label is None else str(label),
        tools=tools,
    )


def _is_message(message: Any) -> bool:
    """Text of someone; only an answer that calls tools may have none."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), str) or (
        message.get("content") is None and bool(message.get("tool_calls"))
    )
