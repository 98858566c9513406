"""MEDUSA in SGLang on the machine at hand, held against the plain engine and the reference decoder; see field_check.sh.

Engines run one after another, each in a process of its own, so that one that dies or hangs fails its checks and no
more. The reference is transformers in float32 on the CPU: it walks through the text that the engine gave and counts the
passes that this takes. Float32 engines (CPU) must agree with it exactly. In bfloat16 (GPU) nearly tied tokens may swap:
texts may part, rarely and only there, and the passes are the reference's within PASSES_APART.

Letters: V vocabulary.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # accepting.py is in the clone, not in the package

import torch
from torch import Tensor

import medusa_k25
from medusa_k25.heads import DraftVocabulary, Speculator
from medusa_k25.serving.decode import Choose, Drafter, speculative_decode
from medusa_k25.serving.formats import load_served
from medusa_k25.target import Target, TargetModel
from medusa_k25.target_builders import find_checkpoint, write_tiny_k25
from tests.engines.sglang.accepting import TREE, accepting_heads, serve_from

# The miniature of Kimi-K2.5 with sizes that GPU kernels are written for. Attention has the real head sizes: fa3 has MLA
# kernels for 512 + 64 channels only, and triton splits them so. Experts in one group, more of them a token than groups:
# the router is the one of Kimi-K2.5's 384. The weights are small enough that logits are varied but no chaos.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "initializer_range": 0.1,
}
PROMPTS, LIMIT = 16, 32  # prompts, tokens of an answer
STEPS, NOISE = 30, 1.25  # heads that know the answers, then noise: right often, not always with the first choice
SAMPLES = 4000
TEMPERATURES = (0.6, 1.0)
WHOLE_VOCABULARY = 1024  # heads for a larger one draft only tokens of the answers

TIE = 0.2  # difference of log-probabilities up to which two tokens may swap in bfloat16
PARTINGS = 0.06  # texts that part, a token compared, in bfloat16; a mask that is ignored parts most texts at once
PASSES_APART = 0.03
CHANCE = 1e-4  # that one sampling test fails though the distributions are equal
MIN_CHOICES = 5  # tokens that a sampling test tells apart, or it says nothing

PATIENCE_S = 240  # for an engine, its start included
ONLY_CUDA = "needs a CUDA GPU"


@dataclass(frozen=True)
class Check:
    """passed: None where this machine, or the time, does not allow the check."""

    name: str
    passed: bool | None
    why: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """gaps: between the two best log-probabilities at each token, where they were asked for."""

    ids: list[int]
    passes: int = 0
    gaps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Session:
    """What an engine gave to each of its calls, how long they took, and its log."""

    answers: list[list[Answer]]
    seconds: list[float]
    log: str

    @cached_property
    def graphs(self) -> Counter[str]:
        """Decode passes by what the scheduler's log says about CUDA graphs: "True", "False"."""
        return Counter(re.findall(r"Decode batch.*cuda graph: (True|False)", self.log))


class EngineFailed(RuntimeError):
    pass


def serve(job_file: str) -> None:
    """In a process of its own: start an engine, make the calls of a job, write the answers beside it."""
    import sglang

    job = json.loads(Path(job_file).read_text())
    engine = sglang.Engine(**job["server"])
    results = []
    for call in job["calls"]:
        began = time.perf_counter()
        rows = engine.generate(**call)
        seconds = time.perf_counter() - began
        answers = []
        for row in rows:
            counts = row["meta_info"]
            best = counts.get("output_top_logprobs") or []
            gaps = [first[0] - second[0] for first, second in best]
            answers.append(asdict(Answer(row["output_ids"], counts.get("spec_verify_ct", 0), gaps)))
        results.append({"seconds": seconds, "answers": answers})
    Path(job_file).with_suffix(".answers").write_text(json.dumps(results))
    engine.shutdown()


def run_engine(work: Path, server: dict[str, Any], calls: list[dict[str, Any]]) -> Session:
    """EngineFailed, with the end of its log, for an engine that ends early or takes longer than PATIENCE_S."""
    job = Path(tempfile.mkdtemp(dir=work)) / "job.json"
    job.write_text(json.dumps({"server": server, "calls": calls}))
    answers, log_file = job.with_suffix(".answers"), job.with_suffix(".log")
    with log_file.open("w") as log:
        child = subprocess.Popen(
            [sys.executable, __file__, "serve", str(job)], stdout=log, stderr=log, start_new_session=True
        )
        why = ""
        try:
            child.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            why = f"no answer within {PATIENCE_S} s; "
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)  # its schedulers too, whatever state they are in
            except ProcessLookupError:
                pass
            child.wait()
    text = log_file.read_text(errors="replace")
    if not answers.exists():
        raise EngineFailed(why + "the engine's log ends with: " + text[-3000:])
    results = json.loads(answers.read_text())
    return Session(
        [[Answer(**answer) for answer in result["answers"]] for result in results],
        [result["seconds"] for result in results],
        text,
    )


# What is judged, in plain numbers


def same_text(name: str, expected: Sequence[Answer], got: Sequence[Answer], exact: bool) -> Check:
    """Equal texts; where not `exact`, they may part at near ties. `expected` brings the gaps."""
    compared, gaps = 0, []
    for one, other in zip(expected, got, strict=True):
        differing = [a != b for a, b in zip(one.ids, other.ids, strict=True)]
        if any(differing):
            place = differing.index(True)
            gaps.append(one.gaps[place])
            compared += place + 1
        else:
            compared += len(differing)
    allowed = 0.0 if exact else PARTINGS * compared
    passed = len(gaps) <= allowed and max(gaps, default=0.0) <= TIE
    why = f"{len(gaps)} of {len(expected)} texts part, in {compared} tokens compared"
    if gaps:
        why += f", where the best two log-probabilities differ by {max(gaps):.3f} or less"
    if not passed:
        why += f"; allowed: {int(allowed)}, {TIE} or less"
    figures = {"texts": len(expected), "tokens_compared": compared, "gaps_where_they_part": sorted(gaps)}
    return Check(name, passed, why, figures)


def same_passes(name: str, expected: Sequence[int], got: Sequence[Answer], exact: bool) -> Check:
    """Verify passes of each answer; where not `exact`, of all of them, within PASSES_APART."""
    counted, wanted = [answer.passes for answer in got], list(expected)
    emitted = sum(len(answer.ids) - 1 for answer in got)  # prefill gives the first token
    ours, theirs = sum(counted), sum(wanted)
    passed = counted == wanted if exact else abs(ours - theirs) <= PASSES_APART * theirs
    passed = passed and emitted > 1.2 * ours > 0  # heads that are always wrong would prove nothing
    lengths = [emitted / ours if ours else None, emitted / theirs if theirs else None]
    why = f"{ours} verify passes for {emitted} tokens, {theirs} by the reference decoder"
    if not passed:
        why += "; expected the same for each answer" if exact else f"; expected within {PASSES_APART:.0%}"
        why += ", and more than 1.2 tokens a pass"
    return Check(name, passed, why, {"accept_length": lengths[0], "accept_length_of_reference": lengths[1]})


def same_distribution(name: str, one: Sequence[int], other: Sequence[int]) -> Check:
    """Two-sample chi-square test on tokens; rare ones are counted as one."""
    counts, others = Counter(one), Counter(other)
    both = counts + others
    common = [token for token, count in both.items() if count >= 20]
    table = torch.tensor([[c[token] for token in common] for c in (counts, others)], dtype=torch.float64)
    rest = torch.tensor([[len(one)], [len(other)]]) - table.sum(1, keepdim=True)
    if rest.sum() >= 20:
        table = torch.cat([table, rest], dim=1)
    choices = table.shape[1]
    if choices < MIN_CHOICES:
        return Check(name, None, f"only {choices} tokens are common enough to compare")
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    p = float(torch.special.gammaincc(torch.tensor((choices - 1) / 2, dtype=torch.float64), statistic / 2))
    why = f"p = {p:.2g} for {choices} tokens in {len(one)} and {len(other)} samples"
    if p < CHANCE:
        why += f"; expected {CHANCE:.0e} or more"
    return Check(name, p >= CHANCE, why, {"p": p, "chi_square": float(statistic), "choices": choices})


def graphs_were_used(name: str, with_graphs: Session, without: Session) -> Check:
    used, unused = with_graphs.graphs, without.graphs
    passed = used["True"] > 0 and used["False"] <= used["True"] / 10 and unused["True"] == 0
    why = (
        f"the engine's log says {used['True']} of {used.total()} decode passes ran as graphs, "
        f"{unused['True']} of {unused.total()} with --disable-cuda-graph"
    )
    return Check(name, passed, why)


# What is run


@dataclass(frozen=True)
class Machine:
    """cuda: compute capability, None on the CPU, where attention and kernels are the tests' stand-ins."""

    cuda: tuple[int, int] | None
    gpus: int

    @classmethod
    def here(cls) -> "Machine":
        if not torch.cuda.is_available():
            return cls(None, 0)
        return cls(torch.cuda.get_device_capability(), torch.cuda.device_count())

    @property
    def exact(self) -> bool:
        return self.cuda is None

    def server(self, model: Path, backend: str) -> dict[str, Any]:
        """Settings of all engines; page_size 1 is what trees need."""
        settings: dict[str, Any] = {
            "model_path": str(model),
            "skip_tokenizer_init": True,
            "enable_multimodal": False,  # the miniature has no image processor
            "grammar_backend": "none",
            "attention_backend": backend,
            "page_size": 1,
            "max_running_requests": 64,
            "max_total_tokens": 16384,
            "log_level": "info",
            "decode_log_interval": 1,  # each pass says whether it ran as a graph
        }
        if self.cuda is None:
            return settings | {
                "device": "cpu",
                "dtype": "float32",
                "sampling_backend": "pytorch",
                "disable_cuda_graph": True,
            }
        return settings | {"dtype": "bfloat16"}

    def facts(self) -> dict[str, Any]:
        versions: dict[str, str | None] = {"medusa-k25": medusa_k25.__version__}
        for name in ("torch", "triton", "transformers", "sglang", "sglang-kernel", "flashinfer-python"):
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                versions[name] = None
        driver = None
        if self.cuda is not None:
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        return {
            "gpu": None if self.cuda is None else torch.cuda.get_device_name(),
            "gpus": self.gpus,
            "compute_capability": self.cuda,
            "cuda": torch.version.cuda,
            "driver": driver,
            "python": platform.python_version(),
            "processor": platform.machine(),
            "versions": versions,
        }


class FieldCheck:
    """The checks of one target, collected in `checks` in the order in which they were made."""

    def __init__(self, machine: Machine, target: Target, work: Path, end: float, quick: bool, built_in: bool):
        self.machine, self.target, self.work, self.end, self.quick = machine, target, work, end, quick
        self.built_in = built_in
        self.checks: list[Check] = []
        self.speed: dict[str, float | None] = {}
        self.mla = _text_config(target.path).get("kv_lora_rank") is not None
        generator = torch.Generator().manual_seed(1)
        most = min(target.vocab_size, 490)
        sizes = [3 + i * 7 % 58 for i in range(PROMPTS)]
        self.prompts = [torch.randint(3, most, (size,), generator=generator).tolist() for size in sizes]

    @cached_property
    def model(self) -> TargetModel:
        return self.target.load_model(torch.float32)

    def report(self, check: Check) -> None:
        self.checks.append(check)
        mark = {True: "ok", False: "FAILED", None: "-"}[check.passed]
        print(f"{mark:7}{check.name:34}{check.why.strip().splitlines()[-1][:200]}", flush=True)

    def backends(self) -> list[str]:
        stand_in = ["torch_native"] if self.machine.cuda is None else []
        return stand_in + (["triton", "fa3"] if self.mla else ["triton", "fa3", "flashinfer"])

    def run(self) -> None:
        first, *others = self.backends()
        plain = self._session("the plain engine", self._calls(plain=True), first)
        if plain is None:
            return
        self._train_heads(plain.answers[0])
        medusa = self._medusa(first, plain)
        if medusa is not None:
            self._sampling(plain, medusa)
            self.speed = self._speed(plain, medusa)
        self._compare("overlap off", medusa, first, plain, disable_overlap_schedule=True)
        without = self._compare("graphs off", medusa, first, plain, cuda=True, disable_cuda_graph=True)
        if medusa is not None and without is not None:
            self.report(graphs_were_used("graphs: used", medusa, without))
        for backend in others:
            self._other_backend(backend)
        self._refusal()
        self._two_ranks(first, plain)

    def _calls(self, plain: bool = False) -> list[dict[str, Any]]:
        """Greedy answers; one answer alone, twice, to time it; then samples, which the CPU engine cannot verify."""

        def limits(temperature: float, tokens: int) -> dict[str, Any]:
            top_p = 1.0 if temperature == 0 else 0.95
            return {"temperature": temperature, "top_p": top_p, "max_new_tokens": tokens, "ignore_eos": True}

        logprobs = {"return_logprob": True, "top_logprobs_num": 2} if plain else {}
        calls = [{"input_ids": self.prompts, "sampling_params": limits(0, LIMIT)} | logprobs]
        calls += [{"input_ids": self.prompts[:1], "sampling_params": limits(0, n)} for n in (LIMIT, 1, LIMIT)]
        if self.machine.cuda is not None:
            many = [self.prompts[0]] * SAMPLES
            calls += [{"input_ids": many, "sampling_params": limits(t, 3)} for t in TEMPERATURES]
        return calls

    def _session(self, name: str, calls: list[dict[str, Any]], backend: str, **settings: Any) -> Session | None:
        """None, and a check that says why, where the engine failed or there is no time for it."""
        if time.monotonic() > self.end:
            self.report(Check(name, None, "no time was left for it; TIME_S=... gives more"))
            return None
        server = self.machine.server(self.target.path, backend) | settings
        if self.built_in and self.machine.cuda is not None:
            server["moe_runner_backend"] = "triton"  # those that SGLang prefers on a B200 take larger experts
        try:
            session = run_engine(self.work, server, calls)
        except EngineFailed as error:
            self.report(Check(name, False, str(error)))
            return None
        self.report(Check(name, True, f"answered on {backend} in {sum(session.seconds):.1f} s"))
        return session

    def _train_heads(self, answers: Sequence[Answer]) -> None:
        target, ids = self.target, [answer.ids for answer in answers]
        tokens = torch.arange(target.vocab_size)
        if target.vocab_size > WHOLE_VOCABULARY:
            tokens = torch.tensor(sorted({token for each in ids for token in each}))
        vocabulary = DraftVocabulary(tokens, target.vocab_size)
        self.heads_folder = self.work / "heads"
        heads = accepting_heads(self.model, target.lm_head, self.prompts, ids, vocabulary, STEPS)
        noise = torch.Generator().manual_seed(0)
        for weight in heads.parameters():
            weight.add_(NOISE * weight.std() * torch.randn(weight.shape, generator=noise))
        serve_from(self.heads_folder, target, heads, vocabulary, TREE)
        drafter = Drafter(Speculator.of(heads, vocabulary, target), TREE)

        @cache
        def passes(prompt: tuple[int, ...], text: tuple[int, ...]) -> int:
            decoded = speculative_decode(self.model, drafter, prompt, len(text), (), follow(text))
            return decoded.acceptance.passes

        self.reference_passes: Callable[[tuple[int, ...], tuple[int, ...]], int] = passes

    def _medusa(self, backend: str, plain: Session, name: str = "MEDUSA", **settings: Any) -> Session | None:
        medusa = {"speculative_algorithm": "MEDUSA", "speculative_draft_model_path": str(self.heads_folder)}
        calls = self._calls() if name == "MEDUSA" else self._calls()[:1]
        # another seed than the plain engine's: samples must be independent
        session = self._session(name, calls, backend, random_seed=1, **medusa, **settings)
        if session is not None:
            exact, answers = self.machine.exact, session.answers[0]
            expected = [
                self.reference_passes(tuple(prompt), tuple(answer.ids))
                for prompt, answer in zip(self.prompts, answers, strict=True)
            ]
            self.report(same_text(f"{name}: text", plain.answers[0], answers, exact))
            self.report(same_passes(f"{name}: accept length", expected, answers, exact))
        return session

    def _compare(
        self, name: str, medusa: Session | None, backend: str, plain: Session, cuda: bool = False, **settings: Any
    ) -> Session | None:
        """MEDUSA once more with other settings, against the plain engine and against `medusa`."""
        if (reason := self._left_out(cuda)) is not None:
            self.report(Check(name, None, reason))
            return None
        session = self._medusa(backend, plain, name, **settings)
        if session is not None and medusa is not None:
            gaps = [answer.gaps for answer in plain.answers[0]]
            first = [Answer(a.ids, a.passes, g) for a, g in zip(medusa.answers[0], gaps, strict=True)]
            passes = [answer.passes for answer in first]
            exact = self.machine.exact
            self.report(same_text(f"{name}: text as before", first, session.answers[0], exact))
            self.report(same_passes(f"{name}: passes as before", passes, session.answers[0], exact))
        return session

    def _left_out(self, cuda: bool) -> str | None:
        if cuda and self.machine.cuda is None:
            return ONLY_CUDA
        return "left out with QUICK=1" if self.quick else None

    def _sampling(self, plain: Session, medusa: Session) -> None:
        """The first token is prefill's; the second and third are MEDUSA's."""
        samples = zip(plain.answers[4:], medusa.answers[4:], strict=True)
        for temperature in TEMPERATURES:
            name = f"sampling at {temperature}"
            if self.machine.cuda is None:
                self.report(Check(name, None, "SGLang's engine verifies greedily on the CPU"))
                continue
            one, other = next(samples)
            for place in (1, 2):
                tokens = ([answer.ids[place] for answer in answers] for answers in (one, other))
                self.report(same_distribution(f"{name}: token {place + 1}", *tokens))

    def _speed(self, plain: Session, medusa: Session) -> dict[str, float | None]:
        """Milliseconds a pass of a single request, and what drafting takes of it. Of a miniature mostly overhead."""

        def pass_ms(session: Session, passes: int) -> float:
            _, _, prefill, whole = session.seconds[:4]
            return 1e3 * max(whole - prefill, 0) / passes

        verify_ms = pass_ms(medusa, medusa.answers[3][0].passes)
        drafting_ms = drafting_time(self.heads_folder, self.target, self.machine.cuda is not None)
        return {
            "plain_pass_ms": pass_ms(plain, LIMIT - 1),
            "medusa_pass_ms": verify_ms,
            "drafting_ms": drafting_ms,
            "drafting_share": drafting_ms / verify_ms if verify_ms else None,
        }

    def _other_backend(self, backend: str) -> None:
        name = f"MEDUSA on {backend}"
        reason = self._left_out(cuda=True)
        if backend == "fa3" and self.machine.cuda is not None and self.machine.cuda[0] not in (8, 9):
            reason = f"fa3 is for compute capability 8 and 9, this is {self.machine.cuda[0]}.{self.machine.cuda[1]}"
        if reason is not None:
            self.report(Check(name, None, reason))
            return
        plain = self._session(f"the plain engine on {backend}", self._calls(plain=True)[:1], backend)
        if plain is not None:
            self._medusa(backend, plain, name)

    def _refusal(self) -> None:
        name = "flashinfer is refused for a tree"
        reason = self._left_out(cuda=True) if self.mla else "flashinfer serves trees on this target, it has no MLA"
        if reason is not None:
            self.report(Check(name, None, reason))
            return
        medusa = {"speculative_algorithm": "MEDUSA", "speculative_draft_model_path": str(self.heads_folder)}
        server = self.machine.server(self.target.path, "flashinfer") | medusa
        try:
            run_engine(self.work, server, self._calls()[:1])
        except EngineFailed as error:
            passed = "takes no tree mask with MLA" in str(error)
            self.report(Check(name, passed, "takes no tree mask with MLA" if passed else str(error)))
        else:
            self.report(Check(name, False, "the engine started"))

    def _two_ranks(self, backend: str, plain: Session) -> None:
        name = "two ranks"
        reason = self._left_out(cuda=True)
        if reason is None and self.machine.gpus < 2:
            reason = "needs two GPUs"
        if reason is not None:
            self.report(Check(name, None, reason))
            return
        self._medusa(backend, plain, name, tp_size=2)


def follow(text: Sequence[int]) -> Choose:
    """For the reference decoder: the target says this text, whatever its logits."""
    ids = iter(text)

    def choose(logits_V: Tensor) -> int:
        return next(ids)

    return choose


def drafting_time(heads_folder: Path, target: Target, cuda: bool) -> float:
    """Milliseconds to draft one tree for one request, on one rank: heads, top-k, and the tree's tokens."""
    from medusa_k25.serving.sglang.drafting import EngineHeads, Ranks, Shard

    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    served = load_served(heads_folder)
    alone = Ranks(0, 1, all_gather=lambda tensor: tensor[None], all_reduce=lambda tensor: None)
    lm_head = Shard(target.lm_head.to(device, dtype), 0)
    embeddings = None if served.heads.reads == "state" else Shard(target.embeddings.to(device, dtype), 0)
    heads = EngineHeads(served, served.tree, lm_head, embeddings, alone, dtype, device)
    hidden_1D = torch.randn(1, target.hidden_size, device=device, dtype=dtype)
    root_1 = torch.zeros(1, dtype=torch.long, device=device)
    rounds = 100
    for _warm in (False, True):
        began = time.perf_counter()
        for _ in range(rounds):
            drafts = heads.draft(hidden_1D, root_1)
        drafts.tokens_Nn.tolist()  # waits for the device
    return 1e3 * (time.perf_counter() - began) / rounds


def _text_config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return config.get("text_config", config)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="field_check")
    parser.add_argument("--model", help="a folder, or a name in the local Hugging Face cache; default: a miniature")
    parser.add_argument("--out", type=Path, default=Path("field_check.json"))
    parser.add_argument("--time-s", type=float, default=480, help="no engine is started later than this")
    parser.add_argument("--quick", action="store_true", help="MEDUSA once, beside the plain engine")
    given = parser.parse_args(arguments)
    began, machine = time.monotonic(), Machine.here()
    if machine.cuda is None:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # inherited by the engines
    with tempfile.TemporaryDirectory() as work:
        if given.model is None:
            folder = Path(work) / "small-k25"
            folder.mkdir()
            write_tiny_k25(folder, sizes=SIZES)
            target = Target.open(folder, "small_k25")
        else:
            target = Target.open(find_checkpoint(given.model))
        check = FieldCheck(machine, target, Path(work), began + given.time_s, given.quick, given.model is None)
        complete = False
        try:
            check.run()
            complete = True
        finally:  # what was found before a fault of this script, or Ctrl-C, is worth sending, too
            report = {
                "complete": complete,
                "machine": machine.facts(),
                "target": {"name": target.name, "mla": check.mla, "layers": target.num_layers},
                "dtype": "float32" if machine.exact else "bfloat16",
                "checks": [asdict(each) for each in check.checks],
                "speed": check.speed,
                "seconds": round(time.monotonic() - began),
            }
            given.out.write_text(json.dumps(report, indent=1) + "\n")
    verdicts = Counter(each.passed for each in check.checks)
    print(f"{verdicts[True]} passed, {verdicts[False]} failed, {verdicts[None]} could not be checked -> {given.out}")
    return 1 if verdicts[False] else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:]))
