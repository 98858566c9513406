"""Does it pay? What every predictor accepts on held-out text, what a pass costs, and the tokens/s that makes.

python -m medusa_k25.evaluate [checkpoint=best|last|STEP|FOLDER] [hardware=NAME]
python -m medusa_k25.evaluate checkpoint=FOLDER allow_target_mismatch=true
python -m medusa_k25.evaluate conversations=FILE [tokenizer=FOLDER] [hardware=NAME]
python -m medusa_k25.evaluate server=URL prompts=FILE [baseline=URL2|control=FOLDER] [label=topic] [concurrency=[1,8]]

The second form takes heads of another target, and says in another_target.html whether to reuse them, to start from
them or to train from scratch. The third one needs no states and no weights: it answers for the predictors that need no
training, in predictors.html. So does the first one where the run has no checkpoint yet, and with checkpoint=null.
The last one asks a running SGLang server that serves heads, and a second one without, or the same one with its
drafting switched off by a file in FOLDER, which the server knows as MEDUSA_K25_CONTROL; in server.html. With
dry_run=true it only says what it would ask.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from medusa_k25.acceptance import (
    HEADS,
    NGRAM_LOOKUP,
    TREE,
    Evaluation,
    Evaluator,
    HeadsTree,
    Predictor,
    Replayed,
    Row,
    by_text,
    drawn,
    ranks_of,
    some_of,
)
from medusa_k25.answer_client import Ask
from medusa_k25.breakdown import Part, break_down
from medusa_k25.cache import Cache
from medusa_k25.chat import ChatMarks, think_ids_of
from medusa_k25.checkpoint import HeadsCheckpoint, complete_checkpoints, find_checkpoint, load_heads
from medusa_k25.config import ConfigError, verb
from medusa_k25.conversations import Job, context_of, default_device, prompt_key
from medusa_k25.costs.cycle import CycleModel, Length
from medusa_k25.costs.hardware import Hardware
from medusa_k25.costs.new_target import RULE, Advice, common_size
from medusa_k25.costs.served import KIMI_K25_NAME
from medusa_k25.costs.verdict import Verdict, fastest_candidates, judge, no_drafting, published_candidates
from medusa_k25.data.splits import SPLITS, Split, split_of
from medusa_k25.data.texts import Text, holds_messages, temperatures_of, texts_of_cache, texts_of_conversations
from medusa_k25.data.windows import documents_of
from medusa_k25.heads import Heads, Speculator
from medusa_k25.prompts import PACKAGE, STUDY, load_prompts
from medusa_k25.reports.evaluation import write_page
from medusa_k25.reports.report import acceptance_table, read_report, update_report
from medusa_k25.reports.server import as_text, write_server_page
from medusa_k25.serving.adaptive_fit import PRICED_TOKENS, Costs, Priced, answer_log_p, fitted
from medusa_k25.serving.beside_files import open_beside
from medusa_k25.serving.comparing import compare, replayed_parts
from medusa_k25.serving.decode import Drafter
from medusa_k25.serving.formats import load_served
from medusa_k25.serving.live import (
    SHORT,
    Sampling,
    Switch,
    Trial,
    described,
    heads_of,
    open_servers,
    sides_of,
)
from medusa_k25.target import KIMI_THINK_END_ID, KIMI_THINK_ID, Target, end_ids_of, load_tokenizer
from medusa_k25.tree import Tree


@dataclass(frozen=True)
class Evidence:
    """Text that the target has generated, and where there are heads the ranks of their labels in what is replayed.

    train: for predictors that draft from it. target: whose text it is, None where nobody says. passes: what a pass
    costs. draft_ms: of the heads for so many nodes, by predictor. heads: with the size of their draft vocabulary.
    log_p: how sure they are of each draft of a tree, by text (`answer_log_p`).
    differs: in what their target is another than the text's. home: the figures of their own run, where it has them.
    """

    train: Sequence[Text]
    replayed: Replayed
    ranks: Mapping[Text, Tensor] | None
    target: str | None
    passes: CycleModel
    draft_ms: Mapping[str, Callable[[int], float]]
    made_from: Mapping[str, Any]
    heads: tuple[Heads, int] | None = None
    log_p: Callable[[Tree, Mapping[Split, Sequence[Text]]], Mapping[Text, Tensor]] | None = None
    differs: Sequence[str] = ()
    home: Mapping[str, Any] | None = None


@verb("target", "generate", "evaluate", "hardware")
def main(cfg: DictConfig) -> None:
    evaluator: Evaluator = instantiate(cfg.evaluate)
    if cfg.server is not None:
        on_server(cfg, instantiate(cfg.target), evaluator)
        return
    run_dir, hardware = Path(cfg.run_dir), instantiate(cfg.hardware)
    read = of_conversations if reads_conversations(cfg) else of_cache
    evidence = read(cfg, hardware, evaluator)
    evaluation, verdict, section = judged(evaluator, evidence)
    print(f"{acceptance_table(evaluation)}\n\n{verdict.text()}")
    if section["tree"] is not None:
        adaptive = priced(evidence, Tree(section["tree"]["paths"]), verdict)
        section["adaptive"] = adaptive.as_json()
        print(f"\n{adaptive.text()}")
    name = "predictors" if section["tree"] is None else "evaluate"  # what is known of heads stays
    if "another_target" in section:
        print(f"\n{section['another_target']['sentence']}\nThe rule: {RULE}.")
        name = "another_target"  # so does what they are worth on their own
    update_report(run_dir, name, section)
    print(f"\nwrote {write_page(run_dir, name)}")


def on_server(cfg: DictConfig, target: Target, evaluator: Evaluator) -> None:
    """The heads of a running server, measured beside the same without; what could not be compared is said."""
    if cfg.baseline is not None and cfg.control is not None:
        raise ConfigError(f"baseline={cfg.baseline} and control={cfg.control}: both are without heads; name one")
    trial = Trial(list(cfg.concurrency), cfg.rounds, cfg.label)
    run_dir, generator = Path(cfg.run_dir), instantiate(cfg.generate)
    tokenizer = target.load_tokenizer()
    servers = open_servers(cfg.server, cfg.baseline, target, tokenizer, generator.timeout_s)
    levels, notes = trial.levels(servers)
    context = min(context_of(target), *(server.engine.context or sys.maxsize for server in servers))
    jobs, failures = generator.prepare(tokenizer, load_prompts(cfg.prompts), context, "unknown", "unknown")
    notes += [f"prompt {row['id']} is left out: {row['error']}" for row in failures]
    if cfg.prompts in (PACKAGE, STUDY):
        jobs = [job for job in jobs if split_of(job.prompt.group, prompt_key(job.prompt_ids)) == "heldout"]
    if not jobs:
        raise ValueError("; ".join([f"prompts={cfg.prompts}: none can be asked", *notes]))
    servers[0].engine.require_target(jobs[0].prompt_ids)
    temperature = evaluator.temperature or 0.0
    sampling = Sampling(temperature, generator.top_p if temperature else 1.0, generator.seed)
    switch = None
    if cfg.control is not None:
        switch = Switch(Path(cfg.control), servers[0].engine, Ask(jobs[0].prompt_ids, SHORT, **asdict(sampling)))
    sides = sides_of(servers, switch)
    notes += trial.remarks(jobs, levels, switch)
    print(
        f"{trial.plan(sides, len(jobs), levels)} of at most {generator.max_new_tokens:,} tokens\n"
        f"{described(servers, switch)}",
        flush=True,
    )
    if cfg.dry_run:
        print("\n".join([*notes, "dry run: nothing was measured or written"]))
        return
    replayed, replayed_here, more = replay_of(cfg, evaluator, target, Path(heads_of(servers[0], switch)), jobs)
    with nullcontext() if switch is None else switch.restored():
        rounds, also = trial.run(jobs, sides, levels, sampling)
    section = {
        "server": cfg.server,
        "engine": servers[0].engine.name,
        "model": servers[0].says.model,
        "nodes": servers[0].says.nodes,
        "heads": heads_of(servers[0], switch),
        "described": described(servers, switch),
        "prompts": len(jobs),
        "label": trial.label,
        "rounds": trial.rounds,
        "max_new_tokens": generator.max_new_tokens,
        "temperature": temperature,
        **compare(servers, tokenizer, jobs, [trial.label_of(job) for job in jobs], rounds, temperature == 0),
        "replayed": [asdict(part) for part in replayed],
        "replayed_here": [asdict(part) for part in replayed_here],
        "notes": [*notes, *more, *also],
    }
    print(as_text(section))
    update_report(run_dir, "server", section)
    print(f"\nwrote {write_server_page(run_dir)}")


def replay_of(
    cfg: DictConfig, evaluator: Evaluator, target: Target, folder: Path, jobs: Sequence[Job]
) -> tuple[list[Part], list[Part], list[str]]:
    """What the heads in `folder` accept of the cache's held-out text, in all and by label; the same of its answers to
    the very prompts that are asked; and what has to be said."""
    if not (Path(cfg.cache) / "manifest.json").exists():
        return [], [], [f"no replay: there is no cache in {cfg.cache}"]
    if not folder.is_dir():
        return [], [], [f"no replay: the heads of the server, {folder}, are not on this machine"]
    try:
        cache, served = Cache.open(Path(cfg.cache), target), load_served(folder, target.vocab_size)
        found = open_beside(served, folder, target.vocab_size)
        ours = served.config.get("medusa_k25")
        made_from = ours.get("cache_fingerprint") if isinstance(ours, dict) else None
        if made_from is not None and not cfg.allow_other_cache:
            cache.refuse_other(made_from, str(folder))
    except ValueError as error:  # the server is there to be measured all the same
        return [], [], [f"no replay: {error}"]
    texts = some_of(texts_of_cache(cache, "heldout"), evaluator.most_tokens)
    ranks = ranks_of(Speculator.of(served.heads, served.vocabulary, target), cache, {"heldout": texts})
    beside = None if found is None else found.load()
    asked = {prompt_key(job.prompt_ids) for job in jobs}
    learnt = len(asked & {document.hash for document in documents_of(cache, "train")})
    notes = [f"{learnt:,} of the prompts are in the training text: heads accept more there"] if learnt else []
    here = {document.id for document in documents_of(cache, "heldout") if document.hash in asked}
    every, of_asked = (
        replayed_parts(some, [ranks[text] for text in some], served.tree, beside, cfg.label)
        for some in (texts, [text for text in texts if text.document in here])
    )
    return every, of_asked, notes


def judged(evaluator: Evaluator, evidence: Evidence) -> tuple[Evaluation, Verdict, dict[str, Any]]:
    """What is accepted, whether it pays, and all of it as a section of report.json."""
    replayed = evidence.replayed
    predictors = evaluator.predictors(evidence.train, replayed, evidence.ranks)
    evaluation = evaluator.run(replayed, predictors, evidence.ranks)

    sampled = temperatures_of(replayed.heldout)
    of_text = next(iter(sampled)) if len(sampled) == 1 else None
    temperature = evaluator.temperature if evaluator.temperature is not None else of_text or 0.0
    context = evaluator.context if evaluator.context is not None else evidence.passes.usual_context
    place = (evaluator.batch, context, temperature)
    own = fastest_candidates(evaluator.judged(evaluation.rows), evidence.passes, evidence.draft_ms, *place)
    candidates = [*own, *published_candidates(evidence.passes)]
    types = (
        () if evidence.heads is None else evidence.passes.types(*evidence.heads, evaluator.batch, context, temperature)
    )
    verdict = judge(evidence.passes, candidates, evidence.target, *place, sampled, types)

    chosen = next(row.candidate for row in verdict.rows if row.candidate in own)
    by_name = {predictor.name: predictor for predictor in predictors}
    section = {
        **evidence.made_from,
        **evaluation.as_json(),
        "verdict": verdict.as_json(),
        "speed": speeds(evaluation.rows, evidence, place),
        "breakdown": {"predictor": chosen.predictor, "nodes": chosen.nodes}
        | broken_down(by_name[chosen.predictor], replayed, chosen.nodes),
        "tree": None,
    }
    if evidence.ranks is not None:
        tree, nodes = by_name[TREE], next(each.nodes for each in own if each.predictor == TREE)
        assert isinstance(tree, HeadsTree)
        shape = drawn(tree.tree(nodes), replayed.passes(tree, nodes), replayed.heldout, evidence.ranks)
        section["tree"] = asdict(shape)
    if evidence.differs:
        section["another_target"] = advised(evidence, evaluation.rows, verdict)
    return evaluation, verdict, section


def priced(evidence: Evidence, tree: Tree, verdict: Verdict) -> Priced:
    """The heads in the tree that was judged, when a server chooses in every cycle what part of it is verified."""
    assert evidence.heads is not None and evidence.ranks is not None and evidence.log_p is not None
    replayed, ranks = evidence.replayed, evidence.ranks
    texts: dict[Split, Sequence[Text]] = {
        "calibration": some_of(replayed.calibration, PRICED_TOKENS),
        "heldout": some_of(replayed.heldout, PRICED_TOKENS),
    }
    log_p = evidence.log_p(tree, texts)
    costs = Costs.of(evidence.passes, *evidence.heads, tree.num_nodes, verdict.context, verdict.temperature)
    calibration, heldout = (([log_p[text] for text in some], [ranks[text] for text in some]) for some in texts.values())
    of_target = evidence.target is not None and evidence.passes.hardware.is_of(evidence.target)
    return Priced.of(fitted(tree, *calibration, costs), tree, *heldout, of_target)


def advised(evidence: Evidence, rows: Sequence[Row], verdict: Verdict) -> dict[str, Any]:
    """What to do with heads of another target, as a part of report.json."""
    own = {row.num_nodes: row for row in rows if row.predictor == TREE}
    lookup = {row.num_nodes: row.every.length for row in rows if row.predictor == NGRAM_LOOKUP}
    home = {
        row["num_nodes"]: Length.around(row["every"]["length"], tuple(row["interval"]))
        for row in (evidence.home or {"rows": []})["rows"]
        if row["predictor"] == TREE
    }
    judged = next(row for row in verdict.rows if row.candidate.predictor == TREE)
    nodes = common_size(judged.candidate.nodes, [*own], [*home])
    if nodes is None:
        sentence = (
            f"Another target ({', '.join(evidence.differs)}): what these heads accept on the text of their own target "
            "is not known, so nothing is advised; evaluate them in the run that trained them, then this again."
        )
        return {"differs": list(evidence.differs), "action": None, "sentence": sentence, "rule": RULE}
    row = own[nodes]
    here = Length.around(row.every.length, row.interval)
    cycle_ms = evidence.passes.speed(
        nodes, here, verdict.batch, verdict.context, verdict.temperature, evidence.draft_ms[TREE](nodes)
    ).cycle.ms
    pays = cycle_ms * verdict.baseline_tok_s / 1000
    return Advice(tuple(evidence.differs), nodes, here, home[nodes], lookup[nodes], pays).as_json()


def evaluated_at_home(checkpoint: HeadsCheckpoint) -> Mapping[str, Any] | None:
    """The section "evaluate" of the run that a checkpoint lies in, if it is about this checkpoint and its cache."""
    path = checkpoint.path.resolve()
    found = read_report(path.parent.parent).get("evaluate", {})
    known = Path(found.get("checkpoint", "")).name, found.get("cache_fingerprint")
    return found if known == (path.name, checkpoint.record["cache_fingerprint"]) else None


def broken_down(predictor: Predictor, replayed: Replayed, num_nodes: int) -> dict[str, Any]:
    passes = replayed.passes(predictor, num_nodes)
    return break_down(replayed.heldout, passes, replayed.resampling, num_nodes).as_json()


def speeds(rows: Sequence[Row], evidence: Evidence, place: tuple[int, int, float]) -> dict[str, Any]:
    """predictor -> [[nodes, tokens/s, low, high, what the cycle is based on], ..]"""
    found: dict[str, Any] = {}
    for row in rows:
        drafting = evidence.draft_ms.get(row.predictor, no_drafting)(row.num_nodes)
        speed = evidence.passes.speed(row.num_nodes, Length.around(row.every.length, row.interval), *place, drafting)
        point = [row.num_nodes, speed.tok_s, speed.low_tok_s, speed.high_tok_s, speed.cycle.basis]
        found.setdefault(row.predictor, []).append(point)
    return found


def reads_conversations(cfg: DictConfig) -> bool:
    """A file that the user names, or the run's own while it has no cache."""
    run_dir, cache = Path(cfg.run_dir), Path(cfg.cache)
    if cfg.conversations is None:
        return False
    if Path(cfg.conversations) != run_dir / "conversations.jsonl":
        if cache != run_dir / "cache":
            raise ConfigError(f"conversations={cfg.conversations} and cache={cfg.cache}: evaluate reads one; name one")
        return True
    return not (cache / "manifest.json").exists() and Path(cfg.conversations).exists()


def of_conversations(cfg: DictConfig, hardware: Hardware, evaluator: Evaluator) -> Evidence:
    """Opens the target only where nothing else knows what is needed of it."""
    file, made_from = Path(cfg.conversations), {"conversations": str(cfg.conversations)}
    renders = holds_messages(file)
    if cfg.tokenizer is None and not renders and hardware.is_of(KIMI_K25_NAME):
        texts = texts_of_conversations(file, None, (KIMI_THINK_ID, KIMI_THINK_END_ID))
        passes, replayed = CycleModel.on(hardware, file.parent), evaluator.replayed(texts)
        return Evidence(texts["train"], replayed, None, None, passes, {}, made_from)
    name = None
    if cfg.tokenizer is not None:
        folder = Path(cfg.tokenizer)
        tokenizer = load_tokenizer(folder, cfg.target.get("trust_remote_code", False))
        end_ids = end_ids_of(folder, tokenizer)
    else:
        target = instantiate(cfg.target)
        name, folder, tokenizer, end_ids = target.name, target.path, target.load_tokenizer(), target.end_ids
    marks = ChatMarks.read(tokenizer, end_ids, folder) if renders else None
    texts = texts_of_conversations(file, marks, think_ids_of(tokenizer))
    passes, replayed = CycleModel.on(hardware, folder), evaluator.replayed(texts)
    return Evidence(texts["train"], replayed, None, name, passes, {}, made_from)


def of_cache(cfg: DictConfig, hardware: Hardware, evaluator: Evaluator) -> Evidence:
    target = instantiate(cfg.target)
    cache = Cache.open(Path(cfg.cache), target, allow_target_mismatch=cfg.allow_target_mismatch)
    think_ids = think_ids_of(target.load_tokenizer())
    texts = {split: texts_of_cache(cache, split, think_ids) for split in SPLITS}
    replayed = evaluator.replayed(texts)
    passes = CycleModel.on(hardware, target.path)
    made_from = {"cache_fingerprint": cache.fingerprint}
    checkpoints = Path(cfg.run_dir) / "checkpoints"
    if cfg.checkpoint is None or (cfg.checkpoint == "best" and not complete_checkpoints(checkpoints)):
        if cfg.checkpoint is not None:
            print(f"no checkpoint in {checkpoints}: for the predictors alone that need no training")
        return Evidence(texts["train"], replayed, None, target.name, passes, {}, made_from)
    checkpoint = load_heads(find_checkpoint(checkpoints, cfg.checkpoint))
    differs = checkpoint.refuse_other_target(target, cfg.allow_target_mismatch)
    if not cfg.allow_other_cache and not differs:  # another target's answers are another text
        cache.refuse_other(checkpoint.record["cache_fingerprint"], str(checkpoint.path))
    speculator = checkpoint.speculator(target, default_device())
    reported: dict[Split, Sequence[Text]] = {"calibration": replayed.calibration, "heldout": replayed.heldout}
    ranks = ranks_of(speculator, cache, reported)
    heads = (speculator.heads, len(speculator.vocabulary))

    def draft_ms(nodes: int) -> float:
        return passes.drafting(*heads, nodes).ms

    def log_p(tree: Tree, some: Mapping[Split, Sequence[Text]]) -> Mapping[Text, Tensor]:
        return by_text(functools.partial(answer_log_p, Drafter(speculator, tree), cache), cache, some)

    return Evidence(
        texts["train"],
        replayed,
        ranks,
        target.name,
        passes,
        dict.fromkeys(HEADS, draft_ms),
        made_from | {"checkpoint": str(checkpoint.path)},
        heads,
        log_p,
        differs,
        evaluated_at_home(checkpoint) if differs else None,
    )


if __name__ == "__main__":
    main()
