"""The target's own answers to a list of prompts: what heads are trained on and judged by.

`Generator` lets the target answer, in this process or in a server, `read_conversations` reads the answers back.

Letters: B batch, T tokens, V vocabulary.
"""

import collections.abc
import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, takewhile
from pathlib import Path
from threading import Event
from typing import Any

import torch
import transformers
from jinja2 import TemplateError
from torch import Tensor
from tqdm import tqdm

from medusa_k25.answer_client import END, LIMIT, Answer, Ask, Engine, answer_all, open_engine
from medusa_k25.chat import render, thinking_of
from medusa_k25.data.splits import split_of
from medusa_k25.prompts import Prompt, json_lines
from medusa_k25.server import Server
from medusa_k25.target import Target, TargetModel, cpu_has_bf16_products

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FAILED_KEYS = {"id", "group", "messages", "error"}
ANSWER_KEYS = set("id group messages prompt_ids answer_ids answer finish_reason sampling dtype label".split())


def prompt_key(prompt_ids: Sequence[int]) -> str:
    """Hash of a prompt's token ids: decides the split of a document without a group (`data.splits.split_of`)."""
    return hashlib.sha256(torch.tensor(prompt_ids, dtype=torch.int32).numpy().tobytes()).hexdigest()


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_dtype(name: str, device: str) -> torch.dtype:
    """The dtype called `name`; "auto" is bfloat16 where `device` multiplies it in hardware, else float32."""
    if name == "auto":
        if device == "cpu":
            return torch.bfloat16 if cpu_has_bf16_products() else torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}, expected auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def context_of(target: Target) -> int:
    """Tokens of prompt and answer that the model was made for."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(target.path).get_text_config().max_position_embeddings


@dataclass(frozen=True)
class GenerateReport:
    success: int
    failed: int
    skipped: int  # were in the file before, answered or failed
    tokens: int
    seconds: float

    def __str__(self) -> str:
        total = self.success + self.failed + self.skipped
        return (
            f"{self.success} success + {self.failed} failed + {self.skipped} skipped = {total} input; "
            f"{self.tokens:,} tokens in {self.seconds:.0f} s = {self.tokens / self.seconds:.0f} tok/s"
        )


@dataclass(frozen=True)
class Job:
    prompt: Prompt
    prompt_ids: list[int]
    dtype: str
    max_new_tokens: int  # less than the generator's where the context ends


@dataclass(frozen=True)
class GeneratePlan:
    """What is to be answered, and by whom."""

    target: Target
    jobs: list[Job]  # of all prompts that can be answered
    failures: list[dict[str, Any]]  # rows of those that cannot
    done: Mapping[str, Mapping[str, Any]]  # id -> row, of those that are in the file
    tokenizer: Any
    origin: dict[str, Any]  # of all answers; whether there are tools is the prompt's own matter
    engine: Engine | None  # None: this process

    @property
    def todo(self) -> list[Job]:
        return [job for job in self.jobs if job.prompt.id not in self.done]


@dataclass(frozen=True)
class Generator:
    """The target's answers; greedy at temperature 0, which is what the proof set needs.

    max_new_tokens: limit of an answer, end token included. template: more variables for the chat template, such as
    {thinking: false}.
    In this process: batch_size: prompts decoded together. workers: batches decoded side by side on a CPU. dtype: a name
    in DTYPES or "auto"; heldout_dtype: the same for prompts of the held-out split, which form the proof set.
    From a server: concurrency: requests at a time. timeout_s: for one answer.

    Batches depend on the list of prompts only, not on what is already done: an interrupted run that is continued
    ends with the same text as one that was not, also where rounding depends on a batch's company.
    """

    max_new_tokens: int = 64
    batch_size: int = 64
    workers: int = 2
    dtype: str = "auto"
    heldout_dtype: str = "float32"
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    template: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int = 64
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size", "workers", "concurrency"):
            if not (isinstance(value := getattr(self, name), int) and value >= 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value}")
        if not (_is_number(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number, 0 (greedy) or more, got {self.temperature}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not (_is_number(self.timeout_s) and self.timeout_s > 0):
            raise ValueError(f"timeout_s must be a number of seconds above 0, got {self.timeout_s}")
        if not isinstance(self.template, Mapping):
            raise ValueError(f"template must be a mapping such as {{thinking: false}}, got {self.template!r}")

    @property
    def sampling(self) -> dict[str, Any]:
        if self.temperature == 0:
            return {"mode": "greedy", "temperature": 0.0, "top_p": 1.0}
        return {"mode": "sampled", "temperature": float(self.temperature), "top_p": float(self.top_p)}

    def plan(self, target: Target, prompts: Sequence[Prompt], out: Path, server: str | None = None) -> GeneratePlan:
        """Render the prompts and print how many `out` lacks, and what answers them. Writes nothing.

        server: address of an SGLang server, or of an OpenAI-compatible one; None: the target in this process.
        Raises ValueError when `out` holds answers to other prompts under the same ids, or by other settings, and when
        the server serves another target; OSError when there is no server.
        """
        tokenizer = target.load_tokenizer()
        if tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer of {target.path} has no chat template; add chat_template.jinja to it")
        context, engine = context_of(target), None
        if server is None:
            device = default_device()
            dtypes = [dtype_name(choose_dtype(name, device)) for name in (self.dtype, self.heldout_dtype)]
        else:
            engine = open_engine(Server(server, timeout_s=self.timeout_s), target, tokenizer)
            dtypes = [engine.dtype, engine.dtype]
            context = min(context, engine.context or context)
        jobs, failures = self.prepare(tokenizer, prompts, context, *dtypes)
        if engine is not None and jobs:
            engine.require_target(jobs[0].prompt_ids)
        done = {row["id"]: row for row in read_conversations(out)} if out.exists() else {}
        self._require_same(jobs, done, out)
        origin = {
            "engine": f"transformers {transformers.__version__}" if engine is None else engine.name,
            "quantisation": target.quantisation if engine is None else engine.quantisation,
            "thinking": thinking_of(tokenizer, jobs[0].prompt.messages, self.template) if jobs else None,
        }
        plan = GeneratePlan(target, jobs, failures, done, tokenizer, origin, engine)
        if engine is None:
            by = f"{' and '.join(dict.fromkeys(job.dtype for job in plan.todo))} on {device}"
        else:
            by = f"{engine.name} at {engine.server.url} with {engine.model}, {self.concurrency} requests at a time"
        print(
            f"{target.name} answers {len(plan.todo):,} of {len(prompts):,} prompts ({self.sampling['mode']}, at most "
            f"{self.max_new_tokens:,} tokens each, {sum(job.max_new_tokens for job in plan.todo):,} in all); {by}",
            flush=True,
        )
        return plan

    def run(self, target: Target, prompts: Sequence[Prompt], out: Path, server: str | None = None) -> GenerateReport:
        """Append an answer or an error to `out` for every prompt that it lacks, and print how many there are of each.

        `out` is appended and fsynced as answers come, in this process batch by batch: a killed run loses what it was
        at, and the same call continues. A prompt fails when it is empty, when the chat template or the server refuses
        it or when it fills the model's context. Its row then has an "error", stays, and counts as done (delete the line
        to try again).

        Raises what `plan` does, ValueError when another process is writing to `out`, and OSError when the server is
        gone or answers nobody any more.
        """
        started = time.perf_counter()
        with ExitStack() as held:
            was_there = out.exists()
            if was_there:
                held.enter_context(_sole_writer(out, new=False))
            plan = self.plan(target, prompts, out, server)
            failures = [row for row in plan.failures if row["id"] not in plan.done]
            if was_there:
                _drop_torn_line(out)
            elif plan.todo or failures:
                held.enter_context(_sole_writer(out, new=True))  # now that nothing is refused any more
            _append(out, failures)
            success, failed, tokens = self._answer(plan, out)
        failed += len(failures)
        report = GenerateReport(success, failed, len(prompts) - success - failed, tokens, time.perf_counter() - started)
        print(f"{report} -> {out}")
        return report

    def _answer(self, plan: GeneratePlan, out: Path) -> tuple[int, int, int]:
        """Append the rows of what is to be done; (answers, failed prompts, tokens)."""
        success = failed = tokens = 0
        answering = self._decoded if plan.engine is None else self._served
        with tqdm(desc="generate", unit=" tok", smoothing=0, mininterval=1) as bar:
            with closing(answering(plan, bar)) as answered:
                for answers in answered:
                    rows = [self._row(job, answer, plan) for job, answer in answers if job.prompt.id not in plan.done]
                    _append(out, rows)
                    answer_lengths = [len(row["answer_ids"]) for row in rows if "error" not in row]
                    success += len(answer_lengths)
                    failed += len(rows) - len(answer_lengths)
                    tokens += sum(answer_lengths)
        return success, failed, tokens

    def prepare(
        self, tokenizer: Any, prompts: Sequence[Prompt], context: int, dtype: str, heldout_dtype: str
    ) -> tuple[list[Job], list[dict[str, Any]]]:
        """(jobs, rows of the prompts that cannot be answered). context: tokens of prompt and answer."""
        jobs, failures = [], []
        for prompt in prompts:
            last = prompt.messages[-1]
            try:
                if last["role"] == "user" and not last["content"].strip():
                    raise ValueError("the prompt is empty")
                prompt_ids = render(tokenizer, prompt.messages, self.template, prompt.tools)
                if len(prompt_ids) >= context:
                    raise ValueError(f"the prompt has {len(prompt_ids)} tokens, the context of the model {context}")
            except (TemplateError, ValueError) as error:
                failures.append(_failed(prompt, str(error)))
                continue
            heldout = split_of(prompt.group, prompt_key(prompt_ids)) == "heldout"
            limit = min(self.max_new_tokens, context - len(prompt_ids))
            jobs.append(Job(prompt, prompt_ids, heldout_dtype if heldout else dtype, limit))
        return jobs, failures

    def _require_same(self, jobs: Sequence[Job], done: Mapping[str, Mapping[str, Any]], out: Path) -> None:
        """An answer that is already there must be the one that this generator would have given."""
        for job in jobs:
            row = done.get(job.prompt.id)
            if row is None or "error" in row:
                continue
            expected = {"sampling": self.sampling, "dtype": job.dtype}
            differing = [f"{key} {row[key]}, now {value}" for key, value in expected.items() if row[key] != value]
            rendered = row["origin"].get("ids") == "rendered"  # other ids than were counted
            if row["finish_reason"] == LIMIT and len(row["answer_ids"]) != job.max_new_tokens and not rendered:
                differing.append(f"at most {len(row['answer_ids'])} tokens, now {job.max_new_tokens}")
            if row["prompt_ids"] != job.prompt_ids:
                differing.append("another prompt or chat template")
            if differing:
                raise ValueError(
                    f"{out} holds an answer to {job.prompt.id!r} that was made otherwise ({'; '.join(differing)}); "
                    "continue with the settings and prompts that the file was made with, or name another file"
                )

    def _batches(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Prompts of similar length together, so that little is padded; the longest first, so that memory runs out
        at the start or never."""
        ordered = sorted(jobs, key=lambda job: (-len(job.prompt_ids), job.prompt.id))
        return [ordered[start : start + self.batch_size] for start in range(0, len(ordered), self.batch_size)]

    def _served(
        self, plan: GeneratePlan, bar: tqdm
    ) -> collections.abc.Generator[list[tuple[Job, Answer | str]], None, None]:
        """[(job, its answer or why there is none)], as the server answers."""
        assert plan.engine is not None
        jobs = plan.todo
        most = sum(job.max_new_tokens for job in jobs)
        asks = [
            Ask(job.prompt_ids, job.max_new_tokens, self.temperature, self.top_p, self._seed(job) % 2**31)
            for job in jobs
        ]
        with closing(answer_all(plan.engine, asks, self.concurrency)) as answers:
            for index, answer in answers:
                tokens = len(answer.ids) if isinstance(answer, Answer) else 0
                bar.total = most = most - jobs[index].max_new_tokens + tokens
                bar.update(tokens)
                yield [(jobs[index], answer)]

    def _decoded(
        self, plan: GeneratePlan, bar: tqdm
    ) -> collections.abc.Generator[list[tuple[Job, Answer | str]], None, None]:
        """[(job, its answer)] of a batch, in order. On a CPU `workers` batches are decoded side by side, each on its
        share of the cores: products this small lose a sixth of their speed when all cores have to meet after each of
        them."""
        pending = [
            batch
            for dtype in dict.fromkeys(job.dtype for job in plan.jobs)
            for batch in self._batches([job for job in plan.jobs if job.dtype == dtype])
            if any(job.prompt.id not in plan.done for job in batch)
        ]
        bar.total = most = sum(job.max_new_tokens for batch in pending for job in batch)
        target, device, threads = plan.target, default_device(), torch.get_num_threads()
        for dtype, group in groupby(pending, key=lambda batch: batch[0].dtype):
            batches = list(group)
            workers = min(self.workers, len(batches)) if device == "cpu" else 1
            stop = Event()
            decode = partial(self._decode, target.load_model(DTYPES[dtype], device), target.end_ids, bar, stop)
            share = max(1, threads // workers)
            with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(share,)) as pool:
                try:
                    for batch, answers in zip(batches, pool.map(decode, batches), strict=True):
                        bar.total = most = most - sum(job.max_new_tokens for job in batch) + sum(map(len, answers))
                        yield [
                            (job, Answer(ids, END if ids[-1] in target.end_ids else LIMIT))
                            for job, ids in zip(batch, answers, strict=True)
                        ]
                finally:
                    stop.set()  # after an error or Ctrl-C nobody waits for the other batches
                    torch.set_num_threads(threads)

    @torch.inference_mode()
    def _decode(
        self, model: TargetModel, end_ids: Sequence[int], bar: tqdm, stop: Event, batch: Sequence[Job]
    ) -> list[list[int]]:
        """The answers' token ids, end token included. Finished rows leave the batch.

        What all prompts start with (the system prompt) is read once. Columns: shared start, padding, rest, answer.
        """
        from transformers import DynamicCache

        prompts = [job.prompt_ids for job in batch]
        equal = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
        shared = min(len(list(equal)), min(map(len, prompts)) - 1)
        width = max(map(len, prompts)) - shared
        tokens_BT = torch.zeros(len(batch), width, dtype=torch.long)
        mask_BT = torch.ones(len(batch), shared + width, dtype=torch.long)
        for b, prompt_ids in enumerate(prompts):
            padding = width - (len(prompt_ids) - shared)
            tokens_BT[b, padding:] = torch.tensor(prompt_ids[shared:])
            mask_BT[b, shared : shared + padding] = 0
        tokens_BT, mask_BT = tokens_BT.to(model.device), mask_BT.to(model.device)
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)[:, shared:]
        cache = DynamicCache(config=model.model.config)
        if shared:
            model.hidden(torch.tensor([prompts[0][:shared]], device=model.device), past_key_values=cache)
            cache.batch_repeat_interleave(len(batch))

        answers: list[list[int]] = [[] for _ in batch]
        running = list(range(len(batch)))
        draws_BT = self._draws(batch).to(model.device)
        while not stop.is_set():
            hidden_BTD = model.hidden(
                tokens_BT, attention_mask=mask_BT, position_ids=positions_BT, past_key_values=cache
            )
            logits_BV = model.logits(hidden_BTD[:, -1])
            next_B = self._choose(logits_BV, draws_BT[:, len(answers[running[0]])])
            for row, token in zip(running, next_B.tolist(), strict=True):
                answers[row].append(token)
            bar.update(len(running))
            keep = [
                i
                for i, row in enumerate(running)
                if answers[row][-1] not in end_ids and len(answers[row]) < batch[row].max_new_tokens
            ]
            if not keep:
                break
            positions_BT = positions_BT[:, -1:] + 1
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(running), 1)], dim=1)
            if len(keep) < len(running):
                index = torch.tensor(keep, device=model.device)
                cache.batch_select_indices(index)
                next_B, positions_BT, mask_BT, draws_BT = (t[index] for t in (next_B, positions_BT, mask_BT, draws_BT))
                running = [running[i] for i in keep]
            tokens_BT = next_B[:, None]
        return answers

    def _draws(self, batch: Sequence[Job]) -> Tensor:
        """Uniform numbers [B, max_new_tokens] that depend on seed and prompt id only; float64."""
        draws = []
        for job in batch:
            generator = torch.Generator().manual_seed(self._seed(job))
            draws.append(torch.rand(self.max_new_tokens, generator=generator, dtype=torch.float64))
        return torch.stack(draws)

    def _seed(self, job: Job) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.seed}:{job.prompt.id}".encode()).digest()[:7], "big")

    def _choose(self, logits_BV: Tensor, draws_B: Tensor) -> Tensor:
        """The next token of each row, int64 [B]; of equal logits the lowest id."""
        if self.temperature == 0:
            return logits_BV.argmax(dim=-1)
        probs_BV, ids_BV = (
            (logits_BV.double() / self.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
        )
        before_BV = probs_BV.cumsum(-1) - probs_BV
        kept_BV = torch.where(before_BV < self.top_p, probs_BV, 0).cumsum(-1)
        choice_B1 = torch.searchsorted(kept_BV, draws_B[:, None] * kept_BV[:, -1:], right=True)
        return ids_BV.gather(1, choice_B1).squeeze(1)

    def _row(self, job: Job, answer: Answer | str, plan: GeneratePlan) -> dict[str, Any]:
        if isinstance(answer, str):
            return _failed(job.prompt, answer)
        text_ids = answer.ids[:-1] if answer.finish_reason == END else answer.ids
        origin = {"tools": job.prompt.tools is not None, "ids": "rendered" if answer.rendered else "generated"}
        return {
            "id": job.prompt.id,
            "group": job.prompt.group,
            "messages": job.prompt.messages,
            "prompt_ids": job.prompt_ids,
            "answer_ids": answer.ids,
            "answer": plan.tokenizer.decode(text_ids),
            "finish_reason": answer.finish_reason,
            "sampling": self.sampling,
            "dtype": job.dtype,
            "label": job.prompt.label,
            "origin": plan.origin | origin,
        }


def _failed(prompt: Prompt, error: str) -> dict[str, Any]:
    return {"id": prompt.id, "group": prompt.group, "messages": prompt.messages, "error": error}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@contextmanager
def _sole_writer(path: Path, new: bool) -> Iterator[None]:
    """Hold `path` against other processes: two that append would both answer what neither had found there.

    new: it was not there; it is made, and taken away again where nothing was written. ValueError where another process
    holds it, or has just made it.
    """
    if new:
        path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
            facts = os.fstat(file.fileno())
            is_mine = facts.st_nlink > 0 and not (new and facts.st_size)
        except BlockingIOError:
            is_mine = False
        if not is_mine:
            raise ValueError(
                f"another process is writing to {path}; wait for that one and run the same command again, or name "
                "another file (conversations=FILE)"
            )
        try:
            yield
        finally:
            if new and not os.fstat(file.fileno()).st_size:
                path.unlink(missing_ok=True)


def _append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    with path.open("ab") as file:
        file.write(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def _drop_torn_line(path: Path) -> None:
    """A killed writer may leave half a line: cut it off, so that the next row does not continue it."""
    if path.exists():
        content = path.read_bytes()
        if (end := content.rfind(b"\n") + 1) < len(content):
            os.truncate(path, end)


def read_conversations(path: str | Path) -> list[dict[str, Any]]:
    """All rows of a conversations.jsonl, failed ones ({"error"}) too. A torn last line is left out: it is unfinished.

    Raises ValueError, with file and line, for a row that is not what `Generator` writes and for a repeated id.
    """
    rows: dict[str, dict[str, Any]] = {}
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no conversations at {path.absolute()}; make them first: python -m medusa_k25.generate")
    for place, row in json_lines(path, torn_end=True):
        keys = FAILED_KEYS if isinstance(row, dict) and "error" in row else ANSWER_KEYS
        if missing := keys - set(row) if isinstance(row, dict) else keys:
            raise ValueError(f"{place} lacks {', '.join(sorted(missing))}; is this a file of medusa_k25.generate?")
        if row["id"] in rows:
            raise ValueError(f"{place} repeats the id {row['id']!r}; delete one of the two lines")
        rows[row["id"]] = {"origin": {}} | row
    return list(rows.values())


def ends_in_loop(answer_ids: Sequence[int]) -> bool:
    """Whether an answer ends in a degenerate repetition of a pattern of at most 32 tokens.

    It does when its last 24 or more tokens are one pattern, repeated until the pattern has come four times or the
    repetition (what follows the first occurrence) is 24 tokens long. An answer that ended by itself is no loop.
    """
    for period in range(1, 33):
        repeated = 0
        while repeated + period < len(answer_ids) and answer_ids[-1 - repeated] == answer_ids[-1 - repeated - period]:
            repeated += 1
        if repeated >= min(3 * period, 24) and repeated + period >= 24:
            return True
    return False
