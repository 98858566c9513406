"""Untrained heads in any tree: serve them, and measure a verify pass of n tokens, before anything is trained.

What a pass costs depends on sizes alone, not on what the heads have learnt.
"""

from heapq import heappop, heappush

from medusa_k25.heads import ResidualHeads
from medusa_k25.serving.formats import MAX_HEADS
from medusa_k25.tree import Path, Tree


def blank_heads(
    hidden_size: int,
    draft_vocab_size: int | None = None,
    tree: Tree | None = None,
    num_heads: int | None = None,
    num_blocks: int = 1,
    bias: bool = True,
    own_lm_head: bool = False,
) -> ResidualHeads:
    """Heads that repeat the target's own guess. `num_heads`: None for as many as `tree` is deep."""
    if tree is None:
        raise ValueError("heads=blank are untrained heads for medusa_k25.export; train with heads=residual")
    return ResidualHeads(
        hidden_size,
        max(tree.depth, 1) if num_heads is None else num_heads,
        num_blocks,
        bias,
        own_lm_head,
        draft_vocab_size,
    )


def made_up_tree(num_nodes: int, num_heads: int | None, max_width: int) -> Tree:
    """A tree of `num_nodes` nodes, the root included, that no text has chosen; with max_width=1 it is a chain.

    A path costs one a token and one a rank that it passes over; the cheapest paths make the tree.
    ValueError where `num_heads` (None: any number) and `max_width` leave fewer paths.
    """
    paths: list[Path] = []
    cheapest: list[tuple[int, Path]] = [(1, (0,))]
    while len(paths) < num_nodes - 1:
        if not cheapest:
            raise ValueError(
                f"num_nodes={num_nodes}: {num_heads} heads with {max_width} choices each make {len(paths) + 1} nodes; "
                "raise heads.num_heads or max_width, or give a tree"
            )
        cost, path = heappop(cheapest)
        paths.append(path)
        if len(path) < (MAX_HEADS if num_heads is None else num_heads):
            heappush(cheapest, (cost + 1, (*path, 0)))
        if path[-1] + 1 < max_width:
            heappush(cheapest, (cost + 1, (*path[:-1], path[-1] + 1)))
    return Tree(paths)
