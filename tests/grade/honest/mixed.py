"""Right answers to exercise 4.5, in many styles: name -> (source of helper cells, source)."""


HEAD = "def mixed(model, optimizer_class, **settings):\n"


def _body(text: str, before: str = "", helper: str = "") -> tuple[str, str]:
    lines = "".join(f"    {line}\n" if line else "\n" for line in text.strip("\n").split("\n"))
    return helper, f"{before}{HEAD}{lines}"


_END = "return model, optimizer_class(model.parameters(), **settings)"
_SHARD = ("for block in lab.blocks(model):\n    fully_shard(block, mesh=lab.mesh(), mp_policy=p)\n"
          "fully_shard(model, mesh=lab.mesh(), mp_policy=p)\n")
_P = "p = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n"
_POLICIES = {
    "keywords": _P, "positional": "p = MixedPrecisionPolicy(torch.bfloat16, torch.float32)\n",
    "variables": "low, full = torch.bfloat16, torch.float32\n"
                 "p = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=full)\n",
    "float_": "p = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float)\n",
    "dictionary": "k = {'param_dtype': torch.bfloat16, 'reduce_dtype': torch.float32}\n"
                  "p = MixedPrecisionPolicy(**k)\n",
    "dict_": "k = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n"
             "p = MixedPrecisionPolicy(**k)\n",
    "cast": "p = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, "
            "cast_forward_inputs=True)\n",
    "replace": "import dataclasses\np = dataclasses.replace(MixedPrecisionPolicy(), "
               "param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n",
    "dtype_of_parameters": "p = MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
                           "reduce_dtype=next(model.parameters()).dtype)\n"}
ANSWERS = {name: _body(text + _SHARD + _END) for name, text in _POLICIES.items()}
_SHARDINGS = {
    "one_mesh": "mesh = lab.mesh()\nfor block in lab.blocks(model):\n"
                "    fully_shard(block, mesh=mesh, mp_policy=p)\n"
                "fully_shard(model, mesh=mesh, mp_policy=p)\n",
    "options": "o = dict(mesh=lab.mesh(), mp_policy=p)\nfor unit in lab.blocks(model):\n"
               "    fully_shard(unit, **o)\nfully_shard(model, **o)\n",
    "units": "for unit in [*lab.blocks(model), model]:\n"
             "    fully_shard(unit, mesh=lab.mesh(), mp_policy=p)\n",
    "chain": "for unit in itertools.chain(lab.blocks(model), [model]):\n"
             "    fully_shard(unit, mesh=lab.mesh(), mp_policy=p)\n",
    "partial": "wrap = functools.partial(fully_shard, mesh=lab.mesh(), mp_policy=p)\n"
               "for block in lab.blocks(model):\n    wrap(block)\nwrap(model)\n",
    "lambda_": "wrap = lambda m: fully_shard(m, mesh=lab.mesh(), mp_policy=p)\n"
               "for block in lab.blocks(model):\n    wrap(block)\nmodel = wrap(model)\n",
    "comprehension": "[fully_shard(b, mesh=lab.mesh(), mp_policy=p) for b in lab.blocks(model)]\n"
                     "fully_shard(model, mesh=lab.mesh(), mp_policy=p)\n",
    "nested": "def wrap(module):\n    return fully_shard(module, mesh=lab.mesh(), mp_policy=p)\n"
              "for block in lab.blocks(model):\n    wrap(block)\nmodel = wrap(model)\n",
    "enumerate_": "for _, block in enumerate(lab.blocks(model)):\n"
                  "    fully_shard(block, mesh=lab.mesh(), mp_policy=p)\n"
                  "fully_shard(model, mesh=lab.mesh(), mp_policy=p)\n",
    "reshard": "for block in lab.blocks(model):\n    fully_shard(block, mesh=lab.mesh(), "
               "mp_policy=p, reshard_after_forward=True)\n"
               "fully_shard(model, mesh=lab.mesh(), mp_policy=p)\n"}
_IMPORTS = "import functools\nimport itertools\n"
ANSWERS |= {name: _body(_P + text + _END, helper=_IMPORTS) for name, text in _SHARDINGS.items()}
_ENDS = {
    "optimizer_variable": "optimizer = optimizer_class(model.parameters(), **settings)\n"
                          "return model, optimizer",
    "list_of_parameters": "return model, optimizer_class(list(model.parameters()), **settings)",
    "params_keyword": "return model, optimizer_class(params=model.parameters(), **settings)",
    "group": "return model, optimizer_class([{'params': list(model.parameters())}], **settings)",
    "pair_in_brackets": "pair = (model, optimizer_class(model.parameters(), **settings))\n"
                        "return pair",
    "prints": "print(model)\nreturn model, optimizer_class(model.parameters(), **settings)",
    "assert_": "assert all(x.dtype == torch.float32 for x in model.parameters())\n" + _END}
ANSWERS |= {name: _body(_P + _SHARD + text) for name, text in _ENDS.items()}
ANSWERS |= {
    "global_policy": _body(_SHARD.replace("=p)", "=POLICY)") + _END,
                           helper=_P.replace("p =", "POLICY =", 1)),
    "helper_cell": _body("wrap_all(model)\n" + _END, helper="def wrap_all(model):\n"
                         + "".join(f"    {line}\n" for line in (_P + _SHARD).splitlines())),
    "typed": ("", "def mixed(model: torch.nn.Module, optimizer_class: type, **settings: object):\n"
                  "    \"\"\"A strategy.\"\"\"\n" + "".join(
                      f"    {line}\n" for line in (_P + _SHARD + _END).splitlines())),
    "other_names": ("", "def mixed(m, cls, **kw):\n" + "".join(
        f"    {line}\n" for line in (_P + _SHARD + _END).replace("optimizer_class", "cls").replace(
            "**settings", "**kw").replace("model", "m").splitlines())),
    "class_": _body("return Mixed().build(model, optimizer_class, settings)",
                    "class Mixed:\n    def build(self, model, optimizer_class, settings):\n"
                    + "".join(f"        {line}\n" for line in (_P + _SHARD + _END).splitlines())
                    + "\n\n"),
    "imported": _body(_P + _SHARD + _END, "from torch.distributed.fsdp import "
                      "MixedPrecisionPolicy, fully_shard\n"),
    "walrus": _body("fsdp = dict(mesh=(mesh := lab.mesh()), mp_policy=MixedPrecisionPolicy("
                    "torch.bfloat16, torch.float32))\nassert mesh is not None\n"
                    "for block in lab.blocks(model):\n    fully_shard(block, **fsdp)\n"
                    "fully_shard(model, **fsdp)\n" + _END)}
