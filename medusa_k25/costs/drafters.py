"""Drafters that others trained and published: what their makers say of them, and what drafting with them costs.

Their acceptance lengths are of other text than yours, and most count the token that prefill emits, too. What nobody
has published is None or "unknown".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from medusa_k25.costs.cycle import Length, model_draft_ms
from medusa_k25.costs.hardware import Hardware
from medusa_k25.costs.served import KIMI_K25_NAME, Served


@dataclass(frozen=True)
class Drafter:
    name: str
    target: str
    nodes: int  # tokens that a pass verified when the lengths were measured, the root included
    lengths: Mapping[str, float]  # task -> published acceptance length
    steps: int  # passes of the drafter before a verify pass
    layers: int
    read_bytes: float | None  # that one such pass reads, over all ranks; None: unknown
    read_source: str
    source: str
    licence: str
    launch: str
    others: Mapping[str, float] = field(default_factory=dict)  # who measured it where -> acceptance length

    @property
    def length(self) -> Length:
        """The mean over the published tasks, and the range of these and of what others measured: not an interval of
        confidence."""
        values = list(self.lengths.values())
        every = [*values, *self.others.values()]
        return Length(sum(values) / len(values), min(every), max(every))

    def draft_ms(self, hardware: Hardware, served: Served) -> float:
        """0 where its size is unknown, which makes its speed an upper bound."""
        if self.read_bytes is None:
            return 0.0
        return model_draft_ms(hardware, served, self.read_bytes, self.steps, self.layers)


_EAGLE = "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1"
_SGLANG = "python -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --tp 8 --trust-remote-code"

DRAFTERS = (
    Drafter(
        name="lightseekorg/kimi-k2.5-eagle3-mla",
        target=KIMI_K25_NAME,
        nodes=4,
        lengths={
            "MT-Bench": 2.940,
            "C-Eval": 2.829,
            "GSM8K": 3.017,
            "HumanEval": 2.969,
            "MATH500": 3.051,
            "AIME": 3.139,
            "MMStar": 2.597,
        },
        steps=3,
        layers=1,
        read_bytes=6.03e9 - 2.35e9,
        read_source="its sister for Kimi-K2.6 is a file of 6.03 GB, of which 2.35 GB are embeddings",
        source="https://huggingface.co/lightseekorg/kimi-k2.5-eagle3-mla",
        licence="unknown",
        launch=f"{_SGLANG} {_EAGLE} --speculative-num-draft-tokens 4 --speculative-draft-model-path "
        "lightseekorg/kimi-k2.5-eagle3-mla",
        # their public notes say 2.0 to 2.68: github.com/local-inference-lab/rtx6kpro, models/kimi-k26-mtp-long-ctx-wip
        others={"users of 8 RTX PRO 6000 with Kimi-K2.6 in vLLM, 92.4 -> 122.0 tokens/s": 2.28},
    ),
    Drafter(
        name="lightseekorg/kimi-k2.5-eagle3",
        target=KIMI_K25_NAME,
        nodes=4,
        lengths={
            "MT-Bench": 2.687,
            "C-Eval": 2.295,
            "GSM8K": 3.201,
            "HumanEval": 3.285,
            "MATH500": 3.342,
            "AIME": 3.033,
            "MMStar": 2.787,
            "BFCL v3 simple": 3.798,
            "BFCL v3 multiple": 3.809,
            "BFCL v3 parallel": 3.669,
        },
        steps=3,
        layers=1,
        read_bytes=3.7e9,
        read_source="one layer of 7168 with an MLP of 12288, and an lm_head over 163,840 tokens, in bf16: computed",
        source="https://huggingface.co/lightseekorg/kimi-k2.5-eagle3",
        licence="unknown",
        launch=f"{_SGLANG} {_EAGLE} --speculative-num-draft-tokens 4 --speculative-draft-model-path "
        "lightseekorg/kimi-k2.5-eagle3",
    ),
    Drafter(
        name="AQ-MedAI/Kimi-K25-eagle3",
        target=KIMI_K25_NAME,
        nodes=5,
        lengths={"GSM8K": 1 + 4 * 0.5178},  # 51.78% of 4 drafts a pass were accepted
        steps=4,
        layers=1,
        read_bytes=None,
        read_source="unknown",
        source="https://github.com/vllm-project/vllm/pull/35966 (the share of 4 drafts that vLLM accepted)",
        licence="MIT",
        launch="vllm serve moonshotai/Kimi-K2.5 --tensor-parallel-size 8 --trust-remote-code --speculative-config "
        '\'{"method": "eagle3", "model": "AQ-MedAI/Kimi-K25-eagle3", "num_speculative_tokens": 4}\'',
    ),
    Drafter(
        name="z-lab/Kimi-K2.5-DFlash",
        target=KIMI_K25_NAME,
        nodes=8,
        lengths={"GSM8K": 5.3, "MATH500": 5.5, "HumanEval": 5.3, "MBPP": 4.5, "MT-Bench": 3.7},
        steps=1,
        layers=6,
        read_bytes=6.96e9 + 2.35e9,
        read_source="6 layers in a file of 6.48 GiB, and the target's lm_head",
        others={"florianleibert/kimi-k26-dflash-mi300x, Kimi-K2.6 on 8 MI300X, 16% of 8 drafts": 1 + 8 * 0.16},
        source="https://huggingface.co/z-lab/Kimi-K2.5-DFlash (as cards of its conversions quote it)",
        licence="MIT",
        launch=f"{_SGLANG} --speculative-algorithm DFLASH --speculative-num-draft-tokens 8 "
        "--speculative-draft-model-path z-lab/Kimi-K2.5-DFlash",
    ),
)


def drafters_for(hardware: Hardware) -> list[Drafter]:
    """Those for the target whose passes the machine's are."""
    return [drafter for drafter in DRAFTERS if hardware.is_of(drafter.target)]
