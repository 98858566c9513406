"""Replay conversations through a server that records (`medusa_k25.serving.sglang.record`), prefill only.

The server writes the cache, on its own disk. From here come the tokens, and what each document is to say about itself.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from tqdm import tqdm

from medusa_k25.cache.alignment import self_check
from medusa_k25.cache.capture import (
    Answers,
    CaptureReport,
    Row,
    first_state,
    read_answers,
    require_space,
    row_length,
    stored_ids,
)
from medusa_k25.cache.reader import Cache
from medusa_k25.server import Refused, Server
from medusa_k25.target import IN_A_CACHE, Target, target_differences

KEY = "medusa_k25"  # of the server's state, and of a request's mark
POLL_S = 0.5
MEMORY_FULL = "memory full"  # among the reasons for which the server drops documents
BUSY = 0.5  # of the server's memory for states: no more requests until its disk has caught up


@dataclass(frozen=True)
class Plan:
    answers: Answers
    server: list[dict[str, Any]]  # what it says about its recording, an entry a data-parallel rank
    seen_here: bool  # whether its folder is
    todo: list[Row]


@dataclass(frozen=True)
class Replay:
    """server: its address, such as http://127.0.0.1:30000. concurrency: requests at a time.

    retries: of a request that did not reach the server or found it failing, and of documents that the server dropped
    because its disk was slow. timeout_s: of a request, and of a cache that does not grow although it should.
    leave_out: as in `Capture`.
    """

    server: str
    concurrency: int = 32
    retries: int = 5
    timeout_s: float = 600.0
    leave_out: Sequence[str] = ()

    def __post_init__(self) -> None:
        Server(self.server)  # refuses what is no address

    def plan(self, target: Target, conversations: Path, cache: Path) -> "Plan":
        """What is to be sent; prints what it takes where the server's folder can be seen, and sends nothing.

        ValueError when the server does not record, records another target or into another cache, or when its disk is
        too small.
        """
        answers = read_answers(conversations, target, self.leave_out)
        server = self._states()
        seen_here = self._sees(cache, target, server)
        stored = stored_ids(cache) if seen_here else set()
        todo = [row for row in answers.rows if row["id"] not in stored]
        if seen_here and todo:
            require_space(cache, target.hidden_size, server[0]["storage_dtype"], todo, server[0]["storage"])
        return Plan(answers, server, seen_here, todo)

    def run(self, target: Target, conversations: Path, cache: Path) -> CaptureReport:
        """Let the server record every conversation that `cache` lacks, check the cache, and print the counts.

        cache: where the server's folder is seen from here. When it is not, everything is sent (the server skips what
        it has), and the check has to be made where the cache lies.
        ValueError as in `plan`, when it kept dropping documents, and when the check fails. OSError when the server is
        gone: the same command continues.
        """
        started = time.perf_counter()
        plan = self.plan(target, conversations, cache)
        answers, before, seen_here, todo = plan.answers, plan.server, plan.seen_here, plan.todo
        folders = sorted({state["folder"] for state in before})
        storage = before[0]["storage"]
        skipped = len(answers.rows) - len(todo)

        refusals: dict[str, str] = {}
        missing, states, dropped = todo, before, dict[str, int]()
        with tqdm(desc="replay", unit="B", unit_scale=True, smoothing=0.1) as bar:
            for attempt in range(self.retries + 1):
                bar.total = bar.n + sum(self._bytes(target, row, before[0]) for row in missing)
                refusals |= self._send(missing, target, before[0], bar)
                states, earlier = self._settled(), states
                dropped = _difference(earlier, states)
                if not seen_here:
                    break
                stored = stored_ids(cache)
                missing = [row for row in missing if row["id"] not in stored and row["id"] not in refusals]
                if sum(dropped.values()) - dropped.get(MEMORY_FULL, 0) >= len(missing):  # another try would not help
                    refusals |= {row["id"]: f"dropped: {', '.join(dropped)}" for row in missing}
                    missing = []
                if not missing:
                    break
                time.sleep(min(POLL_S * 2**attempt, 30))
        if (seen_here and missing) or (not seen_here and dropped):
            raise ValueError(
                f"{len(missing) if seen_here else sum(dropped.values())} of {len(todo)} conversations were not "
                f"recorded; the server dropped {dropped or 'nothing'}. Run the same command again, with more memory "
                "for the server's recording (MEDUSA_K25_RECORD_GB) or a faster disk where that was full"
            )
        for id, reason in list(refusals.items())[:3]:
            print(f"refused by the server: {id!r}: {reason}")
        known = 0 if seen_here else sum(state["known"] for state in states) - sum(state["known"] for state in before)
        recorded = [row for row in todo if row["id"] not in refusals]
        report = CaptureReport(
            stored=len(recorded) - known,
            skipped=skipped + known,
            **answers.counts,
            states=sum(row_length(row) - 1 - first_state(row, storage) for row in recorded),
            tokens=sum(map(row_length, recorded)),
            seconds=time.perf_counter() - started,
            check=self_check(Cache.open(cache, target, check=False), target) if seen_here else None,
            refused=len(refusals),
        )
        print(report)
        if seen_here:
            print(f"-> {cache}")
        else:
            print(
                f"the server wrote to {', '.join(folders)} on its own machine, which is not {cache} here. There, or "
                f"after copying it to {cache}, run the same command again: it finds all stored, and checks it"
            )
        return report

    def _send(self, rows: Sequence[Row], target: Target, state: dict[str, Any], bar: Any) -> dict[str, str]:
        """Send all rows, at most `concurrency` at a time and none while the server's disk is behind.

        Returns the server's refusals, by id.
        """
        refusals: dict[str, str] = {}
        sent: dict[Future[None], Row] = {}

        def collect(count: int) -> None:
            while len(sent) > count:
                for future in wait(sent, return_when=FIRST_COMPLETED).done:
                    row = sent.pop(future)
                    try:
                        future.result()
                    except Refused as refusal:
                        refusals[row["id"]] = str(refusal)
                    bar.update(self._bytes(target, row, state))

        looked = time.monotonic()
        with ThreadPoolExecutor(self.concurrency) as pool:
            try:
                for row in rows:
                    collect(self.concurrency - 1)
                    if time.monotonic() - looked > POLL_S:
                        self._until_not_busy()
                        looked = time.monotonic()
                    sent[pool.submit(self._replay, row)] = row
                collect(0)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return refusals

    def _bytes(self, target: Target, row: Row, state: dict[str, Any]) -> int:
        return (row_length(row) - 1 - first_state(row, state["storage"])) * target.hidden_size * state["state_itemsize"]

    def _replay(self, row: Row) -> None:
        mark = {
            "id": row["id"],
            "group": row["group"],
            "prompt_length": len(row["prompt_ids"]),
            "finish_reason": row["finish_reason"],
            "sampling": json.dumps(row["sampling"]),
            "dtype": row["dtype"],
            "label": row["label"],
            "origin": json.dumps(row["origin"]),
        }
        request = {
            "input_ids": row["prompt_ids"] + row["answer_ids"],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "custom_params": {KEY: mark}},
            "extra_key": f"{KEY} {uuid4()}",  # of its prefix cache: nobody's tokens are reused, all states are computed
        }
        self._call("/generate", request)

    def _call(self, path: str, content: dict[str, Any] | None = None) -> Any:
        return Server(self.server, self.retries, self.timeout_s).call(path, content)

    def _states(self) -> list[dict[str, Any]]:
        """What the server says about its recording, an entry a data-parallel rank."""
        try:
            info = self._call("/server_info")
        except Refused as refusal:
            raise ValueError(f"{self.server}/server_info: {refusal}; expected an SGLang server") from None
        states = [state[KEY] for state in info.get("internal_states", []) if KEY in state]
        if not states:
            raise ValueError(
                f"{self.server} does not record; start it with MEDUSA_K25_RECORD=FOLDER in its environment, where "
                "medusa-k25 is installed"
            )
        if any(state["failed"] for state in states):
            raise ValueError(f"recording has failed in {self.server}; its log says why, start it again")
        return states

    def _until_not_busy(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        while any(state["memory_used"] > BUSY * state["memory"] for state in self._states()):
            if time.monotonic() > deadline:
                raise OSError(f"the disk of {self.server} has taken nothing for {self.timeout_s:.0f} s")
            time.sleep(POLL_S)

    def _settled(self) -> list[dict[str, Any]]:
        """The server's counts when all it has is on disk."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            states = self._states()
            if not any(state["waiting"] or state["running"] for state in states):
                return states
            if time.monotonic() > deadline:
                raise OSError(f"the disk of {self.server} has taken nothing for {self.timeout_s:.0f} s")
            time.sleep(POLL_S)

    def _sees(self, cache: Path, target: Target, states: list[dict[str, Any]]) -> bool:
        """Whether `cache` is the folder that the server writes to. ValueError if it is another, or another target's."""
        facts = states[0]["target"]
        wanted = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        wrong = [name for name, value in wanted.items() if facts[name] != value]
        if wrong := wrong + target_differences(facts, target.identity, IN_A_CACHE):
            raise ValueError(
                f"{self.server} serves {facts['name']}, which differs from target {target.name} in {', '.join(wrong)}; "
                "pick the target that it serves"
            )
        manifest = cache / "manifest.json"
        if not manifest.exists():
            return False
        if hashlib.sha256(manifest.read_bytes()).hexdigest() != states[0]["manifest_sha256"]:
            raise ValueError(
                f"{cache} is another cache than the one that {self.server} records to, {states[0]['folder']} there; "
                "name that folder as cache=, or one that does not exist if it cannot be seen from here"
            )
        return True


def _difference(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, int]:
    """How many documents more were dropped for each reason, over all ranks."""
    counts: dict[str, int] = {}
    for sign, states in ((1, after), (-1, before)):
        for state in states:
            for reason, count in state["dropped"].items():
                counts[reason] = counts.get(reason, 0) + sign * count
    return {reason: count for reason, count in counts.items() if count > 0}
