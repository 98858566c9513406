"""The folder to serve from: heads, draft vocabulary, tree and a model card, for SGLang, vLLM or TGI.

python -m medusa_k25.export [checkpoint=best] [format=sglang|vllm|medusa|ngram_corpus] [export_dir=FOLDER]
                            [num_nodes=9] [tree=[[0],[0,0],[1]]] [hardware=NAME] [beside=lookup|answers]
                            [adaptive=false]
python -m medusa_k25.export heads=blank [num_nodes=16] [max_width=1] [tree=...] export_dir=FOLDER
python -m medusa_k25.export format=ngram_corpus [conversations=FILE | cache=FOLDER] [tokenizer=FOLDER]
                            [corpus_tokens=10_000_000] [num_nodes=9] export_dir=FOLDER

The tree is the one that gives most tokens/s on `hardware`, by calibration text, unless num_nodes or tree say otherwise.

beside=lookup: where the last tokens stood before in prompt and answer, a pass gives some of its nodes to what followed
there; =answers: or in the training answers, of which the folder gets a table. How many is chosen on calibration text.

adaptive: format=sglang tells the server how often drafts are right that the heads are so sure of, and what a pass costs
on `hardware`: it then chooses in every cycle what part of the tree is verified, and above which number of requests
nothing is drafted. `evaluate` says what that is worth. =false: every cycle verifies the whole tree.

format=ngram_corpus: the target's answers for SGLang's n-gram speculation, which needs neither heads nor states.
heads=blank: untrained heads, which need no checkpoint: serve any tree, and measure what a verify pass costs.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from medusa_k25 import __version__
from medusa_k25.acceptance import TREE, HeadsBesideLookup, HeadsTree, by_text, ranks_of, some_of
from medusa_k25.adaptive import Adaptive
from medusa_k25.cache import Cache
from medusa_k25.chat import ChatMarks
from medusa_k25.checkpoint import HeadsCheckpoint, find_checkpoint, load_heads
from medusa_k25.config import verb
from medusa_k25.costs.cycle import CycleModel
from medusa_k25.costs.hardware import Hardware
from medusa_k25.data.splits import SPLITS, Split
from medusa_k25.data.texts import Text, holds_messages, texts_of_cache, texts_of_conversations
from medusa_k25.data.windows import documents_of
from medusa_k25.heads import DraftVocabulary, Heads, Speculator
from medusa_k25.ngram.beside import MOST_CHAIN, Beside, looked_up
from medusa_k25.ngram.corpus import choose_corpus
from medusa_k25.ngram.table import AnswersTable
from medusa_k25.prompts import PACKAGE, STUDY, load_prompts
from medusa_k25.replay import NO_CALIBRATION, answer_ranks, fastest_tree, grow
from medusa_k25.reports.report import read_report, update_report
from medusa_k25.serving.adaptive_fit import PRICED_TOKENS, Costs, adaptive_note, answer_log_p, fitted
from medusa_k25.serving.beside_files import SOURCES, beside_note, write_beside
from medusa_k25.serving.blank import blank_heads, made_up_tree
from medusa_k25.serving.card import HUB_NAMES, Measured, licence_terms, measured_rows, model_card
from medusa_k25.serving.decode import Drafter
from medusa_k25.serving.formats import FORMATS, export_heads, remarks
from medusa_k25.serving.ngram_corpus import CORPUS_FILE, make_corpus, write_corpus
from medusa_k25.serving.untrusted import read_json
from medusa_k25.target import Target, end_ids_of, load_tokenizer, target_differences
from medusa_k25.tree import Growth, Tree


@verb("target", "hardware")
def main(cfg: DictConfig) -> None:
    if cfg.format not in (*FORMATS, "ngram_corpus"):
        raise ValueError(f"format={cfg.format}: expected one of {', '.join((*FORMATS, 'ngram_corpus'))}")
    if cfg.format == "ngram_corpus":
        export_corpus(cfg)
        return
    target = instantiate(cfg.target)
    if instantiate(cfg.heads).func is blank_heads:
        export_blank(cfg, target)
    else:
        export_trained(cfg, target)


def export_corpus(cfg: DictConfig) -> None:
    """Reads no states, and where a tokenizer is named nothing of the target."""
    run_dir, folder = Path(cfg.run_dir), Path(cfg.export_dir)
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} holds exported heads, whose README.md would be replaced; give export_dir=FOLDER")
    if cfg.tokenizer is None:
        target = instantiate(cfg.target)
        tokenizer, end_ids, place = target.load_tokenizer(), target.end_ids, target.path
        base_model = cfg.base_model or HUB_NAMES.get(target.name, str(target.path))
    else:
        place = Path(cfg.tokenizer)
        tokenizer = load_tokenizer(place, cfg.target.get("trust_remote_code", False))
        end_ids = end_ids_of(place, tokenizer)
        machine = cfg.hardware.target if "/" in cfg.hardware.target else "MODEL"  # a name on the hub, if it is one
        base_model = cfg.base_model or cfg.target.get("path") or machine
    cache_dir, conversations = Path(cfg.cache), Path(cfg.conversations)
    if cache_dir.exists() and conversations == run_dir / "conversations.jsonl":  # no other file was named
        cache = Cache.open(cache_dir, check=False)
        texts = {split: texts_of_cache(cache, split) for split in SPLITS}
        source = f"cache {cache.fingerprint[:16]}"
    else:
        marks = ChatMarks.read(tokenizer, end_ids, place) if holds_messages(conversations) else None
        texts = texts_of_conversations(conversations, marks)
        source = conversations.name
    if cfg.num_nodes is None:
        cycle_ms = CycleModel.on(instantiate(cfg.hardware), place).passes_ms(None)
    else:
        cycle_ms = {cfg.num_nodes: 1.0}
    made = make_corpus(texts, tokenizer, cfg.corpus_tokens, cycle_ms, cfg.evaluate.most_tokens)
    print("\n".join(made.summary()))
    write_corpus(folder, made, base_model, cfg.corpus_tokens, source)
    update_report(run_dir, "ngram_corpus", {"folder": str(folder), "source": source} | made.as_json())
    print(f"wrote {folder}: {CORPUS_FILE} with {len(made.lines):,} answers, and in README.md how to serve with it")


def export_trained(cfg: DictConfig, target: Target) -> None:
    run_dir, folder = Path(cfg.run_dir), Path(cfg.export_dir)
    if (folder / CORPUS_FILE).exists():
        raise ValueError(f"{folder} holds a corpus, whose README.md would be replaced; give export_dir=FOLDER")
    if cfg.beside is not None and (cfg.beside not in SOURCES or cfg.format != "sglang"):
        raise ValueError(
            f"beside={cfg.beside} with format={cfg.format}: expected null, {' or '.join(SOURCES)}, and format=sglang, "
            "which alone drafts it"
        )
    hardware: Hardware = instantiate(cfg.hardware)
    if cfg.tree is None and cfg.num_nodes is None and not hardware.is_of(target.name):
        print(f"the tree is the fastest by the passes of {hardware.target} on {hardware.name}, not by {target.name}'s")
    checkpoint = load_heads(find_checkpoint(run_dir / "checkpoints", cfg.checkpoint))
    differs = checkpoint.refuse_other_target(target, cfg.allow_target_mismatch)
    heads, vocabulary, record = checkpoint.heads, checkpoint.vocabulary, checkpoint.record

    @functools.cache  # for the tree and for what is drafted beside it
    def opened() -> tuple[Speculator, Cache]:
        cache = Cache.open(Path(cfg.cache), target, allow_target_mismatch=cfg.allow_target_mismatch)
        if not cfg.allow_other_cache and not differs:  # another target's answers are another text
            cache.refuse_other(record["cache_fingerprint"], str(checkpoint.path))
        return checkpoint.speculator(target), cache

    if cfg.tree is not None:
        tree = given_tree(cfg.tree)
    elif record["tree"] and chosen_alike(cfg, record["config"]):
        tree = Tree(record["tree"])
    else:
        speculator, cache = opened()
        calibration = answer_ranks(speculator, cache, documents_of(cache, "calibration"))
        if cfg.num_nodes is not None:
            tree = grow(calibration, cfg.num_nodes, cfg.max_width).tree(cfg.num_nodes)
        else:
            passes = CycleModel.on(hardware, target.path)
            cycle_ms = passes.heads_ms(heads, len(vocabulary))
            tree = fastest_tree(calibration, cycle_ms, cfg.max_width)
    beside = None
    if cfg.beside is not None:
        beside = best_beside(*opened(), tree, cfg.beside, cfg.corpus_tokens, cfg.evaluate.most_tokens)
    adaptive = None
    if cfg.adaptive and cfg.format == "sglang":
        if why := without_adaptive(cfg, target, hardware):
            print(f"every cycle verifies the whole tree: {why}")
        else:
            adaptive = best_adaptive(*opened(), tree, CycleModel.on(hardware, target.path))
    provenance = {key: record[key] for key in ("target", "cache_fingerprint", "code_version", "step")}
    if differs:
        provenance["also_for"] = target.identity  # whose server may load them all the same
    evaluation = read_report(run_dir).get("evaluate")
    made_from = {"checkpoint": str(checkpoint.path), "cache_fingerprint": record["cache_fingerprint"]}
    if evaluation is not None and any(evaluation.get(key) != value for key, value in made_from.items()):
        evaluation = None  # of other heads, or on other text
    rows = measured_rows(record, evaluation, tree.paths, heads.num_heads, None if beside is None else cfg.beside)
    data, prompts = data_of(Path(cfg.cache), provenance), prompts_of(Path(cfg.cache), provenance, record["config"])
    write(cfg, target, heads, vocabulary, tree, provenance, data, prompts, rows, beside, adaptive)
    made = {"folder": str(folder), "checkpoint": str(checkpoint.path), "nodes": tree.num_nodes}
    if adaptive is not None:
        made["draft_up_to"] = adaptive.draft_up_to
    if beside is not None:
        made |= {"beside": cfg.beside, "chain": beside.chain, "shortest": beside.shortest}
    update_report(run_dir, "export", made)
    if cfg.logger.wandb_project is not None:
        log_to_wandb(cfg, checkpoint, tree, provenance)
    print(f"wrote {folder}: {heads.num_heads} heads in {cfg.export_dtype}, tree of {tree.num_nodes} nodes")


def best_beside(
    speculator: Speculator, cache: Cache, tree: Tree, source: str, corpus_tokens: int, most_tokens: int | None
) -> Beside | None:
    """How a pass of the tree's nodes is best split on calibration text; None: not at all. The arguments: evaluate's."""
    calibration = some_of(texts_of_cache(cache, "calibration"), most_tokens)
    ranks = ranks_of(speculator, cache, {"calibration": calibration})
    if not ranks:
        raise ValueError(NO_CALIBRATION)
    reach, table = speculator.heads.num_heads + MOST_CHAIN, None
    if source == "answers":
        corpus = choose_corpus(texts_of_cache(cache, "train"), calibration, corpus_tokens)
        table = AnswersTable.build([text.answer_T for text in corpus], reach)
    growth = Growth.of_tree(tree, torch.cat(list(ranks.values())))
    found = dict(zip(calibration, looked_up(calibration, table, reach), strict=True))
    share = HeadsBesideLookup(source, HeadsTree(TREE, growth, ranks), found, calibration).share(tree.num_nodes)
    if share.chain == 0:
        print(f"beside={source}: no node pays beside this tree on calibration text, the heads draft alone")
        return None
    return Beside(tree, growth.tree(tree.num_nodes - share.chain), share.shortest, table=table)


def without_adaptive(cfg: DictConfig, target: Target, hardware: Hardware) -> str | None:
    """Why a server cannot be told how much of the tree a cycle should verify; None: it can."""
    if not hardware.is_of(target.name):
        return f"hardware={hardware.name} knows the passes of {hardware.target}, not of {target.name}"
    if cfg.beside is not None:
        return f"beside={cfg.beside}, and nobody knows how sure what was looked up is"
    if not (Path(cfg.cache) / "manifest.json").is_file():
        return f"no cache at {cfg.cache}, whose calibration text says how often the heads are right when they are sure"
    return None


def best_adaptive(speculator: Speculator, cache: Cache, tree: Tree, passes: CycleModel) -> Adaptive:
    """As `evaluate` prices it, of greedy requests with the usual context."""
    calibration = some_of(texts_of_cache(cache, "calibration"), PRICED_TOKENS)
    if not calibration:
        raise ValueError(f"{NO_CALIBRATION}; or adaptive=false")
    texts: dict[Split, list[Text]] = {"calibration": calibration}
    ranks = ranks_of(speculator, cache, texts)
    log_p = by_text(functools.partial(answer_log_p, Drafter(speculator, tree), cache), cache, texts)
    costs = Costs.of(passes, speculator.heads, len(speculator.vocabulary), tree.num_nodes)
    return fitted(tree, list(log_p.values()), list(ranks.values()), costs)


def chosen_alike(cfg: DictConfig, trained: Mapping[str, Any]) -> bool:
    """Whether the tree that training has chosen is the one to export: by the same rule, for the same machine."""
    return all(
        (OmegaConf.to_container(cfg[key], resolve=True) if isinstance(cfg[key], DictConfig) else cfg[key])
        == trained.get(key)
        for key in ("num_nodes", "max_width", "hardware")
    )


def export_blank(cfg: DictConfig, target: Target) -> None:
    folder = Path(cfg.export_dir)
    if (folder / "config.json").exists():
        provenance = read_json(folder / "config.json").get("medusa_k25")
        if not isinstance(provenance, dict) or provenance.get("heads") != "blank":
            raise ValueError(f"{folder} holds trained heads, which blank ones would replace; give export_dir=FOLDER")
    if cfg.beside is not None:
        raise ValueError(f"heads=blank and beside={cfg.beside}: how a pass is split is chosen for trained heads alone")
    if cfg.tree is None and cfg.num_nodes is None:
        raise ValueError("heads=blank: give num_nodes=N, the tokens that a pass is to take, or tree=[[0],[0,0],[1]]")
    tree = made_up_tree(cfg.num_nodes, cfg.heads.num_heads, cfg.max_width) if cfg.tree is None else given_tree(cfg.tree)
    vocabulary = DraftVocabulary.most_frequent(torch.zeros(target.vocab_size), cfg.draft_vocab_size)
    heads = instantiate(cfg.heads)(target.hidden_size, len(vocabulary), tree)
    if heads.own_lm_head:
        heads.init_lm_heads(vocabulary.rows(target.lm_head))
    provenance = {"target": target.identity, "code_version": __version__, "heads": "blank"}
    untrained = "none, these heads are untrained: use them to measure"
    write(cfg, target, heads, vocabulary, tree, provenance, untrained, "none", [])
    print(f"wrote {folder}: {heads.num_heads} untrained heads in {cfg.export_dtype}, tree of {tree.num_nodes} nodes")


def given_tree(paths: Any) -> Tree:
    """A tree from the command line."""
    if not isinstance(paths, ListConfig) or not all(isinstance(path, ListConfig) for path in paths):
        raise ValueError(
            f"tree={paths}: expected rank paths such as [[0],[0,0],[1]]; to have a tree of N nodes chosen, num_nodes=N"
        )
    return Tree(paths)


def write(
    cfg: DictConfig,
    target: Target,
    heads: Heads,
    vocabulary: DraftVocabulary,
    tree: Tree,
    provenance: dict[str, Any],
    data: str,
    prompts: str,
    rows: list[Measured],
    beside: Beside | None = None,
    adaptive: Adaptive | None = None,
) -> None:
    """The folder and its card. data, prompts: sentences on what the heads have learned from."""
    hub_name = cfg.base_model or HUB_NAMES.get(target.name) or (target.name if "/" in target.name else None)
    folder = Path(cfg.export_dir)
    dtype: Any = getattr(torch, cfg.export_dtype, cfg.export_dtype)
    base_model = hub_name or str(target.path)
    served = export_heads(
        folder,
        heads,
        vocabulary,
        tree,
        dtype,
        provenance,
        cfg.format,
        target.lm_head,
        base_model,
        cfg.medusa_tree_fallback,
        adaptive,
    )
    write_beside(folder, beside)
    notes = remarks(heads, vocabulary, cfg.format)
    if beside is not None:
        notes.append(beside_note(beside))
    if adaptive is not None:
        notes.append(adaptive_note(adaptive, cfg.hardware.name))
    if "also_for" in provenance:
        differs = target_differences(provenance["target"], provenance["also_for"])
        notes.append(
            f"The heads were trained for another target than {target.path}, for which they were exported; it differs "
            f"in {', '.join(differs)}, and the figures here are of the one that they were trained for"
        )
    for note in notes:
        print(note)
    nested = target.model_type == "kimi_k25"
    terms = licence_terms(hub_name or target.name, hub_name, target.path, cfg.heads_license, prompts)
    card = model_card(
        cfg.format, served, hub_name, provenance["target"], data, rows, notes, nested, terms, cfg.heads_license
    )
    (folder / "README.md").write_text(card)


def data_of(cache_dir: Path, provenance: dict[str, Any]) -> str:
    """A sentence on the cache that the heads were trained on; its sizes where it is still there, and the same."""
    fingerprint = provenance["cache_fingerprint"]
    trained = f"cache {fingerprint[:16]}, {provenance['step']:,} steps"
    if not (cache_dir / "manifest.json").is_file():
        return trained
    cache = Cache.open(cache_dir, check=False)
    if cache.fingerprint != fingerprint:  # it has grown since, or is another
        return trained
    train = documents_of(cache, "train")
    states = sum(document.row_stop - document.row_start for document in train)
    return f"{len(train):,} documents with {states:,} positions, {trained}"


def prompts_of(cache_dir: Path, provenance: Mapping[str, Any], trained: Mapping[str, Any]) -> str:
    """A sentence on the terms of the training's prompts. trained: the configuration, which may name their origin."""
    named = trained.get("prompts")
    others = f"`{named}`" if named not in (None, PACKAGE, STUDY) else "an origin that was not recorded"
    look_up = f"from {others}: their terms must be looked up with their owner"
    cache = Cache.open(cache_dir, check=False) if (cache_dir / "manifest.json").is_file() else None
    if cache is None or cache.fingerprint != provenance["cache_fingerprint"]:
        return look_up
    shipped, ids = {prompt.id for prompt in load_prompts(STUDY)}, {document.id for document in cache.documents}
    ours = f"{len(ids & shipped):,} of {len(ids):,} are questions that medusa_k25 ships, under Apache-2.0 as all of it"
    return ours if ids <= shipped else f"{ours}; the others {look_up}" if ids & shipped else look_up


def log_to_wandb(cfg: DictConfig, checkpoint: HeadsCheckpoint, tree: Tree, provenance: dict[str, Any]) -> None:
    """The exported folder as an artifact of the training's run, which it continues, and what `evaluate` has found."""
    _, run = instantiate(cfg.logger)
    step, metrics = checkpoint.record["step"], checkpoint.record["metrics"]
    logged = {key: checkpoint.record[key] for key in ("target", "cache_fingerprint", "code_version", "config")}
    config = Path(cfg.run_dir) / "config.yaml"  # the training may have gone on otherwise after this checkpoint
    if config.exists():
        logged["config"] = OmegaConf.to_container(OmegaConf.load(config))
    run.log_hyperparams(logged)
    run.log_heads(metrics, step)
    if "evaluate" in (report := read_report(Path(cfg.run_dir))):
        run.log_evaluation(report["evaluate"], step)
    acceptance = {name: value for name, value in metrics.items() if "/acceptance_" in name}
    tree_paths = [list(path) for path in tree.paths]
    run.log_folder(Path(cfg.export_dir), {**provenance, "acceptance": acceptance, "tree": tree_paths})
    run.finish()


if __name__ == "__main__":
    main()
