"""The shape of a draft tree. Node 0 is the last committed token, node i + 1 is draft token i.

`parents[i]` is the node that draft token i follows, so a chain is 0, 1, 2, ...; a parent comes before its children.
"""

from collections.abc import Sequence


def is_chain(parents: Sequence[int]) -> bool:
    """Return whether every token follows the one before it."""
    return all(parent == node for node, parent in enumerate(parents))


def depths(parents: Sequence[int]) -> list[int]:
    """Return the number of draft tokens on the way to every node, itself included: 0 for node 0."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for every node the nodes on the way to it: node 0 first, itself last. Cost: O(sum of depths)."""
    found: list[tuple[int, ...]] = [(0,)]
    for node, parent in enumerate(parents, start=1):
        found.append((*found[parent], node))
    return found


def children(parents: Sequence[int]) -> list[list[int]]:
    """Return every node's children, in the order in which they were drafted."""
    found: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents, start=1):
        found[parent].append(node)
    return found


def followed(parents: Sequence[int], token_ids: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes that `chosen` tokens lead through from the root, as far as there are any."""
    child_of = {(parent, token_ids[place]): place + 1 for place, parent in enumerate(parents)}
    path: list[int] = []
    for token in chosen:
        node = child_of.get((path[-1] if path else 0, token))
        if node is None:
            break
        path.append(node)
    return tuple(path)


def main_branch_first(parents: Sequence[int], token_ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (parents, tokens) of the same tree, the first child's branch whole before the next child's.

    Where first children are the likely ones, most accepted paths then lie in consecutive slots already.
    """
    below = children(parents)
    new_parents: list[int] = []
    new_tokens: list[int] = []
    left = [(0, child) for child in reversed(below[0])]
    while left:
        parent, node = left.pop()
        new_parents.append(parent)
        new_tokens.append(token_ids[node - 1])
        left.extend((len(new_tokens), child) for child in reversed(below[node]))
    return tuple(new_parents), tuple(new_tokens)


def is_tree(parents: Sequence[int], token_ids: Sequence[int]) -> bool:
    """Return whether parents come before their children and no two siblings are the same token."""
    if len(parents) != len(token_ids) or not all(0 <= parent <= node for node, parent in enumerate(parents)):
        return False
    return len(set(zip(parents, token_ids, strict=True))) == len(parents)
