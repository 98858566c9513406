"""Answers from an engine's server, as token ids: SGLang's own endpoint, or an OpenAI-compatible one such as vLLM's."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from reprlib import repr as short
from threading import Event, Lock, Thread
from typing import Any

from medusa_k25.server import KEY_VARIABLE, Refused, Server
from medusa_k25.target import Target

# What a server may tokenise otherwise than the target: numbers, spaces, other scripts. A prompt adds special tokens.
SAMPLE_TEXT = "1,234,567 naïve foxes   say 你好:\n\tdef f(x): return x ** 2\n\n"
PROMPT_FAULTS = (400, 413, 422)  # statuses that say something about one prompt
PATIENCE = 8  # so many prompts in a row without an answer are the server's fault
PROBE_S = 10.0
END, LIMIT = "stop", "length"
# Said to every server: a checkpoint's generation config, or the server's own options, may set these otherwise.
NEUTRAL = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "skip_special_tokens": False,
}


class Failed(Exception):
    """The server answered, but not with a whole answer."""


@dataclass(frozen=True)
class Ask:
    """seed: of sampled text (temperature above 0)."""

    prompt_ids: list[int]
    max_new_tokens: int  # end token included
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class Answer:
    ids: list[int]  # end token included
    finish_reason: str  # END or LIMIT
    rendered: bool = False  # only text came: the ids were made from it


@dataclass(frozen=True)
class Engine:
    """A server that has said what it is; SGLang and OpenAI below ask it in its own words."""

    server: Server
    target: Target
    tokenizer: Any
    name: str  # such as "sglang 0.5.23"
    model: str  # what the server calls it
    quantisation: str
    dtype: str  # "unknown" where the server does not tell
    context: int | None  # tokens of prompt and answer that it takes; None: as the model does

    def answer(self, ask: Ask) -> Answer:
        """Failed, Refused or OSError where there is none; ValueError when the server serves another target."""
        raise NotImplementedError

    def require_target(self, prompt_ids: Sequence[int]) -> None:
        """ValueError when the server's tokenizer, as far as it shows, is not the target's."""
        text = self.tokenizer.decode(prompt_ids) + SAMPLE_TEXT
        request = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            found = replace(self.server, retries=0).call("/tokenize", request)
        except (OSError, Refused):
            return  # it has no such endpoint; ids that are not the target's are refused later
        if isinstance(found, dict) and found.get("tokens") != self.tokenizer.encode(text, add_special_tokens=False):
            raise ValueError(
                f"{self.server.url} ({self.name}, {self.model}) tokenises text otherwise than target "
                f"{self.target.name}; pick the target that it serves, or serve {self.target.path}"
            )

    def is_there(self) -> bool:
        try:
            replace(self.server, retries=0, timeout_s=PROBE_S).call("/v1/models")
        except Refused:
            pass
        except OSError:
            return False
        return True

    def _require_prompt(self, read: Any, ask: Ask) -> None:
        """`read`: the prompt's ids as the server read them, or their number, or None where it does not say."""
        if read in (None, ask.prompt_ids, len(ask.prompt_ids)):
            return
        if type(read) not in (int, list):
            raise Failed(
                f"the server answered that it read {short(read)}, expected the prompt's tokens or their number"
            )
        raise ValueError(
            f"{self.server.url} read {read if isinstance(read, int) else len(read)} tokens of a prompt of "
            f"{len(ask.prompt_ids)}, or other ones: it must neither add, cut nor change tokens (see its options "
            "for truncation and for a beginning-of-text token)"
        )

    def _whole(self, ids: Any, text: Any, reason: Any, matched: Any, ask: Ask) -> Answer:
        """The answer in what the server sent, of which nothing is known: Failed, or ValueError for another target's.

        ids: with or without the end token; None: there is only `text`. matched: the token or text that ended the
        answer, None where the server does not say.
        """
        end_ids, vocab_size = self.target.end_ids, self.target.vocab_size
        if reason not in (END, LIMIT):
            raise Failed(f"the server ended the answer with {short(reason)}, expected {END!r} or {LIMIT!r}")
        if matched is not None and (type(matched) is not int or matched not in end_ids):
            raise Failed(f"the server ended the answer at {short(matched)}, which is no end token")
        rendered = ids is None
        if rendered and isinstance(text, str):
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        if not isinstance(ids, list):
            raise Failed(f"the server answered token ids {short(ids)} and text {short(text)}, expected a list or text")
        # an engine may leave the end token out
        if reason == END and matched is not None and ids[-1:] != [matched]:
            ids = [*ids, matched]
        elif reason == END and matched is None and not (ids and ids[-1] in end_ids):
            ids = [*ids, self._end_id()]

        if wrong := [id for id in ids if type(id) is not int]:
            raise Failed(f"the server answered with token id {short(wrong[0])}, expected an integer")
        if wrong := [id for id in ids if not 0 <= id < vocab_size]:
            raise ValueError(
                f"{self.server.url} ({self.name}, {self.model}) answered with token id {wrong[0]}, target "
                f"{self.target.name} has 0 to {vocab_size - 1}; pick the target that it serves"
            )
        if wrong := [id for id in ids[:-1] if id in end_ids]:
            raise Failed(f"the server went on after the end token {wrong[0]}")
        if not ids or (len(ids) > ask.max_new_tokens and not rendered):  # text may have other tokens than were counted
            raise Failed(f"the server answered {len(ids)} tokens, expected 1 to {ask.max_new_tokens}")
        if ids[-1] in end_ids:
            reason = END  # SGLang says LIMIT where the last possible token is an end token
        elif not rendered and len(ids) < ask.max_new_tokens:
            raise Failed(
                f"the server cut the answer after {len(ids)} of {ask.max_new_tokens} tokens; it needs a longer context"
            )
        return Answer(ids, reason, rendered)

    def _end_id(self) -> int:
        """What ended an answer of which the server only says that it ended."""
        if len(self.target.end_ids) == 1:
            return self.target.end_ids[0]
        if self.tokenizer.eos_token_id in self.target.end_ids:
            return self.tokenizer.eos_token_id
        raise Failed(f"the server does not say which of the end tokens {self.target.end_ids} ended the answer")


class SGLang(Engine):
    def answer(self, ask: Ask) -> Answer:
        return self.read(self.server.call("/generate", self.request(ask)), ask)

    def request(self, ask: Ask) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": ask.max_new_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "stop_token_ids": list(self.target.end_ids),
            **NEUTRAL,
        }
        if ask.temperature:
            sampling["sampling_seed"] = ask.seed  # heeded with --enable-deterministic-inference
        return {"input_ids": ask.prompt_ids, "sampling_params": sampling}

    def read(self, found: Any, ask: Ask) -> Answer:
        about = _mapping(_mapping(found, "an answer").get("meta_info"), "an object as meta_info")
        self._require_prompt(about.get("prompt_tokens"), ask)
        reason = _mapping(about.get("finish_reason"), "an object as finish_reason")
        if reason.get("type") == "abort":
            raise OSError(f"the server aborted the answer: {reason.get('message')}")  # as one that shuts down does
        ids, text = found.get("output_ids"), found.get("text")
        return self._whole(ids, text, reason.get("type"), reason.get("matched"), ask)


class OpenAI(Engine):
    def answer(self, ask: Ask) -> Answer:
        request = {
            "model": self.model,
            "prompt": ask.prompt_ids,
            "max_tokens": ask.max_new_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "stop_token_ids": list(self.target.end_ids),
            **NEUTRAL,
            "add_special_tokens": False,
            "return_token_ids": True,
        }
        if ask.temperature:
            request["seed"] = ask.seed
        found = self.server.call("/v1/completions", request)
        choices = _mapping(found, "an answer").get("choices")
        if not isinstance(choices, list) or len(choices) != 1:
            raise Failed(f"the server answered {short(choices)}, expected a list of one as choices")
        choice, usage = (
            _mapping(choices[0], "an object in choices"),
            _mapping(found.get("usage") or {}, "an object as usage"),
        )
        self._require_prompt(choice.get("prompt_token_ids") or usage.get("prompt_tokens"), ask)
        ids, text = choice.get("token_ids"), choice.get("text")
        return self._whole(ids, text, choice.get("finish_reason"), choice.get("stop_reason"), ask)


def _mapping(value: Any, expected: str) -> dict[str, Any]:
    """`value`, out of an answer; Failed where it is no mapping."""
    if not isinstance(value, dict):
        raise Failed(f"the server answered {short(value)}, expected {expected}")
    return value


def open_engine(server: Server, target: Target, tokenizer: Any) -> Engine:
    """Ask the server what it is.

    ValueError when it is neither an SGLang server nor an OpenAI-compatible one, wants a key or serves another model
    than `target`; OSError when it is gone.
    """
    try:
        facts = _described(server, "/server_info")
    except Refused as refusal:
        _require_allowed(server, refusal)
        facts = {}
    if "version" in facts and "model_path" in facts:
        where = f"{server.url}/server_info"
        model, quantisation = _fact(where, facts, "model_path", str), _fact(where, facts, "quantization", str)
        dtype = _fact(where, facts, "dtype", str)
        try:
            served = _fact(f"{server.url}/model_info", _described(server, "/model_info"), "model_type", str)
        except Refused as refusal:
            _require_allowed(server, refusal)
            raise ValueError(f"{server.url}/model_info: {refusal}; expected an SGLang server that has it") from None
        if served not in (None, target.model_type):
            raise ValueError(
                f"{server.url} serves {model}, a {served} model; target {target.name} is {target.model_type}: pick the "
                "target that it serves"
            )
        return SGLang(
            server,
            target,
            tokenizer,
            name=f"sglang {_fact(where, facts, 'version', str)}",
            model=model,
            quantisation=quantisation or target.quantisation,
            dtype="unknown" if dtype in (None, "auto") else dtype,
            context=_fact(where, facts, "max_req_input_len", int),
        )
    where = f"{server.url}/v1/models"
    try:
        models = _described(server, "/v1/models").get("data")
    except Refused as refusal:
        _require_allowed(server, refusal)
        raise ValueError(
            f"{server.url} has neither SGLang's /server_info nor models at /v1/models ({refusal}); expected the "
            "address of an SGLang server, or of an OpenAI-compatible one without /v1 at its end"
        ) from None
    facts = models[0] if isinstance(models, list) and models else {}
    if not isinstance(facts, dict) or facts.get("id") is None:
        raise ValueError(f"{where} says {short(models)} as data, expected a list of models, each with an id")
    try:
        version = _fact(f"{server.url}/version", _described(server, "/version"), "version", str)
    except Refused:
        version = None
    name = _fact(where, facts, "owned_by", str) or "unknown"
    return OpenAI(
        server,
        target,
        tokenizer,
        name=name if version is None else f"{name} {version}",
        model=_fact(where, facts, "id", str),
        quantisation=target.quantisation,
        dtype="unknown",
        context=_fact(where, facts, "max_model_len", int),
    )


def _described(server: Server, path: str) -> dict[str, Any]:
    """What the server says about itself; Refused where it has no such path, ValueError where it says something else."""
    facts = server.call(path)
    if not isinstance(facts, dict):
        raise ValueError(
            f"{server.url}{path} says {short(facts)}, expected an object; is this the address of an SGLang server, or "
            "of an OpenAI-compatible one without /v1 at its end?"
        )
    return facts


def _fact(where: str, facts: Mapping[str, Any], key: str, kind: type) -> Any:
    """facts[key], None where the server does not say; ValueError where it is no `kind`."""
    value = facts.get(key)
    if value is not None and type(value) is not kind:
        raise ValueError(f"{where} says {key}={short(value)}, expected {kind.__name__} or null")
    return value


def answer_all(
    engine: Engine, asks: Sequence[Ask], concurrency: int
) -> Generator[tuple[int, Answer | str], None, None]:
    """(index in `asks`, its answer or why there is none), as they come; `concurrency` at a time.

    OSError when the server is gone or answers nobody, ValueError when it serves another target or wants a key.
    """
    todo, lock, stop = iter(enumerate(asks)), Lock(), Event()
    results: SimpleQueue[tuple[int, Answer | Exception]] = SimpleQueue()

    def work() -> None:
        while not stop.is_set():
            with lock:
                index, ask = next(todo, (-1, None))
            if ask is None:
                return
            try:
                results.put((index, engine.answer(ask)))
            except Exception as error:
                results.put((index, error))

    # daemons: after Ctrl-C nobody waits for answers that may take an hour
    for _ in range(min(concurrency, len(asks))):
        Thread(target=work, daemon=True).start()
    # An answer shows that the failures before it are their prompts' own; without one they may be the server's.
    answered, failures = False, list[tuple[int, Exception]]()
    try:
        for _ in asks:
            index, result = results.get()
            if isinstance(result, Answer):
                answered = True
                yield index, result
                yield from ((index, str(failure)) for index, failure in failures)
                failures.clear()
                continue
            if isinstance(result, OSError) and not engine.is_there():
                raise result
            if isinstance(result, Refused):
                _require_allowed(engine.server, result)
            if not isinstance(result, OSError | Failed) and getattr(result, "status", None) not in PROMPT_FAULTS:
                raise result
            if answered and not isinstance(result, OSError):
                yield index, str(result)
                continue
            failures.append((index, result))
            if len(failures) >= PATIENCE:
                slow = all(isinstance(failure, TimeoutError) for _, failure in failures)
                raise OSError(
                    f"{engine.server.url} is there, but did not answer {len(failures)} prompts in a row: {result}; "
                    "they count as not asked, the same command asks them again"
                    + "; where answers take longer than that, raise generate.timeout_s"
                    * slow
                )
        yield from ((index, str(failure)) for index, failure in failures)
    finally:
        stop.set()


def _require_allowed(server: Server, refusal: Refused) -> None:
    if refusal.status in (401, 403):
        raise ValueError(f"{server.url} wants another key than {KEY_VARIABLE} holds: {refusal}") from None
