"""How a code base cuts a model's layers into the stages of a pipeline."""

STAGES = ("equal", "by cost")


def layers_by_cost(layers: int, layer: float, head: float, stages: int) -> tuple[int, ...]:
    """Layers of each stage where every stage has about as many products as the next. layer, head:
    products of one layer and of the output head, in any unit.

    The blocks are laid out in their order, layers and then the head, and a stage is full as soon as
    it reaches its share of the whole (huggingface/nanotron, src/nanotron/models/base.py,
    build_model). So the first stages have more, and the last has the head.
    """
    found, done, stage = [0] * stages, 0.0, 0
    whole = layers * layer + head
    for _ in range(layers):
        found[stage] += 1
        done += layer
        # Measured memory says that a stage which has its share to the last product is full.
        if stage < stages - 1 and done >= whole * (stage + 1) / stages * (1 - 1e-12):
            stage += 1
    return tuple(found)
