"""The switch of a running server: two files in the folder that its operator names in MEDUSA_K25_CONTROL.

control.json  the operator's: {"drafting": "auto", "heads": "/folder/of/an/export"}. Both keys may be left out.
              drafting: "auto" (the default): every cycle verifies as much as pays by the export's own rule, and
              drafting ends when over thousands of cycles, by the costs that the export knows, nothing did (an export
              without a rule always verifies the whole tree); "on": the whole tree, always; "off".
              heads: the export to draft with; none: the one that the server was started with.
status.json   the server's answer, see `Status`.

A server looks at the file every 16 passes, so an idle one answers with its next requests; the folder should be a
local one. Each file that is put there is one order: it is carried out or refused once, and a refusal changes nothing,
nor does taking the file away. "off" is never refused for its heads: they come with the next order. Write it by a
rename, as `give_order` does. While other heads are read, a second or so, all requests wait. Relative folders are the
server's.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from medusa_k25.serving.untrusted import read_json

CONTROL_FOLDER = "MEDUSA_K25_CONTROL"
CONTROL, STATUS = "control.json", "status.json"
NODES = "medusa_nodes"  # in a request's meta_info: the nodes of every pass, see `meter.note_nodes`
DRAFTING = ("auto", "on", "off")


@dataclass(frozen=True)
class Order:
    drafting: str = "auto"
    heads: str | None = None

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], where: Path) -> "Order":
        """ValueError for other keys and other values."""
        if unknown := entry.keys() - {field.name for field in fields(cls)}:
            raise ValueError(f"{where}: expected the keys drafting and heads, got {', '.join(map(ascii, unknown))}")
        order = cls(entry.get("drafting", "auto"), entry.get("heads"))
        if order.drafting not in DRAFTING:
            raise ValueError(f"{where}: drafting is {order.drafting!r:.100}, expected one of {', '.join(DRAFTING)}")
        if order.heads is not None and not (isinstance(order.heads, str) and order.heads):
            raise ValueError(f"{where}: heads is {order.heads!r:.100}, expected the name of a folder")
        return order


@dataclass(frozen=True)
class Status:
    """What a server does, since its last look at control.json.

    drafting: "on" or "off". why: in words. heads: the export folder in use. error: why the latest order was refused.
    order: that one, as it was read, None where there is no file yet; a file that is no order is {}.
    """

    drafting: str
    why: str
    heads: str
    error: str | None = None
    order: Mapping[str, Any] | None = None


def give_order(folder: Path, order: Order) -> None:
    """Write control.json, all of it at once."""
    _write(folder / CONTROL, {key: value for key, value in asdict(order).items() if value is not None})


def last_order(folder: Path) -> Order | None:
    """What control.json says; None: there is none. ValueError for one that says nothing."""
    file = folder / CONTROL
    return Order.from_json(read_json(file), file) if file.exists() else None


def write_status(folder: Path, status: Status) -> None:
    _write(folder / STATUS, asdict(status))


def read_status(folder: Path) -> Status | None:
    """None before the server's first look. ValueError for a file that no server wrote."""
    file = folder / STATUS
    if not file.exists():
        return None
    entry = read_json(file)
    if entry.keys() != {field.name for field in fields(Status)}:
        raise ValueError(f"{file} is not what a server with this version of medusa-k25 writes")
    return Status(**entry)


def _write(file: Path, content: Mapping[str, Any]) -> None:
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(file)
