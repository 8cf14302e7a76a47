"""Hints for slips in the API of exercises 2.2 to 2.9: a part of what Python or torch says, and how
the call is written."""

_SUPER = "Call super().__init__(module) before anything else in your __init__."
_BROADCAST = "The call is dist.broadcast(tensor, src=0); it writes into the tensor."
_ALL_REDUCE = ("The call is dist.all_reduce(tensor), or work = dist.all_reduce(tensor, "
               "async_op=True); both write the sum into the tensor.")
HOOK = ("The call is parameter.register_post_accumulate_grad_hook(f); later f(parameter) is "
         "called. It writes parameter.grad and returns None.")
_SET = ("`in` and == compare tensors by their values. Ask a set, as in "
        "self.ready.issuperset(bucket), or compare with `is`.")

API_HINTS = {
    "before Module.__init__() call": _SUPER,
    "has no attribute '_parameters'": _SUPER,
    "has no attribute '_modules'": _SUPER,
    "has no attribute '_backward_hooks'": _SUPER,
    "has no attribute '_forward_hooks'": _SUPER,
    "has no attribute '_in_backward'": "Call super().__init__(module, buckets) in your __init__.",
    "broadcast() got an unexpected": _BROADCAST,
    "broadcast() missing": _BROADCAST,
    "Must specify src": _BROADCAST,
    "Must specify global_rank": _BROADCAST,
    "all_reduce() got an unexpected": _ALL_REDUCE,
    "all_reduce() missing": _ALL_REDUCE,
    "a leaf Variable that requires grad is being used in an in-place operation":
        "Write into tensor.detach(): it has the same memory, and autograd does not record it.",
    "hooks should return None": HOOK,
    "register_post_accumulate_grad_hook() missing": HOOK,
    "'NoneType' object has no attribute 'wait'":
        "Only with async_op=True does the call return a handle; without it, it returns None.",
    "'NoneType' and 'int'": "Is it the gradient that is None, because this rank did not use the "
                            "parameter, or the result of a collective, which returns None?",
    "'NoneType' object has no attribute": "A gradient is None where this rank did not use the "
                                          "parameter: it sends zeros instead.",
    "expected Tensor as element": "A gradient is None where this rank did not use the parameter: "
                                  "it sends zeros instead.",
    "calls all_reduce of None": "A gradient is None where this rank did not use the parameter: "
                                "it sends zeros instead.",
    "attempting to assign a gradient of size": "Give each piece its parameter's shape back, as in "
                                               "piece.view_as(parameter).",
    "assigned grad has data of a different type": "The flat tensor has the bucket's dtype.",
    "attempting to assign a gradient with dtype": "The flat tensor has the bucket's dtype.",
    "The size of tensor a": _SET,
    "Boolean value of Tensor with more than one value": _SET,
}
