"""Whether a server drafts, and with which heads: what its operator orders, and what the acceptance says.

Rank 0 plans between two rounds, every LOOK_EVERY of them; all ranks carry the plan out in the same round, or none does.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_k25.serving.control import CONTROL, CONTROL_FOLDER, Order, Status, write_status
from medusa_k25.serving.sglang.meter import Pays
from medusa_k25.serving.untrusted import parse_object

logger = logging.getLogger(__name__)

LOOK_EVERY = 16  # rounds: half a second of passes of 30 ms
MAX_ORDER_BYTES = 1 << 16


@dataclass(frozen=True)
class Plan:
    """heads: a folder to load first, None to keep those there are. adapts: verify what pays, and off again when nothing
    does; else the whole tree, always. order: the text that asks for it, parsed; None when nobody did. error: why the
    order is refused: then nothing else changes."""

    drafting: bool
    why: str
    adapts: bool
    heads: Path | None = None
    order: Mapping[str, Any] | None = None
    error: str | None = None


class Switch:
    """The state, the same on all ranks. `look` is rank 0's alone. folder: None where no operator named one."""

    def __init__(self, folder: Path | None, heads: Path):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"MEDUSA_K25_CONTROL={folder} is no folder; make it, or leave the variable out")
        self.folder, self.heads, self.started_with = folder, heads, heads
        self.drafting, self.adapts, self.why = True, True, "since the start"
        self.error: str | None = None
        self._order: Mapping[str, Any] | None = None
        self._seen: object = None  # of control.json, when it was last read
        self._loaded = _stamp(heads)

    def look(self, pays: Pays | None, judge: Callable[[Path], None]) -> Plan | None:
        """What is to change; None: nothing. judge: ValueError for a folder that cannot be drafted from."""
        found = self._read()
        if found is not None and found != self._seen:
            self._seen = found
            return self._ordered(found[-1], judge)
        if self.drafting and self.adapts and pays is not None and pays.ratio < 1:
            return Plan(
                False,
                f"{pays.length:.3f} tokens a cycle over the newest {pays.cycles:,} cycles make {pays.ratio:.3f} times "
                "the speed without drafting, by the costs of the export; "
                + ("restart the server" if self.folder is None else f"write {CONTROL} anew")
                + " to draft again",
                True,
                order=self._order,
            )
        return None

    def _read(self) -> tuple[int, int, bytes | str] | None:
        """(its file, when it was written, the text of control.json or why it cannot be read); None: there is none."""
        if self.folder is None:
            return None
        try:
            with (self.folder / CONTROL).open("rb") as opened:
                about = os.fstat(opened.fileno())
                return about.st_ino, about.st_mtime_ns, opened.read(MAX_ORDER_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            return 0, 0, f"{self.folder / CONTROL} cannot be read: {error.strerror}"

    def _ordered(self, text: bytes | str, judge: Callable[[Path], None]) -> Plan:
        assert self.folder is not None
        order, found, heads = Order(), dict[str, Any](), None
        try:
            if isinstance(text, str):
                raise ValueError(text)
            if len(text) > MAX_ORDER_BYTES:
                raise ValueError(f"{self.folder / CONTROL} is larger than {MAX_ORDER_BYTES:,} bytes; no order is")
            read = parse_object(text, self.folder / CONTROL)
            order, found = Order.from_json(read, self.folder / CONTROL), read
            if order.drafting != "off":  # which must not fail over a folder: heads come with the next order
                heads = self.started_with if order.heads is None else Path(order.heads)
                if heads == self.heads and _stamp(heads) == self._loaded:
                    heads = None
                else:
                    judge(heads)
        except (ValueError, OSError) as error:  # the latter: a folder that this user may not enter, a name too long
            why = str(error).replace("fetch it again", "write it anew")
            return Plan(self.drafting, self.why, self.adapts, order=found, error=why)
        return Plan(order.drafting != "off", f"{CONTROL} says {order.drafting}", order.drafting == "auto", heads, found)

    def carry_out(self, plan: Plan, error: str | None = None) -> None:
        """error: why the plan's heads could not be loaded on some rank: then all stays as it is."""
        self._order, self.error = plan.order, error or plan.error
        if self.error is None:
            self.drafting, self.why, self.adapts = plan.drafting, plan.why, plan.adapts
            if plan.heads is not None:
                self.heads, self._loaded = plan.heads, _stamp(plan.heads)

    def tell(self, up_to: int | None = None) -> None:
        """Rank 0: into the log, and into status.json where there is a folder. A full disk stops no server.

        up_to: the largest number of requests for which the heads' rule drafts; None: they have none.
        """
        why = self.why
        if self.drafting and self.adapts and up_to is not None:
            why += f"; by the rule of these heads for at most {up_to} requests at a time"
        status = Status("on" if self.drafting else "off", why, str(self.heads), self.error, self._order)
        if status.error is not None:
            logger.error("MEDUSA: an order is refused, nothing changes: %s", status.error)
        else:
            logger.info("MEDUSA: drafting is %s with %s: %s", status.drafting, status.heads, status.why)
        if self.folder is not None:
            try:
                write_status(self.folder, status)
            except OSError as error:
                logger.error("MEDUSA: status.json cannot be written: %s", error)


def control_folder() -> Path | None:
    return Path(os.environ[CONTROL_FOLDER]) if os.environ.get(CONTROL_FOLDER) else None


def _stamp(folder: Path) -> list[tuple[str, int, int]]:
    """Which files an export has and when they were written: others in the same folder are other heads."""
    files = [folder / "config.json", *folder.glob("*.safetensors")]  # an operator's orders may lie in the same folder
    found = [(file.name, file.stat()) for file in files if file.exists()]
    return sorted((name, about.st_size, about.st_mtime_ns) for name, about in found)
