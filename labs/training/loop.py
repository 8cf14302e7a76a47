"""The plain training loop. Every strategy runs under it, unchanged."""


def train(module, optimizer, batches, after_backward=None) -> list:
    """Trains on the batches; the loss of each step. `after_backward(step)` may look, not touch."""
    losses = []
    for step, batch in enumerate(batches):
        loss = module(**batch).loss
        loss.backward()
        if after_backward:
            after_backward(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
