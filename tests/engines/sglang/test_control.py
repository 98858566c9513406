"""A running server is switched, by its operator and by itself, and tells what it does. Its text stays the target's."""

import json
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_k25.adaptive import Adaptive
from medusa_k25.heads import DraftVocabulary, Heads, ResidualHeads, Speculator
from medusa_k25.serving.control import NODES, Order, Status, give_order, read_status
from medusa_k25.serving.decode import Drafter
from medusa_k25.target import Target, TargetModel
from medusa_k25.tree import Tree
from tests.engines.sglang.accepting import TREE, accepting_heads, decode_all, serve_from
from tests.engines.sglang.engine import serving

LIMIT = 40


@dataclass
class World:
    """A target with prompts, their answers, and heads that know them. passes: of the reference decoder, with TREE."""

    target: Target
    model: TargetModel
    vocabulary: DraftVocabulary
    prompts: list[list[int]]
    answers: list[list[int]]
    heads: Heads
    passes: list[int]

    def export(self, folder: Path, tree: Tree = TREE, adaptive: Adaptive | None = None) -> Path:
        folder.mkdir()
        serve_from(folder, self.target, self.heads, self.vocabulary, tree)
        if adaptive is not None:
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"medusa_adaptive": adaptive.as_json()}))
        return folder


@pytest.fixture(scope="module")
def world(tiny_llama: Target) -> World:
    target, model = tiny_llama, tiny_llama.load_model(torch.float32)
    everything = DraftVocabulary(torch.arange(target.vocab_size), target.vocab_size)
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(3, 490, (3 + i * 7 % 40,), generator=generator).tolist() for i in range(8)]
    nothing = ResidualHeads(target.hidden_size, 1)
    plain = decode_all(target, model, nothing, everything, Tree([]), prompts, LIMIT)
    answers = [each.answer_ids for each in plain]
    heads = accepting_heads(model, target.lm_head, prompts, answers, everything, steps=40)
    decoded = decode_all(target, model, heads, everything, TREE, prompts, LIMIT)
    return World(target, model, everything, prompts, answers, heads, [each.acceptance.passes for each in decoded])


@dataclass
class Client:
    url: str
    control: Path
    faults: list[str] = field(default_factory=list)

    def ask(self, prompts: Sequence[Sequence[int]], limit: int = LIMIT, **more: Any) -> list[dict[str, Any]]:
        sampling = {"temperature": 0, "max_new_tokens": limit, "ignore_eos": True, **more}
        body = json.dumps({"input_ids": prompts, "sampling_params": sampling}).encode()
        request = urllib.request.Request(f"{self.url}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            rows: list[dict[str, Any]] = json.load(answer)
        return rows

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        series = (line.rsplit(" ", 1) for line in lines if line.startswith("medusa_k25:"))
        return {name: float(value) for name, value in series}

    def order(self, order: Order | str) -> Status:
        """Give it and wait until a server under load has answered."""
        if isinstance(order, str):
            (self.control / "control.json").write_text(order)
        else:
            give_order(self.control, order)
        before = (self.control / "status.json").read_bytes() if (self.control / "status.json").exists() else None
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (self.control / "status.json").exists() and (self.control / "status.json").read_bytes() != before:
                status = read_status(self.control)
                assert status is not None
                return status
            time.sleep(0.05)
        raise AssertionError("the server did not look at its control file")


@contextmanager
def under_load(client: Client, world: World) -> Iterator[None]:
    """Requests come all the time, each of which must get the target's own text."""
    done = threading.Event()

    def keep_asking(first: int) -> None:
        place = first
        while not done.is_set():
            some = [place % len(world.prompts), (place + 3) % len(world.prompts)]
            try:
                for at, row in zip(some, client.ask([world.prompts[at] for at in some]), strict=True):
                    if row["output_ids"] != world.answers[at]:
                        client.faults.append(f"answer {at}: {row['output_ids']}, expected {world.answers[at]}")
            except OSError as error:
                client.faults.append(str(error))
                return
            place += 1

    threads = [threading.Thread(target=keep_asking, args=(first,)) for first in (0, 4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert client.faults == []


@contextmanager
def server(world: World, folder: Path, tmp_path: Path, **more: Any) -> Iterator[Client]:
    control = tmp_path / "control"
    control.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEDUSA_K25_CONTROL", str(control))
        if "tp_size" in more:
            patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        arguments: dict[str, Any] = {
            "speculative_algorithm": "MEDUSA",
            "speculative_draft_model_path": str(folder),
        }
        arguments |= {"context_length": 160, "skip_tokenizer_init": True, "enable_metrics": True}
        with serving(world.target, tmp_path / "log", **arguments, **more) as (url, _):
            yield Client(url, control)


def nodes_of(row: dict[str, Any]) -> list[int]:
    """Of every pass of a request, from its meta_info."""
    nodes: list[int] = row["meta_info"][NODES]
    assert len(nodes) == len(row["output_ids"]) and nodes[0] == 0
    return [number for number in nodes if number]


def check_text(client: Client, world: World, **more: Any) -> list[dict[str, Any]]:
    rows = client.ask(world.prompts, **more)
    assert [row["output_ids"] for row in rows] == world.answers
    return rows


def test_orders_are_carried_out_under_load_and_counted(world: World, tmp_path: Path) -> None:
    first, second = world.export(tmp_path / "first"), world.export(tmp_path / "second", Tree.chain(2))
    larger = world.export(tmp_path / "larger", Tree([[rank] for rank in range(20)]))
    (tmp_path / "empty").mkdir()
    with server(world, first, tmp_path) as client:
        rows = check_text(client, world, custom_params={"medusa_k25_label": "known"})
        assert [row["meta_info"]["spec_verify_ct"] for row in rows] == world.passes
        assert {number for row in rows for number in nodes_of(row)} == {TREE.num_nodes}
        assert [len(nodes_of(row)) for row in rows] == world.passes
        with under_load(client, world):
            status = client.order(Order("off"))
            assert (status.drafting, status.error) == ("off", None)
        plain = check_text(client, world, custom_params={"medusa_k25_label": "off"})
        assert {number for row in plain for number in nodes_of(row)} == {1}
        time.sleep(1.5)
        client.ask(world.prompts[:1], 2)  # a cycle more, with which the last second is written
        check_series(client.metrics(), world, len(rows), sum(map(len, map(nodes_of, plain))))
        with under_load(client, world):
            status = client.order(Order("on", str(second)))
            assert (status.drafting, status.heads, status.error) == ("on", str(second), None)
        assert {number for row in check_text(client, world) for number in nodes_of(row)} == {3}
        for order, words in (
            (Order("on", str(tmp_path / "missing")), "no export folder"),
            (Order("on", str(tmp_path / "empty")), "no export folder"),
            (Order("on", str(larger)), "21 nodes, this server was started for 12"),
            ('{"drafting": ', "damaged"),
        ):
            with under_load(client, world):
                status = client.order(order)
            assert status.error is not None and words in status.error
            assert (status.drafting, status.heads) == ("on", str(second))
        assert {number for row in check_text(client, world) for number in nodes_of(row)} == {3}
        with under_load(client, world):
            assert client.order(Order("on")).heads == str(first)
        rows = check_text(client, world)
        assert [len(nodes_of(row)) for row in rows] == world.passes


def check_series(series: dict[str, float], world: World, requests: int, plain_cycles: int) -> None:
    """What /metrics says of `requests` that drafted, labelled "known", and of those without, labelled "off"."""
    assert series["medusa_k25:drafting"] == 0
    cycles = sum(world.passes)
    assert series['medusa_k25:cycles_total{kind="verify",label="known"}'] == cycles
    assert series['medusa_k25:cycles_total{kind="plain",label="known"}'] == 0
    emitted = series['medusa_k25:emitted_tokens_total{label="known"}']
    # the last pass of an answer may accept drafts beyond its end
    assert (LIMIT - 1) * requests <= emitted <= (LIMIT - 1 + TREE.depth) * requests
    assert series['medusa_k25:accept_length{label="known"}'] == pytest.approx(emitted / cycles)
    drafted = [series[f'medusa_k25:drafted_tokens_total{{depth="{depth}",label="known"}}'] for depth in (1, 2, 3)]
    assert drafted == [cycles * int((TREE.depths_n == depth).sum()) for depth in (1, 2, 3)]
    accepted = [series[f'medusa_k25:accepted_tokens_total{{depth="{depth}",label="known"}}'] for depth in (1, 2, 3)]
    assert sum(accepted) == emitted - cycles and accepted == sorted(accepted, reverse=True)
    assert series['medusa_k25:plain_share{label="off"}'] == 1
    assert series['medusa_k25:cycles_total{kind="plain",label="off"}'] == plain_cycles


def adaptive_for(tree: Tree, sizes: Sequence[int], whole_ms: float, pace: float = 0.0, up_to: int = 8) -> Adaptive:
    """Uncalibrated; a pass of s nodes takes 1 ms and a share of what the whole tree takes more."""
    costs = tuple(1 + (whole_ms - 1) * (size - 1) / (tree.num_nodes - 1) for size in sizes)
    return Adaptive(
        order=tuple(range(1, tree.num_nodes)),
        sizes=tuple(sizes),
        calibration=((1.0, 0.0),) * tree.depth,
        batches=(1,),
        cost_ms=(costs,),
        plain_ms=(1.0,),
        pace=(pace,),
        draft_up_to=up_to,
    )


def walked_by_the_rule(world: World, rule: Adaptive, place: int) -> list[int]:
    """The nodes of every pass, by the reference drafter's drafts of the answer's true states."""
    prompt, answer = world.prompts[place], world.answers[place]
    drafter = Drafter(Speculator.of(world.heads, world.vocabulary, world.target), TREE)
    with torch.no_grad():
        hidden_TD = world.model.hidden(torch.tensor([prompt + answer]))[0]
    states_SD = hidden_TD[len(prompt) - 1 : -2]
    tokens_Sn, log_p_Sn = drafter.draft_all(states_SD, torch.tensor(answer[:-1]))
    state, nodes = 0, []
    while state < len(states_SD):
        size = rule.choose(rule.expected(log_p_Sn[state : state + 1], TREE))
        part, node, emitted = {*rule.nodes(size)}, 0, 1
        while state + emitted < len(states_SD):
            true = answer[state + emitted]
            below = [child for child in TREE.children[node] if child in part and int(tokens_Sn[state, child]) == true]
            if not below:
                break
            node, emitted = below[0], emitted + 1
        nodes.append(size)
        state += emitted
    return nodes


def test_two_adaptive_ranks_verify_what_the_rule_says_and_heed_orders(world: World, tmp_path: Path) -> None:
    rule = adaptive_for(TREE, [1, 3, 6, 12], 2.0, pace=1.2)
    folder = world.export(tmp_path / "adaptive", adaptive=rule)
    second = world.export(tmp_path / "second", Tree.chain(2))
    with server(world, folder, tmp_path, tp_size=2) as client:
        found = [nodes_of(client.ask([prompt])[0]) for prompt in world.prompts]
        assert found == [walked_by_the_rule(world, rule, place) for place in range(len(world.prompts))]
        assert len({number for nodes in found for number in nodes}) > 2  # a rule that chose alike would show little
        check_text(client, world)  # all of them at once share every choice
        with under_load(client, world):
            client.order(Order("on"))
        assert [len(nodes_of(row)) for row in check_text(client, world)] == world.passes  # the whole tree, always
        with under_load(client, world):
            assert client.order(Order("off")).drafting == "off"
            assert client.order(Order("on", str(second))).heads == str(second)
            assert client.order(Order("auto", str(tmp_path / "missing"))).error is not None
        assert {number for row in check_text(client, world) for number in nodes_of(row)} == {3}


def test_nothing_is_drafted_where_it_does_not_pay(world: World, tmp_path: Path) -> None:
    """Above a number of requests; and after a window of passes that take a hundred times as long, all of them made by a
    rule that has no pace to compare them with."""
    few = world.export(tmp_path / "few", adaptive=adaptive_for(TREE, [1, 12], 1.5, up_to=2))
    losing = world.export(tmp_path / "losing", adaptive=adaptive_for(TREE, [1, 12], 100.0))
    with server(world, few, tmp_path) as client:
        alone = client.ask(world.prompts[:1])[0]
        assert len(nodes_of(alone)) == world.passes[0] and set(nodes_of(alone)) == {12}
        assert 1 in {number for row in check_text(client, world) for number in nodes_of(row)}
        with under_load(client, world):
            assert client.order(Order("auto", str(losing))).drafting == "on"
        deadline = time.monotonic() + 120
        while (status := read_status(client.control)) is None or status.drafting == "on":
            assert time.monotonic() < deadline
            check_text(client, world)
        assert "times the speed without drafting" in status.why
        assert {number for row in check_text(client, world) for number in nodes_of(row)} == {1}
