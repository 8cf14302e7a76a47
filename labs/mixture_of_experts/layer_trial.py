"""What exercise 9.2 holds route, dispatch and combine to: each alone, then the layer that they make
beside the loop over experts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from labs.checks.numbers import require_several
from labs.checks.on_ranks import close
from labs.checks.tolerances import BFLOAT16
from labs.checks.verdicts import Wrong, kind_of
from labs.training.mixtures import ExpertLayer

HIDDEN, FFN = 6, 5
_ROUTE = ("Softmax over the experts of a token, the k largest, and each divided by the sum of the "
          "k.")
_DISPATCH = ("One copy for each of a token's k experts: copy i of the flattened `chosen` is of "
             "token i // k.")
_COMBINE = ("Bring the outputs back into the order of chosen.flatten(); then each token has k of "
            "them in a row, to be weighted and added.")
_DETACHED = "Compute with the tensors that you were given: no detach, no_grad, .data or .item()."


@dataclass(frozen=True)
class Case:
    """tokens, experts, k of a case; unused: that many of the last experts get no token."""

    tokens: int
    experts: int
    k: int
    unused: int = 0
    dtype: torch.dtype = torch.float32
    shared: bool = False

    def __str__(self):
        unused = f", {self.unused} of them without a token" if self.unused else ""
        return (f"{self.tokens} tokens, {self.experts} experts{unused}, k = {self.k}, "
                f"{str(self.dtype).removeprefix('torch.')}")


class Trial:
    """The three functions one after the other on one case, and the layer of them."""

    def __init__(self, case: Case, generator: torch.Generator):
        self.case, self.generator = case, generator
        self.tokens = self._randn(HIDDEN, case.tokens).t()  # (tokens, hidden), not contiguous
        self.logits = self._logits()

    def _logits(self) -> torch.Tensor:
        """(tokens, experts), of which no two of a token are equal, in bfloat16 either."""
        shape = self.case.tokens, self.case.experts
        logits = 2 * torch.rand(shape, generator=self.generator)
        if self.case.dtype == torch.bfloat16:
            # bfloat16 has all whole numbers up to 256, so also these 1/32 of them
            drawn = torch.rand(shape[0], 128, generator=self.generator).argsort(-1)
            logits = drawn[:, :shape[1]] / 32
        if self.case.unused:
            logits[:, -self.case.unused:] -= 4
        return logits.to(self.case.dtype)

    def _randn(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float32).to(
            self.case.dtype)

    def judge(self, route, dispatch, combine) -> None:
        """Raises Wrong unless each of the functions alone is right."""
        weights, chosen = self._judge_route(route)
        copies, order = self._judge_dispatch(dispatch, chosen)
        self._judge_combine(combine, weights, chosen, copies, order)

    def _is_close(self, got, want) -> bool:
        if got.shape != want.shape:
            return False
        if self.case.dtype == torch.bfloat16:
            return torch.allclose(got.float(), want.float(), rtol=2 * BFLOAT16, atol=4 * BFLOAT16)
        return not want.numel() or close(got, want)

    def _judge_route(self, route) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights and experts of the case, the check's own, in the answer's order."""
        case, who = self.case, f"route with {self.case}"
        logits = self.logits.clone().requires_grad_()
        weights, chosen = require_several(route(logits, case.k), ("weights", "chosen"),
                                          "route returned", "tensors")
        self._require_tensor(weights, f"{who}: weights", (case.tokens, case.k), case.dtype)
        self._require_tensor(chosen, f"{who}: chosen", (case.tokens, case.k), None)
        self._require_unchanged(logits, self.logits, f"{who}: logits")
        # float64, and rounded once: what is computed in fp32 is that, but for the last digit.
        want, experts = self.logits.double().softmax(-1).topk(case.k)
        want = want / want.sum(-1, keepdim=True)
        self._judge_experts(who, chosen, experts)
        # In whatever order an answer has its k experts.
        want = torch.zeros(case.tokens, case.experts, dtype=want.dtype).scatter(
            1, experts, want).gather(1, chosen)
        self._judge_weights(who, weights.detach(), want, chosen)
        self._judge_route_gradient(who, logits, weights, chosen)
        return want.to(case.dtype), chosen

    def _judge_experts(self, who, chosen, experts):
        if chosen.is_floating_point():
            raise Wrong(f"{who}: chosen is {kind_of(chosen)} of {chosen.dtype}, not of integers",
                        "topk returns the values and the indices.", code="wrong_dtype")
        if torch.equal(chosen.sort(-1).values, experts.sort(-1).values):
            return
        found = self._first(chosen, (
            ("wrong_dimension", "those of a softmax over the tokens, not over the experts",
             self.logits.double().softmax(0).topk(self.case.k).indices),
            ("smallest", "the least probable ones",
             self.logits.topk(self.case.k, largest=False).indices)),
            lambda got, value: torch.equal(got.sort(-1).values, value.sort(-1).values))
        code, words = found or ("wrong_experts", "others than the most probable ones")
        raise Wrong(f"{who}: the chosen experts are {words}", _ROUTE, code=code)

    def _judge_weights(self, who, weights, want, chosen):
        if self.case.dtype == torch.bfloat16:
            # Right answers round the same number once, or one beside it that fp32 has; of a
            # softmax in bfloat16 about a third of the weights is another number.
            other = (weights != want.to(weights.dtype)).float().mean().item()
            if self._is_close(weights, want) and other > 0.03:
                raise Wrong(f"{who}: the weights have fewer digits than those of a softmax in "
                            "fp32, rounded at the end", "softmax(-1, dtype=torch.float32), and "
                            ".to(logits.dtype) after the division.", code="fewer_digits")
        if self._is_close(weights, want.to(weights.dtype)):
            return
        logits, k = self.logits.double(), self.case.k
        probabilities = logits.softmax(-1)

        def normalised(values):
            return values / values.sum(-1, keepdim=True)

        code, words = self._first(weights, (
            ("not_normalised", "the probabilities, not divided by their sum",
             probabilities.gather(1, chosen)),
            ("wrong_dimension", "those of a softmax over the tokens, not over the experts",
             normalised(logits.softmax(0).gather(1, chosen))),
            ("wrong_dimension", "those of a softmax over the tokens, not over the experts",
             logits.softmax(0).gather(1, chosen)),
            ("weights_from_logits", "the logits", logits.gather(1, chosen)),
            ("weights_from_logits", "the logits, divided by their sum",
             normalised(logits.gather(1, chosen))),
            ("weights_from_sigmoid", "those of a sigmoid, not of a softmax",
             normalised(logits.sigmoid().gather(1, chosen))),
            ("equal_weights", "1/k for each expert", torch.full_like(want, 1 / k)),
            ("zeros", "zeros", torch.zeros_like(want)),
            # last: of one expert each sum is alone
            ("wrong_order", "in another order than the chosen experts", None)),
            lambda got, value: (self._is_close(got, value.to(got.dtype)) if value is not None else
                                self._is_close(got.sort(-1).values, want.to(got.dtype).sort(-1)
                                               .values))) or ("wrong_weights", "others")
        raise Wrong(f"{who}: the weights are {words}", _ROUTE, code=code)

    def _judge_route_gradient(self, who, logits, weights, chosen):
        # Catches weights that were detached, or computed under no_grad: the layer computes all the
        # same, and its router never learns.
        upstream = self._randn(self.case.tokens, self.case.k)
        theirs = self.logits.clone().requires_grad_()
        want = theirs.double().softmax(-1).gather(1, chosen)
        want = (want / want.sum(-1, keepdim=True)).to(upstream.dtype)
        self._judge_gradients(f"{who}: weights", weights, want, upstream,
                              {"the logits": (logits, theirs)}, "weights_detached")

    def _judge_dispatch(self, dispatch, chosen) -> tuple[torch.Tensor, object]:
        """Returns (token and expert of each copy, as numbers (n, 2); the answer's order)."""
        case, who = self.case, f"dispatch with {self.case}"
        tokens = self.tokens.clone().requires_grad_()
        given = chosen.clone()
        copies, counts, order = require_several(
            dispatch(tokens, given, case.experts), ("copies", "counts", "order"),
            "dispatch returned", "values")
        self._require_tensor(copies, f"{who}: copies", (case.tokens * case.k, HIDDEN), case.dtype)
        self._require_unchanged(tokens, self.tokens, f"{who}: tokens")
        self._require_unchanged(given, chosen, f"{who}: chosen")
        self._judge_counts(who, counts, chosen)
        token = self._judge_copies(who, copies.detach(), chosen)
        upstream = self._randn(*copies.shape)
        theirs = self.tokens.clone().requires_grad_()
        self._judge_gradients(f"{who}: copies", copies, theirs[token], upstream,
                              {"the tokens": (tokens, theirs)}, "tokens_detached")
        expert = chosen.flatten().sort().values
        return torch.stack([token, expert], 1), order

    def _judge_counts(self, who, counts, chosen):
        case = self.case
        if not isinstance(counts, torch.Tensor) or counts.is_floating_point():
            raise Wrong(f"{who}: counts is {kind_of(counts)}, not a tensor of integers",
                        "bincount returns one. Ranks will send it to each other.",
                        code="wrong_type")
        want = chosen.flatten().bincount(minlength=case.experts)
        if torch.equal(counts, want.to(counts)):
            return
        code, words, hint = "wrong_counts", "is not the number of copies of each expert", ""
        if counts.shape != want.shape:
            words = "does not have one number for each expert"
            hint = f"Its shape is (experts,), here [{case.experts}]."
            used = int(want.nonzero().max()) + 1 if case.tokens else 0
            if list(counts.shape) == [used]:
                code = "counts_too_short"
                words = "ends with the last expert that gets a copy"
                hint = "The last experts may get none: bincount takes minlength."
            elif counts.shape == (int((want > 0).sum()),):
                code, words = "counts_too_short", "leaves out the experts that get no copy"
        raise Wrong(f"{who}: counts {words}", hint or "Each row of chosen counts once for each of "
                    "its k experts.", code=code)

    def _judge_copies(self, who, copies, chosen) -> torch.Tensor:
        """Returns the token of each copy. Raises Wrong unless each expert's copies are one block,
        in any order within it."""
        case, n = self.case, copies.shape[0]
        if not n:
            return torch.empty(0, dtype=torch.int64)
        same = (copies[:, None] == self.tokens[None]).all(-1)  # (copies, tokens)
        if not same.any(1).all():
            raise Wrong(f"{who}: some copies are no token", _DISPATCH, code="no_token")
        token = same.int().argmax(1)
        # Rows of (expert, token), by expert; copies of one expert may stand in any order.
        want = (chosen.flatten() * case.tokens + torch.arange(n) // case.k).sort().values
        got = (chosen.flatten().sort().values * case.tokens + token).sort().values
        if torch.equal(got, want):
            return token
        order = chosen.flatten().argsort(stable=True)
        code, words = self._first(token, (
            ("not_sorted", "are in the order of the tokens, not sorted by expert",
             torch.arange(n) // case.k),
            ("not_sorted", "are all tokens k times, not sorted by expert",
             torch.arange(n) % case.tokens),
            ("wrong_token", "are sorted, and of wrong tokens: copy i is not of token i % tokens",
             order % case.tokens),
            ("wrong_order", "are put where their experts' numbers say, and not taken from there",
             order.argsort() // case.k)), torch.equal) or (
            "wrong_copies", "are not those of expert 0, then of expert 1, and so on")
        raise Wrong(f"{who}: the copies {words}", _DISPATCH, code=code)

    def _judge_combine(self, combine, weights, chosen, copies, order):
        case, who = self.case, f"combine with {self.case}"
        table = self._randn(case.tokens, case.experts, HIDDEN)  # the output of each expert
        values = [table[copies[:, 0], copies[:, 1]], weights]
        mine, theirs = ([value.clone().requires_grad_() for value in values] for _ in range(2))
        got = combine(mine[0], order, mine[1])
        self._require_tensor(got, f"{who}: the result", (case.tokens, HIDDEN), case.dtype)
        for name, changed, before in zip(("outputs", "weights"), mine, values, strict=True):
            self._require_unchanged(changed, before, f"{who}: {name}")
        # place[token, i]: the row that has the output of the token's i-th expert
        place = (copies[:, 0] * case.experts + copies[:, 1]).argsort().view(case.tokens, case.k)
        place = place.gather(1, chosen.argsort(-1).argsort(-1))
        want = (theirs[1][..., None] * theirs[0][place]).sum(1)
        if not self._is_close(got.detach(), want.detach()):
            self._explain_combine(who, got.detach(), values[0], weights, place, order)
        self._judge_gradients(f"{who}: the result", got, want, self._randn(*got.shape), {
            "the outputs": (mine[0], theirs[0]), "the weights": (mine[1], theirs[1])},
            "weights_detached")

    def _explain_combine(self, who, got, outputs, weights, place, order):
        shape = (*weights.shape, 1)
        restored, as_sorted = outputs[place], outputs.view(*weights.shape, -1)
        weighted = weights.view(shape) * restored  # (tokens, k, hidden)
        index = order if isinstance(order, torch.Tensor) and order.shape == outputs.shape[:1] \
            else place.flatten()
        code, words = self._first(got, (
            ("unweighted", "is the sum of the outputs, without the weights", restored.sum(1)),
            ("unweighted", "is the mean of the outputs, without the weights", restored.mean(1)),
            ("averaged", "is divided by k", weighted.mean(1)),
            ("not_restored", "is that of outputs in dispatch's order, sorted by expert",
             (weights.view(shape) * as_sorted).sum(1)),
            ("wrong_order", "is that of outputs[order], which sorts once more: its inverse brings "
             "them back", (weights.view(shape) * outputs[index].view_as(as_sorted)).sum(1)),
            ("weights_not_sorted", "is weighted with the weights of other copies: outputs are "
             "sorted by expert, weights are not",
             (weights.flatten()[:, None] * outputs)[place].sum(1))), self._is_close) or (
            "wrong_output", "is not Σ weight · output over a token's experts")
        # Each row has the output of one of the k experts alone.
        if code == "wrong_output" and all(
                any(self._is_close(row, each) for each in rows)
                for row, rows in zip(got, weighted, strict=True)):
            code, words = "added_once", ("has only one of a token's k outputs: an assignment by "
                                         "index writes the last one, and adds none")
        raise Wrong(f"{who}: the result {words}",
                    "index_add adds all rows that have the same index." if code == "added_once"
                    else _COMBINE, code=code)

    def judge_layer(self, route, dispatch, combine) -> None:
        """Raises Wrong unless they make the layer, of functions that are right alone."""
        case = self.case
        seed = int(torch.randint(2 ** 31, (), generator=self.generator))
        # The weights are drawn from the default generator, which is the student's.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layer = ExpertLayer(case.experts, HIDDEN, FFN, case.k, case.shared).to(case.dtype)
        found = []
        x = self._randn(case.tokens, HIDDEN)[None]  # (batch, sequence, hidden)
        upstream = self._randn(*x.shape)
        for forward in (layer, lambda x: _layer_of(layer, x, route, dispatch, combine)):
            given = x.clone().requires_grad_()
            layer.zero_grad()
            output = forward(given)
            (output * upstream).sum().backward()
            found.append({"output": output.detach(), "gradient of the input": given.grad, **{
                f"gradient of {name}": torch.zeros_like(p) if p.grad is None else p.grad
                for name, p in layer.named_parameters()}})
        # Invariant: what the three functions make is the layer as it is defined. Alone they were
        # judged before, so this fails where they do not fit each other.
        for name, want in found[0].items():
            if not self._is_close(found[1][name], want):
                raise Wrong(f"a layer of {case}: the {name} is not that of the loop over experts",
                            "Each function is right alone. Do they agree on `order`?",
                            code="wrong_layer")

    def _first(self, got, causes: Sequence[tuple], same: Callable) -> tuple[str, str] | None:
        return next(((code, words) for code, words, value in causes if same(got, value)), None)

    def _require_tensor(self, tensor, who, shape, dtype):
        if not isinstance(tensor, torch.Tensor):
            raise Wrong(f"{who}: {kind_of(tensor)}, not a tensor", code="wrong_type")
        if tuple(tensor.shape) != shape:
            raise Wrong(f"{who}: its shape is {list(tensor.shape)}, not {list(shape)}",
                        code="wrong_shape")
        if dtype is not None and tensor.dtype != dtype:
            raise Wrong(f"{who}: its dtype is {tensor.dtype}, not {dtype}",
                        "Outputs and weights have the dtype of what came in.", code="wrong_dtype")

    def _require_unchanged(self, tensor, before, who):
        if not torch.equal(tensor.detach(), before):
            raise Wrong(f"{who}: the function wrote into them", "Other lines of the layer read "
                        "them, too: make new tensors.", code="changes_input")

    def _judge_gradients(self, who, got, want, upstream, leaves, detached):
        """Backward through both; leaves: name -> (the answer's leaf, the check's)."""
        if not got.requires_grad:
            raise Wrong(f"{who}: autograd does not know what it was computed from", _DETACHED,
                        code=detached)
        got.backward(upstream)
        want.backward(upstream)
        for name, (leaf, ours) in leaves.items():
            if leaf.grad is None:
                raise Wrong(f"{who}: no gradient for {name}", _DETACHED, code=detached)
            # A gradient in bfloat16 is a sum whose terms cancel, in whatever order.
            if self.case.dtype != torch.bfloat16 and not self._is_close(leaf.grad, ours.grad):
                raise Wrong(f"{who}: the gradient of {name} is not right", _DETACHED,
                            code="wrong_gradient")


def _layer_of(layer, x, route, dispatch, combine) -> torch.Tensor:
    """The output of the layer, by the three functions, as the notebook's ExpertLayer computes."""
    tokens = x.flatten(0, -2)
    weights, chosen = route(layer.router(tokens), layer.k)
    copies, counts, order = dispatch(tokens, chosen, layer.router.out_features)
    outputs = layer.experts(copies, counts.tolist())
    result = combine(outputs, order, weights).view_as(x)
    return result if layer.shared_experts is None else result + layer.shared_experts(x)
