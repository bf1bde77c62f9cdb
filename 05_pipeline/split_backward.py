"""A backward pass in two halves: first the gradient of a stage's input, on which the stage before waits, and later,
when there is time, those of its parameters. Zero-bubble schedules fill their gaps with the second half."""

import functools
from collections import defaultdict

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from common.errors import UserError


def backward_for_input(x, y, gradient):
    """The gradient of x alone, where y came from it, and what is left to do for the parameters.

    The graph of autograd leads from y to x and, on branches, to the parameters. Where a branch begins, a hook keeps
    the gradient that comes by. From there the second half can start later: a list of (outputs, their gradients,
    parameters) for torch.autograd.backward. As in PyTorch's pipelining, and Qi et al. 2023, section 2.

    Raises UserError for a parameter that is used twice.
    """
    goal = get_gradient_edge(x).node
    above, nodes = defaultdict(list), [y.grad_fn]
    for node in nodes:  # grows while we go through it
        for child in {child for child, _ in node.next_functions if child is not None}:
            if child not in above:
                nodes.append(child)
            above[child].append(node)
    way = closure([goal], above)
    branches = defaultdict(list)
    for leaf in (node for node in nodes if hasattr(node, "variable") and node is not goal):
        begins = {node for below in closure([leaf], above, way) for node in above[below] if node in way}
        if len(begins) > 1:
            raise UserError("a parameter is used twice in one stage: its backward pass cannot be cut in two")
        branches[begins.pop()].append(leaf.variable)
    passed = {}
    hooks = [node.register_prehook(functools.partial(passed.__setitem__, node)) for node in branches]
    (gradient,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
    for hook in hooks:
        hook.remove()
    later = []
    for node, parameters in branches.items():
        known = [number for number, tensor in enumerate(passed[node]) if tensor is not None]
        later.append(([GradientEdge(node, n) for n in known], [passed[node][n] for n in known], parameters))
    return gradient, later


def closure(nodes, above, without=()):
    """The nodes, and all that lie above them."""
    found = dict.fromkeys(nodes)
    for node in nodes:  # grows
        for parent in above[node]:
            if parent not in found and parent not in without:
                found[parent] = None
                nodes.append(parent)
    return found
