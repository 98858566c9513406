"""What every head architecture offers: one feature for each head, drafted step by step down a path of tokens.

Letters: N positions, D hidden, K heads, M draft vocabulary, S numbers of a state.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from medusa_k25.heads.lm_heads import LmHeads, Result

Embed = Callable[[Tensor], Tensor]  # token ids [..] -> their embeddings [.., D], see `embeddings.Embeddings`


class Heads(nn.Module, ABC):
    """K heads over one hidden state. Constructor arguments are kept as attributes: checkpoints record them.

    A type is its `step` (and `start`, where the state is not h_t at first), and says what it reads besides h_t:
    reads = "state"  nothing: head k guesses x_{t+1+k} whatever comes between
    reads = "root"   x_{t+1}, the token that the target has just produced, which is the root of every draft
    reads = "path"   the root and the tokens drafted below it: head k drafts once for every path of k - 1 drafts

    The logits of head k are lm_head of its features: the target's own rows of the draft vocabulary, shared by all
    heads, or with `own_lm_head` a trained matrix [M, D] a head, `draft_vocab_size` = M rows each. Features become
    logits through `with_lm_head` alone, which knows which. Before training every feature equals h_t.
    """

    reads: ClassVar[Literal["state", "root", "path"]]

    def __init__(
        self, hidden_size: int, num_heads: int = 4, own_lm_head: bool = False, draft_vocab_size: int | None = None
    ):
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"heads need num_heads >= 1, got {num_heads}")
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.own_lm_head, self.draft_vocab_size = own_lm_head, draft_vocab_size
        self.lm_heads: LmHeads | None = None
        if own_lm_head:
            if draft_vocab_size is None:
                raise ValueError(
                    "own_lm_head=true needs draft_vocab_size, the rows of each head's lm_head, got none; "
                    "give it, or share the target's lm_head with own_lm_head=false"
                )
            self.lm_heads = LmHeads(num_heads, draft_vocab_size, hidden_size)

    @property
    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments, which every type keeps as attributes."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def start(self, hidden_ND: Tensor) -> Tensor:
        """The state [N, S] before head 1, from h_t: h_t itself, where a type does not say otherwise."""
        return hidden_ND

    @abstractmethod
    def step(self, k: int, state_NS: Tensor, token_ND: Tensor | None) -> tuple[Tensor, Tensor]:
        """(features [N, D] of head k, 1-based, the state before head k + 1), row by row.

        token_ND: the embedding of x_{t+k}, which head k guesses the next token after; None where `needs_token(k)` is
        false. S may differ from step to step.
        """

    @property
    @abstractmethod
    def products(self) -> Sequence[int]:
        """How many parameters the features of each head are multiplied with, own lm_heads apart, K numbers.

        What training computes a position and drafting reads a pass follow from them.
        """

    @property
    @abstractmethod
    def trained_inputs(self) -> int:
        """Of the `products` those whose other factor is trained, too: there the backward pass multiplies once more."""

    @property
    @abstractmethod
    def saved_numbers(self) -> int:
        """How many numbers a position keeps for the backward pass, the features and their gradients included."""

    def needs_token(self, k: int) -> bool:
        """Whether head k reads the token before its guess."""
        return self.reads == "path" or (self.reads == "root" and k == 1)

    def forward(self, hidden_ND: Tensor, path_NK: Tensor, embed: Embed | None = None) -> Tensor:
        """Features [K, N, D], each head with the true tokens before its guess.

        hidden_ND: h_t. path_NK int64: x_{t+1} (the root) .. x_{t+K}, of which head k reads at most the first k. IGNORE
        stands for a token beyond the answer's end, where no label is. embed: of the target; heads that read the state
        alone need none.
        """
        state_NS, features = self.start(hidden_ND), []
        for k in range(1, self.num_heads + 1):
            token_ND = None
            if self.needs_token(k):
                assert embed is not None
                token_ND = embed(path_NK[:, k - 1]).to(hidden_ND.dtype)
            feature_ND, state_NS = self.step(k, state_NS, token_ND)
            features.append(feature_ND)
        return torch.stack(features)

    def with_lm_head(self, lm_head_MD: Tensor, use: Callable[[Tensor], Result]) -> Result:
        """What `use` returns for the heads' lm_head: lm_head_MD [M, D] where they share it, their own [K, M, D] else.

        `features_KND @ lm_head.mT` are the logits [K, N, M] of either; `lm_head.expand(K, -1, -1)` is one a head.
        """
        return use(lm_head_MD) if self.lm_heads is None else self.lm_heads(use)

    @torch.no_grad()
    def init_lm_heads(self, lm_head_MD: Tensor) -> None:
        """Start own lm_heads as copies of the target's rows lm_head_MD; heads that share them need none."""
        if self.lm_heads is not None:
            assert lm_head_MD.shape == self.lm_heads.weight.shape[1:]
            self.lm_heads.weight.copy_(lm_head_MD)


def zeroed(linear: nn.Linear) -> nn.Linear:
    """The same layer with weights and biases of 0: what it is added to starts as it is."""
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return linear
