"""A folder that somebody hostile wrote: an error, fast and in little memory, whatever is in it."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from medusa_k25.adaptive import Adaptive
from medusa_k25.heads import HEADS, DraftVocabulary, ResidualHeads
from medusa_k25.serving.formats import FORMATS, MAX_NODES, export_heads, load_served, open_served
from medusa_k25.serving.untrusted import MAX_JSON_BYTES
from medusa_k25.tree import Tree

D, V = 8, 12
VOCABULARY = DraftVocabulary(torch.tensor([1, 4, 7, 9]), V)
Change = Callable[[Path], None]


def write(folder: Path, format: str = "sglang", own: bool = False, kind: str = "residual") -> Path:
    heads = HEADS[kind](D, 3, own_lm_head=own, draft_vocab_size=4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(generator=generator)
    lm_head_VD = torch.randn(V, D, generator=generator)
    export_heads(folder, heads, VOCABULARY, Tree([[0], [1], [0, 0]]), torch.float32, {}, format, lm_head_VD, "toy")
    return folder


def configured(**changed: Any) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changed))

    return change


def tensor(name: str, content: torch.Tensor) -> Change:
    def change(folder: Path) -> None:
        save_file(load_file(folder / "model.safetensors") | {name: content}, folder / "model.safetensors")

    return change


def header(change_header: Callable[[dict[str, Any]], Any], data_bytes: int | None = None) -> Change:
    """The header written anew, followed by the same bytes, or by a hole of `data_bytes`, which takes no disk."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        tensors = json.loads(content[8 : 8 + length])
        change_header(tensors)
        text = json.dumps(tensors).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + (b"" if data_bytes else content[8 + length :]))
        if data_bytes:
            os.truncate(file, 8 + len(text) + data_bytes)

    return change


def huge_blocks(size: int, num_heads: int) -> Change:
    """Blocks of size x size in a config and in a header that agree; the file has that length, as a hole."""

    def change(folder: Path) -> None:
        nbytes = 4 * size * size

        def only_blocks(tensors: dict[str, Any]) -> None:
            tensors.clear()
            for k in range(num_heads):
                offsets = [k * nbytes, (k + 1) * nbytes]
                tensors[f"blocks.{k}.layers.0.weight"] = {
                    "dtype": "F32",
                    "shape": [size, size],
                    "data_offsets": offsets,
                }

        header(only_blocks, num_heads * nbytes)(folder)
        sizes = {"hidden_size": size, "num_heads": num_heads, "medusa_fc_bias": False, "medusa_choices": [[0]]}
        configured(**sizes, truncated_vocab_size=V)(folder)

    return change


def raw_config(text: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / "config.json").write_bytes(text)

    return change


def integer_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.long() for name, tensor in tensors.items()}, folder / "model.safetensors")


def long_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")


def a_pipe_as_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")  # opening it would wait for a writer for ever


WEIGHT = "blocks.1.layers.0.weight"
RULE = Adaptive((1,), (1, 2), ((1.0, 0.0),), (1,), ((11.0, 12.0),), (10.0,), (0.1,), 1).as_json()
HOSTILE: dict[str, tuple[Change, str]] = {
    "huge hidden size": (configured(hidden_size=10**12), "hidden_size is 1000000000000, expected an integer from 1"),
    "hidden size that fits no file": (configured(hidden_size=1 << 16), r"is \[8, 8\], expected \[65536, 65536\]"),
    "huge vocabulary": (configured(vocab_size=10**9), "vocab_size is 1000000000, expected"),
    "no vocabulary": (configured(vocab_size=0), "vocab_size is 0, expected"),
    "draft vocabulary above the vocabulary": (configured(truncated_vocab_size=V + 1), "truncated_vocab_size is 13"),
    "a million heads": (configured(num_heads=10**6), "num_heads is 1000000, expected an integer from 1 to 64"),
    "negative blocks": (configured(num_hidden_layers=-1), "num_hidden_layers is -1"),
    "heads as text": (configured(num_heads="3"), "num_heads is '3'"),
    "heads as truth": (configured(num_heads=True), "num_heads is True"),
    "heads as fraction": (configured(num_heads=3.0), r"num_heads is 3\.0"),
    "bias as text": (configured(medusa_fc_bias="yes"), "medusa_fc_bias is 'yes', expected true or false"),
    "lm_head as number": (configured(original_lm_head=1), "original_lm_head is 1, expected true or false"),
    "tree of 10 million nodes": (raw_config(b'{"medusa_choices": [' + b"[0]," * 10**7 + b"[0]]}"), "is larger than"),
    "tree above the bound": (configured(medusa_choices=[[0]] * MAX_NODES), "1,024 paths, expected a list of at most"),
    "rule of another tree": (
        configured(medusa_adaptive=RULE),
        r"medusa_adaptive\.order is \[1\], expected a list of 3",
    ),
    "rule as text": (configured(medusa_adaptive="always"), "medusa_adaptive is 'always', expected an object"),
    "costs that are none": (
        configured(medusa_choices=[[0]], medusa_adaptive=RULE | {"plain_ms": [0]}),
        "plain_ms holds",
    ),
    "tree as text": (configured(medusa_choices="[[0]]"), "medusa_choices is '"),
    "tree of numbers": (configured(medusa_choices=[0, 1]), "medusa_choices holds 0, expected a list of"),
    "path to the root": (configured(medusa_choices=[[]]), r"medusa_choices holds \[\], expected"),
    "fractional rank": (configured(medusa_choices=[[0.5]]), r"medusa_choices holds \[0\.5\]"),
    "rank as truth": (configured(medusa_choices=[[False]]), r"medusa_choices holds \[False\]"),
    "negative rank": (configured(medusa_choices=[[-1]]), r"medusa_choices holds \[-1\]"),
    "enormous rank": (configured(medusa_choices=[[10**4000]]), "medusa_choices holds"),
    "rank outside the draft vocabulary": (configured(medusa_choices=[[4]]), "asks for choice 5 of a head"),
    "deep path": (configured(medusa_choices=[[0] * 10**5]), r"medusa_choices holds \[0, 0"),
    "deeper than the heads": (configured(medusa_choices=[[0] * d for d in range(1, 5)]), "there are 3 heads"),
    "duplicate paths": (configured(medusa_choices=[[0], [1], [0]]), "holds 1 paths more than once"),
    "path that is its own ancestor": (configured(medusa_choices=[[0, 0]]), r"path \[0, 0\] has no parent"),
    "nested brackets": (raw_config(b"[" * 10**5), "is damaged"),
    "a config that is a list": (raw_config(b"[]"), "expected an object, got list"),
    "a number of 5,000 digits": (raw_config(b'{"num_heads": 1' + b"0" * 5000 + b"}"), "is damaged"),
    "not UTF-8": (raw_config(b'{"x": "\xff\xfe\xfa"}'), "is damaged"),
    "a config that is a pipe": (a_pipe_as_config, r"lacks config\.json"),
    "NaN": (tensor(WEIGHT, torch.full((D, D), torch.nan)), f"'{WEIGHT}' holds NaN"),
    "infinity": (tensor(WEIGHT, torch.full((D, D), torch.inf)), f"'{WEIGHT}' holds NaN or infinity"),
    "integers as weights": (tensor(WEIGHT, torch.zeros(D, D, dtype=torch.int64)), f"'{WEIGHT}' is torch.int64"),
    "weights of two dtypes": (tensor(WEIGHT, torch.zeros(D, D).half()), f"'{WEIGHT}' is torch.float16, expected"),
    "all weights integers": (integer_weights, "is torch.int64, expected floating point"),
    "no map of the draft vocabulary": (
        header(lambda tensors: tensors.update({"lm_head.weight": tensors.pop("token_map")})),
        "lacks 'token_map', the target tokens of its 4 draft tokens",
    ),
    "unknown dtype": (tensor(WEIGHT, torch.zeros(D, D, dtype=torch.complex64)), f"'{WEIGHT}' is 'C64', expected one"),
    "fractional map": (tensor("token_map", torch.zeros(4)), "token_map holds torch.float32"),
    "map of another shape": (tensor("token_map", torch.zeros(2, 2, dtype=torch.long)), r"token_map of \[2, 2\]"),
    "map outside the vocabulary": (tensor("token_map", torch.tensor([0, 1, 2, V])), "ids outside 0 to 11"),
    "map that overflows its differences": (
        tensor("token_map", torch.tensor([0, 1 << 62, -(1 << 63), 5])),
        "ids outside 0 to 11",
    ),
    "map with repeats": (tensor("token_map", torch.zeros(4, dtype=torch.long)), "without repeats"),
    "a header of a terabyte": (long_header, "its header claims 1,099,511,627,776 bytes"),
    "blocks of 86 GB": (huge_blocks(1 << 16, 5), "85,899,345,920 bytes of weights, expected at most 68,719,476,736"),
    "a tensor that is elsewhere": (
        header(lambda tensors: tensors[WEIGHT].update(data_offsets=[10**15, 10**15 + 4 * D * D])),
        "does not begin where the tensor before it ends",
    ),
    "tensors in each other's place": (
        header(
            lambda tensors: tensors[WEIGHT].update(data_offsets=tensors["blocks.0.layers.0.weight"]["data_offsets"])
        ),
        "does not begin where the tensor before it ends",
    ),
    "a negative offset": (header(lambda tensors: tensors[WEIGHT].update(data_offsets=[-4, 4 * D * D - 4])), "damaged"),
    "a shape of text": (header(lambda tensors: tensors[WEIGHT].update(shape="88")), "damaged"),
    "a name that is no string of ours": (header(lambda tensors: tensors.update({"\ud800\n": {}})), "damaged"),
    "a head of a large number": (
        header(lambda tensors: tensors.update({f"blocks.{10**9}.layers.0.weight": tensors.pop(WEIGHT)})),
        "lacks 'blocks.1.layers.0.weight'; 'blocks.1000000000.layers.0.weight' has no place",
    ),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_folder_is_an_error_and_soon(tmp_path: Path, fault: str) -> None:
    change, message = HOSTILE[fault]
    change(write(tmp_path))
    began = time.process_time()
    with pytest.raises(ValueError, match=message) as caught:
        load_served(tmp_path)
    assert time.process_time() - began < 1
    assert len(str(caught.value)) < 1000
    str(caught.value).encode()  # a log can hold it


def described(**changed: Any) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        configured(medusa_heads=config["medusa_heads"] | changed)(folder)

    return change


def huge_cell(folder: Path) -> None:
    """A config and a header that agree on more than any heads have."""
    size, inner = 1 << 16, 1 << 17

    def only_cell(tensors: dict[str, Any]) -> None:
        tensors.clear()
        start = 0
        for name, shape in (("inner.weight", [inner, 2 * size]), ("outer.weight", [size, inner])):
            stop = start + 4 * shape[0] * shape[1]
            tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}
            start = stop

    header(only_cell, 12 * size * inner)(folder)
    configured(hidden_size=size, truncated_vocab_size=V)(folder)
    described(inner_size=inner, bias=False)(folder)


HOSTILE_TYPES: dict[str, tuple[Change, str]] = {
    "no object": (configured(medusa_heads=[1]), r"medusa_heads is \[1\], expected an object with a type"),
    "no type": (configured(medusa_heads={"num_heads": 3}), "expected an object with a type"),
    "a list as type": (described(type=["recurrent"]), "expected an object with a type"),
    "an unknown type": (described(type="os.system"), "is of type 'os.system', this version knows residual"),
    "another type": (
        described(type="hydra"),
        "medusa_heads of type hydra gives .*inner_size.*; expected type, num_hea",
    ),
    "an argument more": (described(**{"x" * 500: 1}), r"gives .*\.\.\.; expected type"),
    "a class's attribute": (described(forward=1), "expected type, num_heads, inner_size, bias, own_lm_head"),
    "a billion heads": (described(num_heads=10**9), "num_heads is 1000000000, expected an integer from 1 to 64"),
    "no head": (described(num_heads=0), "num_heads is 0, expected an integer from 1 to 64"),
    "heads as truth": (described(num_heads=True), "num_heads is True"),
    "heads of none": (described(num_heads=None), "medusa_heads.*num_heads|lacks 'num_heads'"),
    "a large inner size": (described(inner_size=10**12), "inner_size is 1000000000000, expected an integer from 1"),
    "a fractional inner size": (described(inner_size=2.0), "inner_size is 2.0"),
    "bias as text": (described(bias="no"), "bias is 'no', expected true or false"),
    "another inner size": (described(inner_size=5), r"'inner.weight' is \[16, 16\], expected \[5, 16\]"),
    "another hidden size": (configured(hidden_size=9), r"expected \[16, 18\]"),
    "sizes that fit no file": (described(inner_size=1 << 18), r"expected \[262144, 16\]"),
    "own lm_heads that are not there": (described(own_lm_head=True), "lacks 'lm_heads.0.weight'"),
    "a shipped lm_head": (tensor("lm_head.weight", torch.zeros(V, D)), "'lm_head.weight' has no place"),
    "weights of two dtypes": (tensor("outer.weight", torch.zeros(D, 16).half()), "'outer.weight' is torch.float16"),
    "NaN": (tensor("outer.weight", torch.full((D, 16), torch.nan)), "'outer.weight' holds NaN"),
    "a cell of 103 GB": (huge_cell, "103,079,215,104 bytes of weights, expected at most 68,719,476,736"),
    "deeper than the heads": (configured(medusa_choices=[[0] * d for d in range(1, 5)]), "there are 3 heads"),
}


@pytest.mark.parametrize("fault", HOSTILE_TYPES)
def test_hostile_heads_of_a_type_are_an_error_and_soon(tmp_path: Path, fault: str) -> None:
    change, message = HOSTILE_TYPES[fault]
    change(write(tmp_path, kind="recurrent"))
    began = time.process_time()
    with pytest.raises(ValueError, match=message) as caught:
        load_served(tmp_path)
    assert time.process_time() - began < 1
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", [f"{10**12}.0.linear.weight", f"0.{10**12}.linear.weight"])
def test_a_head_or_block_of_an_enormous_number_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """Where sizes are taken from the names: FasterDecoding's layout has no config that would tell them."""
    file = write(tmp_path, "medusa") / "medusa_lm_head.safetensors"
    save_file(load_file(file) | {name: torch.zeros(D, D)}, file)
    began = time.process_time()
    with pytest.raises(ValueError, match="expected at most 64 of 16|has no place"):
        load_served(tmp_path)
    assert time.process_time() - began < 1


def test_faults_of_size_are_found_in_little_memory_and_without_training_packages(tmp_path: Path) -> None:
    """In a process that may allocate 256 MB more than it has: running out of memory would be no ValueError."""
    faults = ["hidden size that fits no file", "huge vocabulary", "tree of 10 million nodes", "blocks of 86 GB"]
    for fault in [*faults, "a header of a terabyte", "nested brackets"]:
        HOSTILE[fault][0](write(tmp_path / fault))
    huge_cell(write(tmp_path / "cell", kind="recurrent"))
    described(inner_size=1 << 18)(write(tmp_path / "sizes", kind="recurrent"))
    code = """
import resource, sys
from pathlib import Path
from medusa_k25.serving.formats import load_served
heavy = {"hydra", "lightning", "deepspeed", "datasets", "matplotlib", "transformers", "wandb"} & {*sys.modules}
assert not heavy, heavy
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (size, size))
for folder in sorted(Path(sys.argv[1]).iterdir()):
    try:
        load_served(folder)
    except ValueError:
        continue
    sys.exit(f"{folder} was taken")
"""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began.ru_utime < 30


def test_a_config_of_the_largest_tree_stays_below_the_bound(tmp_path: Path) -> None:
    heads = ResidualHeads(D, 64)
    deep = [[0] * d for d in range(1, 65)]
    wide = [[0] * 63 + [rank] for rank in range(1, MAX_NODES - 64)]  # as much text as a tree can have
    export_heads(tmp_path, heads, DraftVocabulary(torch.arange(2000), 2000), Tree(deep + wide), torch.float32, {})
    assert open_served(tmp_path).tree.num_nodes == MAX_NODES
    assert (tmp_path / "config.json").stat().st_size < MAX_JSON_BYTES
    with pytest.raises(ValueError, match="the tree has 1,025 nodes, a server takes at most 1,024"):
        tree = Tree([*deep, *wide, [5]])
        export_heads(tmp_path, heads, DraftVocabulary(torch.arange(2000), 2000), tree, torch.float32, {})


def test_links_may_lead_out_of_the_folder_and_other_files_are_not_read(tmp_path: Path) -> None:
    """As in the Hugging Face cache, whose snapshots are links into a folder of blobs."""
    blobs, snapshot = write(tmp_path / "blobs"), tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(blobs / name)
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../../../etc/passwd"}}')
    (snapshot / "pytorch_model.bin").write_bytes(b"\x80\x04garbage")
    assert load_served(snapshot).tree == load_served(blobs).tree


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([2, 3, 4, 8, 12]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def mutate(value: Any, data: st.DataObject) -> Any:
    """`value` with one thing in it replaced, left out or added."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        match data.draw(st.sampled_from(["inside", "inside", "inside", "drop", "rename"])):
            case "inside":
                return value | {key: mutate(value[key], data)}
            case "drop":
                return {name: kept for name, kept in value.items() if name != key}
            case _:
                return {data.draw(st.text(max_size=8)) if name == key else name: kept for name, kept in value.items()}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], mutate(value[place], data), *value[place + data.draw(st.integers(0, 1)) :]]
    return data.draw(junk)


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_whatever_is_changed_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    format, kind = data.draw(
        st.sampled_from([*((format, "residual") for format in FORMATS), *(("sglang", k) for k in HEADS)])
    )
    folder = write(tmp_path_factory.mktemp("folder"), format, data.draw(st.booleans()), kind)
    (file,) = folder.glob("*.safetensors")
    for _ in range(data.draw(st.integers(1, 2))):
        match data.draw(st.sampled_from(["config", "header", "byte", "cut", "longer"])):
            case "config":
                config = mutate(json.loads((folder / "config.json").read_text()), data)
                (folder / "config.json").write_text(json.dumps(config))
            case "header":
                content = file.read_bytes()
                length = int.from_bytes(content[:8], "little")
                try:
                    tensors = json.loads(content[8 : 8 + length])
                except ValueError:  # the change before hit it
                    continue
                text = json.dumps(mutate(tensors, data)).encode()
                file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
            case "byte":
                changed = bytearray(file.read_bytes())
                place = data.draw(st.integers(0, min(len(changed), 1500) - 1) | st.integers(0, len(changed) - 1))
                changed[place] = data.draw(st.integers(0, 255))
                file.write_bytes(changed)
            case "cut":
                os.truncate(file, data.draw(st.integers(1, file.stat().st_size)))
            case "longer":
                file.write_bytes(file.read_bytes() + b"\0" * data.draw(st.integers(1, 9)))
    began = time.process_time()
    try:
        served = load_served(folder)
    except ValueError as error:
        str(error).encode()
        return
    finally:
        assert time.process_time() - began < 1
    assert all(parameter.isfinite().all() for parameter in served.heads.parameters())
    served.tree.refuse_unless_fits(served.heads.num_heads, len(served.vocabulary))
